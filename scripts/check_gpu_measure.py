"""What the sections of check_gpu.py measure with: seconds of a call, the card's own limits, distance from an
oracle.
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

import kernels_pallas

_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used"
_SETS = 16
_SET_BYTES = 2**27  # inputs smaller than this are used in turns, so that no cache holds them


class Case(NamedTuple):
    """What is run, and what it is called."""

    name: str
    run: Callable[[], dict[str, Any]]  # what it found; `ok` False is a failure
    facts: dict[str, Any] = {}  # optional: an exception is no failure; shape and by: its place in the table


def unusable() -> str | None:
    """Why no kernel can run on this machine, or None."""
    here = kernels_pallas.device_impl()
    if here.impl != "xla":
        return None
    try:
        jax.local_devices(backend="cuda")
        return here.reason
    except RuntimeError as error:
        return (
            f"{here.reason} that jax sees ({str(error)[:120]}): pip install 'jax[cuda13]' where there is one,"
            " or run with --tiny"
        )


def machine(plan: SimpleNamespace) -> Iterator[Case]:
    """What this machine is, and the limits that all figures are held against."""
    device = jax.devices()[0]
    facts = {
        "device": device.device_kind,
        "platform": " ".join(device.client.platform_version.split()),
        "chosen": " ".join(kernels_pallas.device_impl()),
    }
    yield Case("device", lambda: facts)
    yield Case("nvidia-smi, idle", partial(clocks, "driver_version,name,power.limit," + _CLOCKS))
    yield from limit_cases(plan)
    yield Case("nvidia-smi, after the products", partial(clocks, _CLOCKS))


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
    """Bytes per second of a copy (read and written), or flops per second of a bfloat16 product."""
    if kind == "bytes":
        x = random(0, (2**12 if tiny else 2**29,), jnp.float32)
        return 1e3 * 2 * x.nbytes / timed(lambda x: x + 1, [(x,)], 2 if tiny else 20)["ms"]
    size = 64 if tiny else 8192
    args = random(0, (size, size), jnp.bfloat16), random(1, (size, size), jnp.bfloat16)
    return 1e3 * 2 * size**3 / timed(jnp.matmul, [args], 2 if tiny else 20)["ms"]


def random(seed: int, shape: Sequence[int], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)


def in_turns(args: tuple, tiny: bool) -> list[tuple]:
    """The arguments, and copies of them, until no cache of the card holds all."""
    size = sum(x.nbytes for x in jax.tree.leaves(args))
    count = 2 if tiny else int(np.clip(-(-_SET_BYTES // size), 1, _SETS))
    return [args, *(jax.tree.map(jnp.copy, args) for _ in range(count - 1))]


def timed(call: Callable, sets: list[tuple], calls: int, repetitions: int = 5) -> dict[str, Any]:
    """Median, least and most milliseconds of a call, and its result. A repetition is one program with many
    calls, which take the sets of arguments in turns.
    """
    rounds = max(1, calls // len(sets))

    @jax.jit
    def loop(sets):
        def body(i, _):
            # The barrier ties the arguments to the loop counter: nothing can be computed once for all calls.
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


def error_of(got: jax.Array, want: jax.Array) -> float:
    """Of ids the share that differ; else the largest distance of a row [..., H] from what it should be, over
    its length.
    """
    if want.dtype == jnp.int32:
        return float(np.mean(np.asarray(got) != np.asarray(want)))
    got, want = (np.asarray(x.astype(jnp.float32), np.float64).reshape(want.shape) for x in (got, want))
    no_number = np.isnan(got) & ~np.isfinite(want)  # XLA's max of NaN is NaN on one device, -inf on another
    off, size = (np.linalg.norm(np.where(no_number, 0, x), axis=-1) for x in (got - want, want))
    return float(np.max(np.where(off == 0, 0, off / np.maximum(size, 1e-30))))  # a row of zeros must be zeros
