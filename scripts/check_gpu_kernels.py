"""The kernels' sections of check_gpu.py: each against its oracle, then timed, then what else there is timed
beside it.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_shapes import SHAPES
from check_gpu_measure import Case, error_of, in_turns, limit, limit_cases, random, timed

import kernels_pallas
from kernels_pallas import reference
from xinfer_jax.cache.kinds import fresh
from xinfer_jax.model.attention import attention

KERNELS = ("decode_attention", "prefill_attention", "lm_head_argmax", "argmax")
# N, K, H; D, V.
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
MODELS = {name: tuple(SHAPES[f"qwen2.5-{name}"][size] for size in _SIZES) for name in ("0.5b", "7b")}
MODELS["tiny"] = (4, 2, 64, 72, 151)
# Rows, queries, length and capacity; of the head rows. Most wanted first.
TIMED = {
    "decode_attention": [  # K and V below the length are 256 MiB or more, but for a single row
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
}
TIMED_TINY |= dict.fromkeys(("lm_head_argmax", "argmax"), [("tiny", 2)])
TARGET = {"prefill_attention": 0.6, "decode_attention": 0.85, "lm_head_argmax": 0.85, "argmax": 0.85}
TUNE = {  # what `kernels_pallas.run` takes beside an oracle's arguments, for Mosaic
    "decode_attention": [dict(splits=n) for n in (1, 4, 16)] + [dict(stages=2), dict(block=128, stages=2)],
    "prefill_attention": [dict(block=64, stages=4), dict(block=128, stages=2), dict(block=128, stages=3)],
}
_SEEN: dict[str, jax.Array] = {}  # what our kernel gave for a shape


def section(impl: str, *kernels: str) -> Callable[[SimpleNamespace], Iterator[Case]]:
    """The kernels of one implementation, at the models' shapes."""

    def cases(plan: SimpleNamespace) -> Iterator[Case]:
        runs = "interpret" if plan.tiny else impl
        if (reason := kernels_pallas.unavailable(runs)) is not None:
            yield Case("available", lambda: {"skipped": reason, "ok": None})
            return
        for kernel, model in itertools.product(kernels, ("tiny",) if plan.tiny else ("7b", "0.5b")):
            yield Case(f"{kernel} as its oracle, {model}", partial(at_shape, plan, kernel, runs, model))
        yield from limit_cases(plan)
        shapes = [(k, s) for k in kernels for s in (TIMED_TINY if plan.tiny else TIMED)[k]]
        if impl == "triton":
            shapes = [(k, s) for k, s in shapes if s in TIMED[k][:2] or plan.tiny]
        for kernel, shape in shapes:
            yield timing(plan, kernel, shape, impl, partial(ours, kernel, runs))
        if impl == "triton":
            return
        for kernel, shape in shapes:
            yield timing(plan, kernel, shape, "xla", partial(plain, kernel))
        for kernel, shape in shapes:
            for by, job in OTHERS.get(kernel, {}).items():
                yield timing(plan, kernel, shape, by, job, optional=True)

    return cases


def timing(plan, kernel: str, shape: tuple, by: str, job: Callable, **facts: Any) -> Case:
    name = " ".join([kernel, *map(str, shape)])
    facts = {"shape": name, "by": by, **facts}
    return Case(f"{name} {by}", partial(measured, plan, kernel, shape, by, job), facts)


def measured(plan: SimpleNamespace, kernel: str, shape: tuple, by: str, job: Callable) -> dict[str, Any]:
    """Milliseconds, share of what the card can do, and distance from what our kernel gave."""
    args = arguments(kernel, *shape)
    call, args = job(*args, tiny=plan.tiny)
    work, kind = floor(kernel, *shape)
    most = limit(plan.tiny, kind)
    # What the card could do in 20 ms; XLA may be far from that.
    calls = 2 if plan.tiny else int(np.clip((0.005 if by == "xla" else 0.02) * most / work, 2, 200))
    sets = in_turns(args, plan.tiny)
    megabytes = sum(x.nbytes for x in jax.tree.leaves(sets)) / 1e6  # where small, a cache may hold all
    found = {"MB": megabytes} | timed(call, sets, calls, 2 if plan.tiny else 5)
    out = jax.tree.leaves(found.pop("out"))[0]
    out = out[:, 0] if kernel == "decode_attention" and out.ndim == 4 else out
    key = f"{kernel} {shape}"
    ours_out = _SEEN.setdefault(key, out) if by in ("mosaic", "triton") else _SEEN.get(key, out)
    share = 1e3 * work / found["ms"] / most
    off = error_of(out, ours_out)
    # What outruns the card was left out of the loop; both may be 0.02 off.
    ok = None if by not in ("mosaic", "triton", "xla") else bool(off <= 0.04 and (share < 1.25 or plan.tiny))
    target = {"target": TARGET[kernel]} if by == "mosaic" else {}
    return found | {"of_limit": share, "off": off, **target, "ok": ok}


