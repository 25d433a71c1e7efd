"""Sections of check_gpu.py and check_tpu.py for kernels: their calls are compared with the references, and
timed. On GPUs XLA is timed too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.kernel_calls import KernelCall, kernel_calls
from gpu.section_cases import (
    Case,
    copies_beyond_cache,
    emulated,
    judged,
    limit,
    limit_cases,
    max_error,
    random,
    time_call,
)
from xinfer_jax import kernels_pallas
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.kernels_pallas.key_layouts import join
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

# N, K, H; D, V.
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
MODELS = {name: tuple(SHAPES[f"qwen2.5-{name}"][size] for size in _SIZES) for name in ("0.5b", "7b")}
MODELS["tiny"] = (4, 2, 64, 72, 151)
# Attention: rows, queries, length and capacity. Head: rows. Most important first.
TIMED = {
    "decode_attention": [  # K and V below the length are 256 MiB or more, except for a single row
        ("7b", 16, 1, 8192, 8192), ("0.5b", 64, 1, 8192, 8192),
        ("7b", 1, 1, 4096, 4096), ("0.5b", 1, 1, 4096, 4096),
        ("7b", 1, 1, 32768, 32768), ("0.5b", 1, 1, 32768, 32768),
        ("7b", 64, 1, 1024, 32768), ("0.5b", 256, 1, 1024, 8192),
    ],
    "prefill_attention": [(model, 1, T, T, T) for T in (8192, 2048) for model in ("7b", "0.5b")],
    "lm_head_argmax": [(model, rows) for rows in (1, 32, 8) for model in ("7b", "0.5b")],
    "argmax": [("0.5b", 448)],
}  # fmt: skip
TIMED_TINY = {
    "decode_attention": [("tiny", 2, 1, 1024, 1024)],
    "prefill_attention": [("tiny", 1, 128, 128, 128)],
    "lm_head_argmax": [("tiny", 2)],
    "argmax": [("tiny", 2)],
}
TARGET = {"prefill_attention": 0.6, "decode_attention": 0.85, "lm_head_argmax": 0.85, "argmax": 0.85}
_OUR_RESULTS: dict[str, jax.Array] = {}  # results of our kernel, by kernel and shape


def section(impl: str, *kernels: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """Yields the cases of one implementation of the kernels, at the models' shapes."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        runs = emulated(plan) or impl
        if (reason := kernels_pallas.unavailable_reason(runs)) is not None:
            yield Case("available", partial(skip, reason))
            return
        yield from limit_cases(plan)
        shapes = [(k, s) for k in kernels for s in (TIMED_TINY if plan.tiny else TIMED)[k]]
        if impl == "triton":
            shapes = [(k, s) for k, s in shapes if s in TIMED[k][:2] or plan.tiny]
        for kernel, shape in shapes:
            yield timing_case(plan, kernel, shape, impl, partial(ours, kernel, runs))
        if impl == "triton":
            return
        for kernel, shape in shapes:
            yield timing_case(plan, kernel, shape, "xla", partial(xla, kernel))

    return cases


def timing_case(plan: SimpleNamespace, kernel: str, shape: tuple, by: str, job: Callable) -> Case:
    name = " ".join([kernel, *map(str, shape)])
    facts = {"shape": name, "by": by}
    return Case(f"{name} {by}", partial(measure, plan, kernel, shape, by, job), facts)


def measure(plan: SimpleNamespace, kernel: str, shape: tuple, by: str, job: Callable) -> dict[str, Any]:
    """Returns milliseconds, the fraction of the device's limit, and the error against our kernel's result."""
    call, args = job(*arguments(kernel, *shape))
    work, kind = least_work(kernel, *shape)
    rate = limit(plan.tiny, kind)
    # Calls that take 20 ms at the limit; XLA may be far from the limit.
    calls = 2 if plan.tiny else int(np.clip((0.005 if by == "xla" else 0.02) * rate / work, 2, 200))
    sets = copies_beyond_cache(args, plan.tiny)
    megabytes = sum(x.nbytes for x in jax.tree.leaves(sets)) / 1e6  # if small, a GPU cache may hold all of it
    result = {"MB": megabytes} | time_call(call, sets, calls, 2 if plan.tiny else 5)
    out = jax.tree.leaves(result.pop("out"))[0]
    out = out[:, None] if kernel == "decode_attention" and out.ndim == 3 else out
    key = f"{kernel} {shape}"
    ours_out = _OUR_RESULTS.setdefault(key, out) if by != "xla" else _OUR_RESULTS.get(key, out)
    share = 1e3 * work / result["ms"] / rate
    off = max_error(out, ours_out)
    # A call faster than the limit was optimized out of the loop. Both results may have an error of 0.02.
    ok = bool(off <= 0.04 and (share < 1.25 or plan.tiny))
    target = {"target": TARGET[kernel]} if by == "mosaic" else {}
    return result | {"of_limit": share, "off": off, **target, "ok": ok}


