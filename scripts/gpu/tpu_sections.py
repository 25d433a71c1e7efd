"""Section of check_tpu.py for kernels: attention and the append over all layouts of the cache, compared with
their references; attention is timed.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from gpu.kernel_sections import MODELS
from gpu.section_cases import (
    Case,
    copies_beyond_cache,
    emulated,
    limit,
    limit_cases,
    max_error,
    random,
    time_call,
)
from kernels_pallas import SideBySide, reference, reference_append
from kernels_pallas.key_layouts import join, quantize

_PAGE = 64
_TOLERANCE = 2e-2  # relative to the norm of a row, in bfloat16
_TIMED = (  # rows, queries, length
    ("7b", 16, 1, 8192), ("0.5b", 64, 1, 8192), ("7b", 1, 1, 32768), ("0.5b", 1, 1, 4096),
    ("7b", 1, 2048, 2048), ("0.5b", 1, 2048, 2048),
)  # fmt: skip


def attention(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases by layout of the cache, head width and number of queries, then times."""
    impl = emulated(plan) or "tpu"
    widths = (64,) if plan.tiny else (64, 128, 256)
    queries = (2,) if plan.tiny else (1, 5, 17, 300)
    for keys, width, T in itertools.product(("rows", "pages", "ring", "int8"), widths, queries):
        name = f"{keys} {width}, {T} queries"
        yield Case(f"attention, {name}", partial(against_reference, attention_error, impl, keys, width, T))
        if T <= 17:
            yield Case(f"append, {name}", partial(against_reference, append_error, impl, keys, width, T))
    yield from limit_cases(plan)
    for shape in (("tiny", 2, 1, 128),) if plan.tiny else _TIMED:
        yield Case(f"attention {shape}", partial(timed, plan, impl, *shape))


def against_reference(error: Any, *args: Any) -> dict[str, Any]:
    worst = error(*args)
    quantity = "relative error of a row"
    return {"compared": quantity, "worst": worst, "tolerance": _TOLERANCE, "ok": worst <= _TOLERANCE}


def cache(keys: str, width: int, T: int) -> tuple[SideBySide, np.ndarray, dict[str, Any]]:
    """A cache of three rows with two key heads; their lengths; options of kernels. Unused pages are NaN."""
    B = 3
    pages = 12
    length_B = np.array([T, T + 301, pages * _PAGE], np.int32)
    options: dict[str, Any] = {}
    paged = keys in ("pages", "int8")
    rows = 1 + B * pages if paged else B
    slots = _PAGE if paged else pages * _PAGE
    values = random(3, (rows, 2, slots, 2 * width), jnp.bfloat16)
    if paged:
        table_BP = np.random.default_rng(T).permutation(np.arange(1, rows)).reshape(B, pages).astype(np.int32)
        used_BP = np.arange(pages) < -(-length_B[:, None] // _PAGE)
        options["table_BP"] = jnp.asarray(np.where(used_BP, table_BP, 0))
        unused = jnp.asarray(~np.isin(np.arange(rows), table_BP[used_BP]))[:, None, None, None]
    if keys == "pages":
        values = jnp.where(unused, jnp.nan, values)
    if keys == "int8":
        k, v = (quantize(x, 8) for x in jnp.split(values, 2, -1))
        return join(k, v), length_B, options
    if keys == "ring":
        options |= {"ring": True}
        length_B = length_B + 5 * _PAGE  # wrapped
    return SideBySide(values), length_B, options


def attention_error(impl: str, keys: str, width: int, T: int) -> float:
    """The largest error over rows of different lengths."""
    kv, length_B, options = cache(keys, width, T)
    options |= {"scale": width**-0.5, "sink_N": random(2, (14,), jnp.float32)}
    if keys == "ring":
        options["window"] = kv.values.shape[2] - T
    kernel = "decode_attention" if T <= 17 else "prefill_attention"
    q_BTNH = random(1, (3, T, 14, width), jnp.bfloat16)
    args = q_BTNH, kv, None, jnp.asarray(length_B - T), jnp.asarray(length_B)
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, kernel, **options))(*args)
    return max_error(got, jax.jit(partial(reference.prefill_attention, **options))(*args))


def append_error(impl: str, keys: str, width: int, T: int) -> float:
    """The largest difference between numbers of the caches after the append, relative to the largest number;
    NaN equals NaN.
    """
    kv, length_B, options = cache(keys, width, T)
    options["capacity"] = 12 * _PAGE if keys != "ring" else 100 * _PAGE
    q_BTNH = random(1, (3, T, 14, width), jnp.bfloat16)
    k_BTKH, v_BTKH = (random(i, (3, T, 2, width), jnp.bfloat16) for i in (5, 6))
    angles = random(7, (3, T, width // 2), jnp.float32)
    num_tokens_B = jnp.asarray([T, max(T - 1, 1), T])
    args = q_BTNH, k_BTKH, v_BTKH, jnp.cos(angles), jnp.sin(angles), kv, None
    args = *args, jnp.asarray(length_B - T), num_tokens_B
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, "rope_append", **options))(*args)
    want = jax.jit(partial(reference_append.rope_append, **options))(*args)
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
        off = np.where(np.isnan(x) & np.isnan(y), 0, np.abs(x - y))
        worst = max(worst, float(off.max() / np.nanmax(np.abs(y))))
    return worst


def timed(plan: SimpleNamespace, impl: str, model: str, rows: int, T: int, length: int) -> dict[str, Any]:
    """Milliseconds over a contiguous cache, and the fraction of the device's limit: of bytes for one query,
    of operations for a prompt.
    """
    (N, K, H, *_) = MODELS[model]
    kv = SideBySide(random(1, (rows, K, length, 2 * H), jnp.bfloat16))
    length_B = jnp.full(rows, length, jnp.int32)
    args = random(0, (rows, T, N, H), jnp.bfloat16), kv, None, length_B - T, length_B
    kernel = "decode_attention" if T <= 17 else "prefill_attention"
    call = partial(kernels_pallas.run_kernel, impl, kernel, scale=H**-0.5)
    result = time_call(call, copies_beyond_cache(args, plan.tiny), 2 if plan.tiny else 50)
    result.pop("out")
    if T == 1:
        share = kv.values.nbytes / limit(plan.tiny, "bytes")
    else:
        share = 4 * rows * N * H * T * (length - T / 2) / limit(plan.tiny, "flops")
    return result | {"of_limit": 1e3 * share / result["ms"]}


SECTIONS = {"attention": attention}