def arguments(kernel: str, model: str, rows: int, T: int = 0, length: int = 0, capacity: int = 0) -> tuple:
    """Of the oracle, in bfloat16 (the logits of argmax in float32)."""
    N, K, H, D, V = MODELS[model]
    if kernel == "argmax":
        return (random(0, (rows, V), jnp.float32),)
    if kernel == "lm_head_argmax":
        return random(0, (rows, D), jnp.bfloat16), random(1, (V, D), jnp.bfloat16)
    k, v = (jnp.tile(random(i, (1, K, capacity, H), jnp.bfloat16), (rows, 1, 1, 1)) for i in (1, 2))
    length_B = jnp.full(rows, length, jnp.int32)
    if kernel == "decode_attention":
        return random(0, (rows, N, H), jnp.bfloat16), k, v, length_B
    return random(0, (rows, T, N, H), jnp.bfloat16), k, v, length_B - T, length_B


def floor(
    kernel: str, model: str, rows: int, T: int = 0, length: int = 0, capacity: int = 0
) -> tuple[float, str]:
    """The bytes or flops that it cannot do without."""
    N, K, H, D, V = MODELS[model]
    if kernel == "prefill_attention":
        return 2 * rows * N * H * T * length, "flops"
    sizes = {
        "argmax": 4 * rows * V,
        "lm_head_argmax": 2 * V * D,
        "decode_attention": 4 * rows * length * K * H,
    }
    return sizes[kernel], "bytes"


# --- what is timed: of the oracle's arguments, a function and its arguments ---------------------------------


def ours(kernel: str, impl: str, *args: jax.Array, tiny: bool, **tiles: int) -> tuple[Callable, tuple]:
    scale = {"scale": args[0].shape[-1] ** -0.5} if kernel.endswith("attention") else {}
    return partial(kernels_pallas.run, impl, kernel, **scale, **tiles), args


def plain(kernel: str, *args: jax.Array, tiny: bool) -> tuple[Callable, tuple]:
    """By XLA alone, as the library does without kernels."""
    if kernel == "argmax":
        return partial(jnp.argmax, axis=-1), args
    if kernel == "lm_head_argmax":
        return lambda x, w: jnp.argmax(jnp.dot(x, w.T, preferred_element_type=jnp.float32), -1), args
    q, k, v, *start, length_B = args
    q = q[:, None] if kernel == "decode_attention" else q
    start_B = start[0] if start else length_B - 1
    return lambda q, k, v, start_B, length_B: attention(
        q, fresh(k, v), start_B=start_B, length_B=length_B, scale=q.shape[-1] ** -0.5, impl="xla"
    ), (q, k, v, start_B, length_B)


def _module(name: str) -> Any:
    return import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def _their_layout(q, k, v) -> tuple[jax.Array, ...]:
    """[B, T, N, H] and twice [B, S, K, H]."""
    return q if q.ndim == 4 else q[:, None], jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)


def cudnn_decode(q, k, v, length_B, *, tiny: bool) -> tuple[Callable, tuple]:
    return lambda q, k, v, length_B: jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=length_B, implementation="xla" if tiny else "cudnn"
    ), (*_their_layout(q, k, v), length_B)


def cudnn_prefill(q, k, v, start_B, length_B, *, tiny: bool) -> tuple[Callable, tuple]:
    run = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla" if tiny else "cudnn")
    return run, _their_layout(q, k, v)


def pallas_gqa(q, k, v, length_B, *, tiny: bool) -> tuple[Callable, tuple]:
    """The deprecated Triton kernel; it moves axes 1 and 2, so given our layout moved it copies nothing."""
    gqa = partial(_module("decode_attention").gqa, interpret=tiny)
    return lambda q, k, v, length_B: gqa(
        q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), kv_seq_len=length_B
    ), (q, k, v, length_B)


