"""Sections of check_gpu.py and check_tpu.py for kernels: each kernel is compared with its reference, then
timed; on GPUs beside XLA.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.model_shapes import SHAPES

import kernels_pallas
from gpu.layout_errors import append_error, attention_error, delta_error, experts_error, product_error
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
from kernels_pallas import reference
from kernels_pallas.key_layouts import join
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.run_config import RunConfig
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
_OURS = ("mosaic", "triton", "tpu")
_OUR_RESULTS: dict[str, jax.Array] = {}  # results of our kernel, by kernel and shape


def section(impl: str, *kernels: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """The cases of one implementation of the kernels, at the models' shapes."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        runs = emulated(plan) or impl
        if (reason := kernels_pallas.unavailable_reason(runs)) is not None:
            yield Case("available", lambda: {"skipped": reason, "ok": None})
            return
        for kernel, model in itertools.product(kernels, ("tiny",) if plan.tiny else ("7b", "0.5b")):
            compare = partial(at_shape, plan, kernel, runs, model)
            yield Case(f"{kernel} against its reference, {model}", compare)
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


def timing_case(plan, kernel: str, shape: tuple, by: str, job: Callable, **facts: Any) -> Case:
    name = " ".join([kernel, *map(str, shape)])
    facts = {"shape": name, "by": by, **facts}
    return Case(f"{name} {by}", partial(measure, plan, kernel, shape, by, job), facts)


def measure(plan: SimpleNamespace, kernel: str, shape: tuple, by: str, job: Callable) -> dict[str, Any]:
    """Milliseconds, the fraction of the device's limit, and the error against our kernel's result."""
    call, args = job(*arguments(kernel, *shape), tiny=plan.tiny)
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
    ours_out = _OUR_RESULTS.setdefault(key, out) if by in _OURS else _OUR_RESULTS.get(key, out)
    share = 1e3 * work / result["ms"] / rate
    off = max_error(out, ours_out)
    # A call faster than the limit was optimized out of the loop. Both results may have an error of 0.02.
    ok = bool(off <= 0.04 and (share < 1.25 or plan.tiny))
    target = {"target": TARGET[kernel]} if by == "mosaic" else {}
    return result | {"of_limit": share, "off": off, **target, "ok": ok}


def arguments(kernel: str, model: str, rows: int, T: int = 0, length: int = 0, capacity: int = 0) -> tuple:
    """Arguments of the reference, in bfloat16 (float32 logits for argmax)."""
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
    """The least bytes or FLOP of the call, and which of the two."""
    N, K, H, D, V = MODELS[model]
    if kernel == "prefill_attention":
        return 2 * rows * N * H * T * length, "flops"
    sizes = {
        "argmax": 4 * rows * V,
        "lm_head_argmax": 2 * V * D,
        "decode_attention": 4 * rows * length * K * H,
    }
    return sizes[kernel], "bytes"


# --- timed functions: from the reference's arguments to a function and its arguments ------------------------


def ours(kernel: str, impl: str, *args: jax.Array, tiny: bool) -> tuple[Callable, tuple]:
    scale = {"scale": args[0].shape[-1] ** -0.5} if kernel.endswith("attention") else {}
    if "tpu" in impl:
        (q, k, v, *lengths) = args
        args = (q, join(k, v), None, *lengths)
    return partial(kernels_pallas.run_kernel, impl, kernel, **scale), args


def xla(kernel: str, *args: jax.Array, tiny: bool) -> tuple[Callable, tuple]:
    """The product by XLA, as the library computes it without kernels."""
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


# --- comparison with the references -------------------------------------------------------------------------


