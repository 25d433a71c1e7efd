"""Cases of check_gpu.py and check_tpu.py, and the functions with which they measure: time of a call, limits
of the device, error against a reference.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xinfer_jax import kernels_pallas

_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used"
_SETS = 16
_SET_BYTES = 2**27  # smaller inputs are copied and the copies alternate, so that no GPU cache holds them all


class Case(NamedTuple):
    """One check or measurement."""

    name: str
    run: Callable[[], dict[str, Any]]  # returns its results; `ok` False is a failure
    facts: dict[str, Any] = {}  # that are recorded too


def unusable_reason(platform: str) -> str | None:
    """Returns the reason why no kernel can run on this machine's devices of that platform, or None."""
    try:
        jax.local_devices(backend=platform)
    except RuntimeError as error:
        name, extra = {"cuda": ("NVIDIA GPU", "cuda13"), "tpu": ("TPU", "tpu")}[platform]
        return (
            f"no {name} here that jax sees ({str(error)[:120]}): pip install 'jax[{extra}]' if there is one,"
            " or run with --tiny"
        )
    selection = kernels_pallas.device_impl()
    return selection.reason if selection.impl == "xla" else None


def emulated(plan: SimpleNamespace) -> str | None:
    """Returns the implementation whose kernels --tiny emulates. None: kernels run on a device."""
    if not plan.tiny:
        return None
    return "interpret_tpu" if plan.platform == "tpu" else "interpret"


def machine(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields the device, and the limits that all results are compared with."""
    device = jax.devices()[0]
    facts = {
        "device": device.device_kind,
        "platform": " ".join(device.client.platform_version.split()),
        "chosen": " ".join(kernels_pallas.device_impl()),
    }
    yield Case("device", lambda: facts)
    if plan.platform != "cuda":
        yield from limit_cases(plan)
        return
    yield Case("nvidia-smi, idle", partial(clocks, "driver_version,name,power.limit," + _CLOCKS))
    yield from limit_cases(plan)
    yield Case("nvidia-smi, after the matmuls", partial(clocks, _CLOCKS))


def clocks(fields: str) -> dict[str, str]:
    if not shutil.which("nvidia-smi"):
        return {"skipped": "no nvidia-smi here", "ok": None}
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return dict(zip(fields.split(","), map(str.strip, out.split(",")), strict=False))


def limit_cases(plan: SimpleNamespace) -> Iterator[Case]:
    for kind, unit in (("bytes", "TB/s"), ("flops", "TFLOP/s")):
        yield Case(f"limit in {unit}", lambda kind=kind: {"rate": limit(plan.tiny, kind) / 1e12})


@cache
def limit(tiny: bool, kind: str) -> float:
    """Returns the bytes per second of a copy (reads and writes), or FLOP per second of a bfloat16 matmul."""
    if kind == "bytes":
        x = random(0, (2**12 if tiny else 2**29,), jnp.float32)
        return 1e3 * 2 * x.nbytes / time_call(lambda x: x + 1, [(x,)], 2 if tiny else 20)["ms"]
    size = 64 if tiny else 8192
    args = random(0, (size, size), jnp.bfloat16), random(1, (size, size), jnp.bfloat16)
    return 1e3 * 2 * size**3 / time_call(jnp.matmul, [args], 2 if tiny else 20)["ms"]


def random(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def copies_beyond_cache(args: tuple, tiny: bool) -> list[tuple]:
    """Returns the arguments, and copies of them that together do not fit into a cache of the GPU."""
    size = sum(x.nbytes for x in jax.tree.leaves(args))
    count = 2 if tiny else int(np.clip(-(-_SET_BYTES // size), 1, _SETS))
    return [args, *(jax.tree.map(jnp.copy, args) for _ in range(count - 1))]


def time_call(call: Callable, sets: list[tuple], calls: int, repetitions: int = 5) -> dict[str, Any]:
    """Returns median, minimum and maximum milliseconds of a call, and its result. A repetition is one program
    with many calls, which alternate between the sets of arguments.
    """
    rounds = max(1, calls // len(sets))

    @jax.jit
    def loop(sets):
        def body(i, _):
            # The barrier makes the arguments depend on the loop counter: XLA must not hoist a call out of it.
            return tuple(call(*lax.optimization_barrier((args, i))[0]) for args in sets)

        shapes = jax.eval_shape(body, 0, None)
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, rounds, body, start)

    compiled = loop.lower(sets).compile()
    out = jax.block_until_ready(compiled(sets))
    times: list[float] = []
    while len(times) < repetitions and (len(times) < 2 or rounds * len(sets) * sum(times) < 1000):
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(sets))
        times.append(1e3 * (time.perf_counter() - start) / rounds / len(sets))
    return {"ms": float(np.median(times)), "min": min(times), "max": max(times), "out": out[0]}


def max_error(got: jax.Array, want: jax.Array) -> float:
    """Returns the fraction of ids that differ or, for other arrays, the largest relative error of a row [...,
    H]: the norm of the difference over the norm of the expected row.
    """
    if want.dtype == jnp.int32:
        return float(np.mean(np.asarray(got) != np.asarray(want)))
    got, want = (np.asarray(x.astype(jnp.float32), np.float64).reshape(want.shape) for x in (got, want))
    both_nan = np.isnan(got) & ~np.isfinite(want)  # XLA's max of NaN is NaN on one device, -inf on another
    off, size = (np.linalg.norm(np.where(both_nan, 0, x), axis=-1) for x in (got - want, want))
    return float(np.max(np.where(off == 0, 0, off / np.maximum(size, 1e-30))))  # a row of zeros must be zeros


def judged(worst: float, tolerance: float, quantity: str = "relative error of a row") -> dict[str, Any]:
    """Returns the result of a comparison with a reference."""
    return {"compared": quantity, "worst": worst, "tolerance": tolerance, "ok": worst <= tolerance}