def pallas_paged(q, k, v, length_B, *, tiny: bool, page: int = 64) -> tuple[Callable, tuple]:
    """The deprecated Triton kernel, which scales nothing; the pages of a row lie one behind the other."""
    B, K, S, H = k.shape
    paged = partial(_module("paged_attention").paged_attention, interpret=tiny, pages_per_compute_block=1)
    k, v = (jnp.swapaxes(x.reshape(B, K, S // page, page, H), 0, 1).reshape(K, -1, page, H) for x in (k, v))
    table = jnp.arange(B * S // page, dtype=jnp.int32).reshape(B, -1)
    return paged, (q * q.shape[-1] ** -0.5, k, v, table, length_B)


def pallas_mha(q, k, v, start_B, length_B, *, tiny: bool) -> tuple[Callable, tuple]:
    """The deprecated Triton kernel; it shares no key heads, so they are repeated beforehand."""
    q, k, v = _their_layout(q, k, v)
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    mha = partial(_module("attention").mha, segment_ids=None, sm_scale=q.shape[-1] ** -0.5, causal=True)
    return partial(mha, interpret=tiny), (q, k, v)


def pallas_mosaic(q, k, v, start_B, length_B, *, tiny: bool) -> tuple[Callable, tuple]:
    """JAX's own kernel for Hopper; it scales nothing, and its tiles are float16 whatever it is given."""
    module = _module("attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    q, k, v = _their_layout(*(x.astype(jnp.float16) for x in (q * q.shape[-1] ** -0.5, k, v)))
    return lambda q, k, v: module.attention(q, k, v, config), (q, k, v)


def tokamax(q, k, v, *start_and_length: jax.Array, tiny: bool) -> tuple[Callable, tuple]:
    call = import_module("tokamax").dot_product_attention
    return partial(call, is_causal=len(start_and_length) > 1), _their_layout(q, k, v)


_TOKAMAX = {"tokamax": tokamax} if find_spec("tokamax") else {}
OTHERS = {
    "decode_attention": {"cudnn": cudnn_decode, "pallas gqa": pallas_gqa, "pallas paged": pallas_paged}
    | _TOKAMAX,
    "prefill_attention": {"cudnn": cudnn_prefill, "pallas mha": pallas_mha, "pallas mosaic": pallas_mosaic}
    | _TOKAMAX,
}


# --- against the oracles ------------------------------------------------------------------------------------


def at_shape(plan: SimpleNamespace, kernel: str, impl: str, model: str) -> dict[str, Any]:
    """One call at a model's heads and widths, lengths that differ from row to row."""
    draws = np.random.default_rng(plan.seed)
    (N, K, H, D, V) = MODELS[model]
    if kernel.endswith("attention"):
        most = (20, 40) if plan.tiny else (300, 2000)
        case = attention_case(draws, *most, H, N // K, K=K)
        case = decoding(case) if kernel == "decode_attention" else case
    else:
        case = argmax_case(draws, 5, V) if kernel == "argmax" else head_at_shape(plan.seed, 32, D, V)
    return compared(plan, kernel, impl, "float32" if kernel == "argmax" else "bfloat16", [case])


def compared(plan, kernel: str, impl: str, dtype: str, cases: list[tuple]) -> dict[str, Any]:
    """The worst error of a kernel over its cases."""
    # The head's kernels sum in float32.
    tolerance = 1e-5 if dtype == "float32" else 2e-2 if kernel.endswith("attention") else 1e-3
    errors = []
    shapes = []
    end = time.monotonic() + 30
    for inputs, options in cases:
        if errors and time.monotonic() > end:
            break
        args = [jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for x in inputs]
        try:
            kernels_pallas.select(kernel, impl, *(x for x in args if x.dtype == dtype))
        except ValueError as refusal:
            return {"skipped": str(refusal), "ok": None}
        got = jax.jit(partial(kernels_pallas.run, impl, kernel, **options))(*args)
        oracle = jax.jit(partial(getattr(reference, kernel), **options))
        want = oracle(*(x.astype(jnp.float32) if x.dtype == dtype else x for x in args))
        # NaN counts as most.
        errors.append(np.max([*map(error_of, jax.tree.leaves(got), jax.tree.leaves(want))]))
        shapes.append(
            f"{list(args[0].shape)} x {list(args[1].shape)}" if len(args) > 1 else str(args[0].shape)
        )
    worst = float(np.max(errors))
    where = {"worst_at": f"{shapes[int(np.argmax(errors))]} {cases[int(np.argmax(errors))][1]}"}
    what = (
        "rows by their length, relative"
        if kernel.endswith("attention")
        else "share of ids, log-probabilities"
    )
    found = {"cases": f"{len(errors)}/{len(cases)}", "compared": what, "worst": worst, "tolerance": tolerance}
    return found | where | {"ok": worst <= tolerance}


def attention_case(
    draws, most_T: int, most_S: int, H: int, G: int, i: int = 0, K: int = 2
) -> tuple[tuple, dict]:
    """Rows of length 0, 1, all and between, with NaN behind them; the i-th case decides on window and soft
    cap.
    """
    T, S = (int(draws.integers(2, most)) for most in (most_T, most_S))
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


def decoding(case: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """An attention case's first query alone, as the last of its row."""
    (q, k, v, _, length_B), options = case
    return (q[:, 0], k, v, length_B), options


def argmax_case(draws: np.random.Generator, B: int, V: int) -> tuple[tuple, dict]:
    """Many equal numbers; a row with NaN, one of zeros of both signs, one of -inf."""
    x_BV = draws.standard_normal((B, V), np.float32).round(1)
    x_BV[1:2, draws.integers(0, V, 2)] = np.nan
    x_BV[2:3] = np.copysign(0, x_BV[2:3])
    x_BV[3:4] = -np.inf
    return (x_BV,), {}


def lm_head_case(draws: np.random.Generator, B: int, D: int, V: int, nans: int) -> tuple[tuple, dict]:
    """Whole numbers, whose sums are the same in every order; rows of the matrix come twice, so every maximum
    does.
    """
    weight_VD = draws.integers(-1, 2, (V, D)).astype(np.float32)[np.arange(V) % -(-V // 2)]
    weight_VD[V // 3 : V // 3 + nans] = np.nan
    return (draws.integers(-1, 2, (B, D)).astype(np.float32) / 8, weight_VD), {}


def head_at_shape(seed: int, B: int, D: int, V: int) -> tuple[tuple, dict]:
    """The same on the device: on the host, numbers of this many take longer to make than to check."""
    x_BD, weight_VD = (
        jax.random.randint(jax.random.key(seed, impl="rbg"), shape, -1, 2).astype(jnp.float32)
        for shape in ((B, D), (V, D))
    )
    return (x_BD / 8, weight_VD[jnp.arange(V) % -(-V // 2)]), {}


def odd(plan: SimpleNamespace) -> Iterator[Case]:
    """Every kernel at odd sizes and capacities, with windows and soft caps, in every dtype."""
    draws = np.random.default_rng(plan.seed)
    widths, groups, most = (
        ((64,), (4,), (20, 40)) if plan.tiny else ((128, 64, 96, 80, 256), (7, 1, 4), (200, 500))
    )
    attentions = [
        attention_case(draws, *most, H, G, i) for i, (H, G) in enumerate(itertools.product(widths, groups))
    ]
    rows = ((5, 1001),) if plan.tiny else ((1, 1), (3, 7), (5, 1001), (33, 4097), (7, 151936))
    heads = [(3, 72, 151, 0)] if plan.tiny else [(1, 896, 151, 0), (5, 72, 1001, 0), (33, 1024, 4099, 1)]
    heads += [] if plan.tiny else [(70, 128, 777, 0), (2, 896, 20011, 0)]
    every = {
        "decode_attention": [decoding(case) for case in attentions],
        "prefill_attention": attentions,
        "lm_head_argmax": [lm_head_case(draws, *shape) for shape in heads],
        "argmax": [argmax_case(draws, *shape) for shape in rows],
    }
    dtypes, impls = (
        (("float16",), ("interpret",))
        if plan.tiny
        else (("float16", "bfloat16", "float32"), ("mosaic", "triton"))
    )
    for impl, dtype, kernel in itertools.product(impls, dtypes, every):
        # In the first dtype all, then every fourth one.
        some = every[kernel][:: 4 if dtype != dtypes[0] and kernel.endswith("attention") else 1]
        name = f"{kernel} {impl} {dtype}"
        if (reason := kernels_pallas.unavailable(impl)) is not None:
            yield Case(name, lambda reason=reason: {"skipped": reason, "ok": None})
        else:
            yield Case(name, partial(compared, plan, kernel, impl, dtype, some))


def tune(plan: SimpleNamespace) -> Iterator[Case]:
    """Other tile sizes of the Mosaic kernels; what one refuses is no failure."""
    yield from limit_cases(plan)
    impl, timed_shapes = ("interpret", TIMED_TINY) if plan.tiny else ("mosaic", TIMED)
    tiles = {"decode_attention": [dict(splits=2)]} if plan.tiny else TUNE
    for kernel, choices in tiles.items():
        for shape, choice in itertools.product(timed_shapes[kernel][:4], ({}, *choices)):
            label = " ".join(f"{key}={value}" for key, value in choice.items()) or "mosaic"
            job = partial(ours, kernel, impl, **choice)
            yield timing(plan, kernel, shape, label, job, optional=bool(choice))


SECTIONS = {
    "decode": section("mosaic", "decode_attention"),
    "prefill": section("mosaic", "prefill_attention"),
    "head": section("mosaic", "lm_head_argmax", "argmax"),
    "triton": section("triton", "decode_attention", "prefill_attention", "lm_head_argmax", "argmax"),
    "odd": odd,
    "tune": tune,
}