def arguments(kernel: str, model: str, rows: int, T: int = 0, length: int = 0, capacity: int = 0) -> tuple:
    """Returns arguments of the reference, in bfloat16 (float32 logits for argmax)."""
    N, K, H, D, V = MODELS[model]
    if kernel == "argmax":
        return (random(0, (rows, V), jnp.float32),)
    if kernel == "lm_head_argmax":
        return random(0, (rows, D), jnp.bfloat16), random(1, (V, D), jnp.bfloat16)
    k, v = (jnp.tile(random(i, (1, K, capacity, H), jnp.bfloat16), (rows, 1, 1, 1)) for i in (1, 2))
    length_B = jnp.full(rows, length, jnp.int32)
    return random(0, (rows, T, N, H), jnp.bfloat16), k, v, length_B - T, length_B


def least_work(
    kernel: str, model: str, rows: int, T: int = 0, length: int = 0, capacity: int = 0
) -> tuple[float, str]:
    """Returns the least bytes or FLOP of the call, and which of the two."""
    N, K, H, D, V = MODELS[model]
    if kernel == "prefill_attention":
        return 2 * rows * N * H * T * length, "flops"
    sizes = {
        "argmax": 4 * rows * V,
        "lm_head_argmax": 2 * V * D,
        "decode_attention": 4 * rows * length * K * H,
    }
    return sizes[kernel], "bytes"


def ours(kernel: str, impl: str, *args: jax.Array) -> tuple[Callable, tuple]:
    scale = {"scale": args[0].shape[-1] ** -0.5} if kernel.endswith("attention") else {}
    if "tpu" in impl:
        (q, k, v, *lengths) = args
        args = (q, join(k, v), None, *lengths)
    return partial(kernels_pallas.run_kernel, impl, kernel, **scale), args


def xla(kernel: str, *args: jax.Array) -> tuple[Callable, tuple]:
    """Returns the product by XLA, as the library computes it without kernels."""
    if kernel == "argmax":
        return partial(jnp.argmax, axis=-1), args
    if kernel == "lm_head_argmax":
        return lambda x, w: jnp.argmax(jnp.dot(x, w.T, preferred_element_type=jnp.float32), -1), args
    return lambda q, k, v, start_B, length_B: attention(
        q,
        uncached_kv(k, v),
        VisibleKeys(start_B, length_B),
        Scoring(q.shape[-1] ** -0.5),
        run_config=RunConfig("xla"),
    ), args


def references(plan: SimpleNamespace) -> Iterator[Case]:
    """Yields cases of all calls that have a reference, with the implementations that this device has."""
    if plan.tiny or plan.platform == "tpu":
        impls = [emulated(plan) or "tpu"]
    else:
        impls = ["mosaic", "triton"]
    for impl in impls:
        reason = kernels_pallas.unavailable_reason(impl)
        for call in kernel_calls(impl):
            if call.has_reference:
                run = partial(compare, call) if reason is None else partial(skip, reason)
                yield Case(call.name, run)


def skip(reason: str) -> dict[str, Any]:
    return {"skipped": reason, "ok": None}


def compare(call: KernelCall) -> dict[str, Any]:
    return judged(call.error(), 1e-3 if "argmax" in call.kernel else 2e-2)


SECTIONS = {  # by platform
    "cuda": {
        "decode": section("mosaic", "decode_attention"),
        "prefill": section("mosaic", "prefill_attention"),
        "head": section("mosaic", "lm_head_argmax", "argmax"),
        "references": references,
        "triton": section("triton", "decode_attention", "prefill_attention", "lm_head_argmax", "argmax"),
    },
    "tpu": {
        "references": references,
        "decode": section("tpu", "decode_attention"),
        "prefill": section("tpu", "prefill_attention"),
    },
}