def at_shape(plan: SimpleNamespace, kernel: str, impl: str, model: str) -> dict[str, Any]:
    """Compares one call at a model's heads and widths, with rows of different lengths."""
    draws = np.random.default_rng(plan.seed)
    (N, K, H, D, V) = MODELS[model]
    if kernel.endswith("attention"):
        max_lengths = (20, 40) if plan.tiny else (300, 2000)
        case = attention_case(draws, *max_lengths, H, N // K, K=K)
        case = decode_case(case) if kernel == "decode_attention" else case
    else:
        case = argmax_case(draws, 5, V) if kernel == "argmax" else lm_head_case(plan.seed, 32, D, V)
    return compare_with_reference(kernel, impl, "float32" if kernel == "argmax" else "bfloat16", [case])


def compare_with_reference(kernel: str, impl: str, dtype: str, cases: list[tuple]) -> dict[str, Any]:
    """The largest error of a kernel over the cases."""
    is_attention = kernel.endswith("attention")
    # The head's kernels sum in float32.
    tolerance = 1e-5 if dtype == "float32" else 2e-2 if is_attention else 1e-3
    errors = []
    end = time.monotonic() + 30
    for inputs, options in cases:
        if errors and time.monotonic() > end:
            break
        args = [jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for x in inputs]
        try:
            kernels_pallas.select(kernel, impl, *(x for x in args if x.dtype == dtype))
        except ValueError as error:
            return {"skipped": str(error), "ok": None}
        got = jax.jit(partial(kernels_pallas.run_kernel, impl, kernel, **options))(*args)
        expected = jax.jit(partial(getattr(reference, kernel), **options))
        want = expected(*(x.astype(jnp.float32) if x.dtype == dtype else x for x in args))
        # np.max keeps NaN, which then fails.
        worst = np.max([*map(max_error, jax.tree.leaves(got), jax.tree.leaves(want))])
        errors.append((worst, f"{[x.shape for x in args[:2]]} {options}"))
    worst = int(np.argmax([error for error, _ in errors]))
    quantity = "relative error of a row" if is_attention else "fraction of ids, log-probabilities"
    facts = {"cases": f"{len(errors)}/{len(cases)}", "worst_at": errors[worst][1]}
    return facts | judged(float(errors[worst][0]), tolerance, quantity)


def attention_case(
    draws, max_T: int, max_S: int, H: int, G: int, i: int = 0, K: int = 2
) -> tuple[tuple, dict]:
    """Rows of length 0, 1, S and between, with NaN beyond the length. The number i decides on window and soft
    cap.
    """
    T, S = (int(draws.integers(2, largest)) for largest in (max_T, max_S))
    window = int(draws.integers(1, S)) if i % 2 else None
    soft_cap = 10.0 if i % 4 > 1 else None
    length_B = np.array([0, 1, S, *draws.integers(1, S, 2)], np.int32)
    start_B = np.array([0, 0, max(0, S - T), *(draws.integers(0, n) for n in length_B[3:])], np.int32)
    q_BTNH, k_BKSH, v_BKSH = (
        draws.standard_normal((5, *axes, H), np.float32) for axes in ((T, K * G), (K, S), (K, S))
    )
    for b, length in enumerate(length_B):
        k_BKSH[b, :, length:] = v_BKSH[b, :, length:] = np.nan
    options = {"scale": H**-0.5, "window": window, "soft_cap": soft_cap}
    return (q_BTNH, k_BKSH, v_BKSH, start_B, length_B), options


def decode_case(case: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """The attention case with only its first query, as the last token of its row."""
    (q, k, v, _, length_B), options = case
    return (q[:, :1], k, v, length_B - 1, length_B), options


def argmax_case(draws: np.random.Generator, B: int, V: int) -> tuple[tuple, dict]:
    """Rows with many equal numbers; a row with NaN, a row of zeros of both signs, a row of -inf."""
    x_BV = draws.standard_normal((B, V), np.float32).round(1)
    x_BV[1:2, draws.integers(0, V, 2)] = np.nan
    x_BV[2:3] = np.copysign(0, x_BV[2:3])
    x_BV[3:4] = -np.inf
    return (x_BV,), {}


def lm_head_case(seed: int, B: int, D: int, V: int, nans: int = 0) -> tuple[tuple, dict]:
    """Integers, whose sums are exact in any order. Every row of the matrix occurs twice, so every maximum
    does too. They are drawn on the device: on the host that takes longer than the check.
    """
    x_BD, weight_VD = (
        jax.random.randint(jax.random.key(seed, impl="rbg"), shape, -1, 2).astype(jnp.float32)
        for shape in ((B, D), (V, D))
    )
    weight_VD = weight_VD[jnp.arange(V) % -(-V // 2)]
    return (x_BD / 8, weight_VD.at[V // 3 : V // 3 + nans].set(jnp.nan)), {}


def odd(plan: SimpleNamespace) -> Iterator[Case]:
    """Compares every kernel at odd sizes and capacities, with windows and soft caps, in every dtype."""
    draws = np.random.default_rng(plan.seed)
    tiny = plan.tiny
    widths = (64,) if tiny else (128, 64, 96, 80, 256)
    max_lengths = (20, 40) if tiny else (200, 500)
    groups = (4,) if tiny else (7, 1, 4)
    rows = ((5, 1001),) if tiny else ((1, 1), (3, 7), (5, 1001), (33, 4097), (7, 151936))
    heads = [(3, 72, 151), (1, 896, 151), (5, 72, 1001), (33, 1024, 4099, 1), (70, 128, 777), (2, 896, 20011)]
    heads = heads[:1] if tiny else heads[1:]
    dtypes = ("float16",) if tiny else ("float16", "bfloat16", "float32")
    impls = ("interpret",) if tiny else ("mosaic", "triton")
    attentions = [
        attention_case(draws, *max_lengths, H, G, i)
        for i, (H, G) in enumerate(itertools.product(widths, groups))
    ]
    every = {
        "decode_attention": [decode_case(case) for case in attentions],
        "prefill_attention": attentions,
        "lm_head_argmax": [lm_head_case(plan.seed, *shape) for shape in heads],
        "argmax": [argmax_case(draws, *shape) for shape in rows],
    }
    for impl, dtype, kernel in itertools.product(impls, dtypes, every):
        # All cases in the first dtype, every fourth one in the others.
        some = every[kernel][:: 4 if dtype != dtypes[0] and kernel.endswith("attention") else 1]
        run = partial(compare_with_reference, kernel, impl, dtype, some)
        yield Case(f"{kernel} {impl} {dtype}", if_available(impl, run))


def if_available(impl: str, run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The run of a case, or a reason why this process cannot run the implementation."""
    reason = kernels_pallas.unavailable_reason(impl)
    return run if reason is None else lambda: {"skipped": reason, "ok": None}


# --- layouts of the cache, formats of matrices --------------------------------------------------------------


def has_width(case: tuple[str, int, int]) -> bool:
    """Whether the implementation of (implementation, head width, queries) takes heads so wide."""
    return case[0] != "mosaic" or case[1] <= 256


def layouts(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases by layout of the cache, head width and number of queries; of linear attention; on GPUs also of
    products by format, and of experts.
    """

    def case(name: str, impl: str, error: Callable, *args: Any) -> Case:
        return Case(f"{name}, {impl}", if_available(impl, lambda: judged(error(impl, *args), 2e-2)))

    on_tpu = plan.platform == "tpu"
    triton = emulated(plan) or "triton"
    widths = (64,) if plan.tiny else (64, 128, 256, 512) if on_tpu else (64, 128, 512)
    for keys in ("rows", "pages", "ring", "int8") if on_tpu else ("pages", "ring", "int8", "int4"):
        impls = [emulated(plan) or "tpu"] if on_tpu else [triton]
        if not (on_tpu or plan.tiny or keys.startswith("int")):
            impls.append("mosaic")
        cases = itertools.product(impls, widths, (2,) if plan.tiny else (1, 5, 17, 300))
        for impl, width, T in filter(has_width, cases):
            name = f"{keys} {width}, {T} queries"
            yield case(f"attention {name}", impl, attention_error, keys, width, T)
            if on_tpu and T <= 17:
                yield case(f"append {name}", impl, append_error, keys, width, T)
    kinds = ("adapters",) if on_tpu else ("bfloat16", "int8", "int4", "adapters")
    for kind, rows in itertools.product(kinds, (3,) if plan.tiny else (1, 8, 64)):
        sizes = (96, 128) if plan.tiny else (4864, 896)
        impl = impls[0] if on_tpu else triton
        yield case(f"product {kind}, {rows} rows", impl, product_error, kind, rows, *sizes)
    for rows in (3,) if plan.tiny else (1, 8, 64):
        heads = (1, 2, 128) if plan.tiny else (16, 32, 128)
        impl = impls[0] if on_tpu else triton
        yield case(f"linear attention, {rows} rows", impl, delta_error, rows, *heads)
    if on_tpu:
        return
    for tokens in (3,) if plan.tiny else (1, 8, 64, 512):
        sizes = (4, 2, 32, 48) if plan.tiny else (128, 8, 768, 2048)
        yield case(f"experts, {tokens} tokens", triton, experts_error, tokens, *sizes)


def tpu_attention(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of layouts, then times over a contiguous cache."""
    yield from layouts(plan)
    yield from limit_cases(plan)
    for kernel in ("decode_attention", "prefill_attention"):
        for shape in (TIMED_TINY if plan.tiny else TIMED)[kernel]:
            yield timing_case(plan, kernel, shape, "tpu", partial(ours, kernel, emulated(plan) or "tpu"))


SECTIONS = {  # by platform
    "cuda": {
        "decode": section("mosaic", "decode_attention"),
        "prefill": section("mosaic", "prefill_attention"),
        "head": section("mosaic", "lm_head_argmax", "argmax"),
        "layouts": layouts,
        "triton": section("triton", "decode_attention", "prefill_attention", "lm_head_argmax", "argmax"),
        "odd": odd,
    },
    "tpu": {"attention": tpu_attention},
}
