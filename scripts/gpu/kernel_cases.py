"""The calls of kernels that `compile_programs.py --program=kernels` compiles: shapes of Qwen2.5, of
Qwen3-30B's experts and similar ones.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kernels_pallas
from kernels_pallas import KeyBias, Levels, Mxfp4
from kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from kernels_pallas.reference_products import FP8_BLOCK, Matrix, RowAdapters

SD = jax.ShapeDtypeStruct
_N = 14  # heads
_K = 2
_D = 896
_F = 4864
_V = 151936
_FLOATS = [(64, "float16"), *((width, "bfloat16") for width in (64, 80, 96, 128, 256))]


class KernelCase(NamedTuple):
    """One call of a kernel, on shapes."""

    name: str
    function: Callable
    shapes: Any


def kernel_cases(gpu: str) -> Iterator[KernelCase]:
    """All cases for a GPU."""
    for impl in ("mosaic", "triton") if gpu == "h200" else ("triton",):
        more = [(512, "bfloat16"), *((width, "float32") for width in (80, 128, 256, 512))]
        for width, dtype in _FLOATS + more * (impl == "triton"):
            yield from _attention_cases(impl, width, dtype)
        yield from _greedy_cases(impl)
    for width in (64, 128, 256, 512):
        for bits in (8, 4):
            yield from _quantized_attention_cases(width, bits)
    yield from _expert_cases()
    yield from _product_cases()
    yield from _append_cases()
    yield from _delta_cases()


def _attention_cases(impl: str, width: int, dtype: str) -> Iterator[KernelCase]:
    row = SD((4,), jnp.int32)
    slots = {"": (4, 4096), " ring": (4, 1152), " pages": (300, 64)}
    for variant, keys in [("", ""), ("", " pages"), ("", " ring"), (" window+cap", "")]:
        if width not in ((64, 128, 256, 512) if variant else (64, 128, 512) if keys == " ring" else (width,)):
            continue
        cache = SD((slots[keys][0], _K, slots[keys][1], width), dtype)
        options = dict(window=1024, soft_cap=30.0) if variant else {}
        options |= dict(ring=True, window=1024) if keys == " ring" else {}
        shapes = {"k_PKSH": cache, "v_PKSH": cache, "start_B": row, "length_B": row}
        if keys == " pages":
            shapes |= {"table_BP": SD((4, 64), jnp.int32), "sink_N": SD((_N,), jnp.float32)}
        for T in (1, 5, 17, 512) if keys else (1, 512):
            yield _attention_case(impl, f"{width} {dtype}{variant}{keys}", T, width, dtype, shapes, options)


def _quantized_attention_cases(width: int, bits: int) -> Iterator[KernelCase]:
    row = SD((4,), jnp.int32)
    pool = Levels(SD((300, _K, 64, width * bits // 8), jnp.uint8), SD((300, _K, 64, 2), jnp.float16))
    angles = SD((64, width // 2), jnp.float32)
    shapes = dict(k_PKSH=pool, v_PKSH=pool, start_B=row, length_B=row, table_BP=SD((4, 64), jnp.int32))
    if width <= 128:
        shapes["key_bias"] = KeyBias(SD((_K, 64, width), jnp.float32), angles, angles)
    for T in (1, 17, 512):
        yield _attention_case("triton", f"{width} int{bits} pages", T, width, "bfloat16", shapes, {})


def _attention_case(
    impl: str, label: str, T: int, width: int, dtype: str, shapes: dict[str, Any], options: dict[str, Any]
) -> KernelCase:
    kernel = "prefill_attention" if T == 512 else "decode_attention"
    many = f" {T} queries" if T in (5, 17) else ""

    def call(q_BTNH: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        run = partial(kernels_pallas.run_kernel, impl, kernel, scale=width**-0.5, **options)
        return run(q_BTNH, **arrays)

    return KernelCase(f"{impl} {kernel} {label}{many}", call, (SD((4, T, _N, width), dtype), shapes))


def _greedy_cases(impl: str) -> Iterator[KernelCase]:
    run = partial(kernels_pallas.run_kernel, impl)
    for dtype in ("float32", "bfloat16"):
        yield KernelCase(f"{impl} argmax {dtype}", partial(run, "argmax"), (SD((4, _V), dtype),))
    for rows, variant, extra in ((1, "", {}), (32, "", {}), (32, " cap", dict(soft_cap=30.0))):
        shapes = SD((rows, _D), "bfloat16"), SD((_V, _D), "bfloat16")
        name = f"{impl} lm_head_argmax {rows} rows{variant}"
        yield KernelCase(name, partial(run, "lm_head_argmax", **extra), shapes)
    if impl != "triton":
        return
    for rows in (1, 32, 64):
        shapes = SD((rows, _D), "bfloat16"), SD((_V, _D), "int8"), SD((_V,), "float32")
        name = f"{impl} int8_head_argmax {rows} rows"
        yield KernelCase(name, partial(run, "int8_head_argmax"), shapes)
    of_rows = SD((4, _V), "float32"), SD((4,), "float32"), SD((4, _V), "bool")
    bias = SD((4, _V), "float32"), SD((4,), "bool")
    for name, shapes in (("", of_rows), (" bias", (*of_rows, *bias))):
        yield KernelCase(f"{impl} summarize_logits{name}", partial(run, "summarize_logits"), shapes)


def _expert_cases() -> Iterator[KernelCase]:
    run = partial(kernels_pallas.run_kernel, "triton", "gated_experts", activation=jax.nn.silu)
    for tokens, dtype in zip((1, 200, 512, 64, 2048), ["bfloat16"] * 3 + ["float16"] * 2, strict=True):
        gate = SD((128, 768, 2048), dtype)
        choices = SD((tokens, 8), jnp.float32), SD((tokens, 8), jnp.int32)
        shapes = SD((tokens, 2048), dtype), *choices, gate, gate, SD((128, 2048, 768), dtype)
        yield KernelCase(f"triton gated_experts {tokens} tokens {dtype}", run, shapes)
    biases = SD((32, 2880), "bfloat16"), SD((32, 2880), "bfloat16"), SD((32, 2880), "bfloat16")
    packed = Mxfp4(SD((32, 90, 16, 2880), jnp.uint8), SD((32, 90, 2880), jnp.uint8))
    for kind, matrix in (("biases", SD((32, 2880, 2880), "bfloat16")), ("mxfp4", packed)):
        for tokens in (8, 64, 1024):
            choices = SD((tokens, 4), jnp.float32), SD((tokens, 4), jnp.int32)
            shapes = SD((tokens, 2880), "bfloat16"), *choices, *(matrix,) * 3, *biases
            name = f"triton gated_experts {tokens} tokens {kind}"
            yield KernelCase(name, partial(run, limit=7.0), shapes)
    for kind in ("int8", "int4", "fp8"):
        gate, down = (
            jax.tree.map(lambda x: SD((128, *x.shape), x.dtype), _matrix(kind, *shape))
            for shape in ((768, 2048), (2048, 768))
        )
        for tokens, dtype in (
            (1, "bfloat16"),
            (8, "bfloat16"),
            (64, "float16"),
            (512, "bfloat16"),
            (2048, "bfloat16"),
        ):
            choices = SD((tokens, 8), jnp.float32), SD((tokens, 8), jnp.int32)
            shapes = SD((tokens, 2048), dtype), *choices, gate, gate, down
            yield KernelCase(f"triton gated_experts {tokens} tokens {kind} {dtype}", run, shapes)


def _product_cases() -> Iterator[KernelCase]:
    run = partial(kernels_pallas.run_kernel, "triton", "product")
    for kind in ("bfloat16", "int8", "int4", "fp8"):
        for rows in (1, 8, 64, 512) if kind != "bfloat16" else (1, 8, 64):
            x_MI = SD((rows, _D), "bfloat16")
            norm_I = SD((_D,), "bfloat16")
            gated = [_matrix(kind, _F, _D)] * 2
            down = SD((rows, _F), "bfloat16"), [_matrix(kind, _D, _F)], None, SD((rows, _D), "bfloat16")
            up = (x_MI, gated, norm_I) if rows <= 64 else (x_MI, gated)
            name = f"triton product {kind} {rows} rows"
            yield KernelCase(f"{name} gate, up", partial(run, activation="silu", eps=1e-6), up)
            yield KernelCase(f"{name} down", run, down)
            if rows in (8, 64):
                adapters = RowAdapters(
                    SD((5, 16, _D), "bfloat16"), SD((5, _F, 16), "bfloat16"), SD((rows,), jnp.int32), 1.0
                )
                gated = [matrix._replace(adapters=adapters) for matrix in gated]
                up = (x_MI, gated, norm_I)
                yield KernelCase(f"{name} adapters", partial(run, activation="silu", eps=1e-6), up)

    ragged = SD((8, 300), "float16"), [_matrix("fp8", 200, 300)]
    yield KernelCase("triton product fp8 ragged", run, ragged)


def _append_cases() -> Iterator[KernelCase]:
    run = partial(kernels_pallas.run_kernel, "triton", "rope_append", capacity=4096)
    for name, rows, T, N, K, width, pairs, dtype in (
        ("64 bfloat16 1 row", 1, 1, _N, _K, 64, 32, "bfloat16"),
        ("128 bfloat16 64 rows", 64, 1, 28, 4, 128, 64, "bfloat16"),
        ("80 float16 17 tokens", 8, 17, 32, 32, 80, 10, "float16"),
        ("256 float32 64 queries of a key head", 8, 1, 64, 1, 256, 128, "float32"),
        ("512 bfloat16 8 rows", 8, 1, 8, 2, 512, 256, "bfloat16"),
        ("64 bfloat16 no RoPE", 8, 1, _N, _K, 64, 0, "bfloat16"),
    ):
        new = [SD((rows, T, heads, width), dtype) for heads in (N, K, K)]
        angles = [SD((rows, T, pairs), jnp.float32) if pairs else None] * 2
        numbers = [SD((rows,), jnp.int32)] * 2
        for layout, shape in {"": (rows, K, 4096, width), " pages": (300, K, 64, width)}.items():
            table = [SD((rows, 64), jnp.int32)] if layout else []

            def call(*args: Any, n: int = len(table)) -> Any:
                return run(*args[: len(args) - n], table_BP=args[-1] if n else None)

            levels = [SD((*shape[:3], width * bits // 8), jnp.uint8) for bits in (8, 4)]
            caches = [SD(shape, dtype), *(Levels(x, SD((*shape[:3], 2), jnp.float16)) for x in levels)]
            for kind, cache in zip(("", " int8", " int4"), caches, strict=True):
                shapes = (*new, *angles, cache, cache, *numbers, *table)
                yield KernelCase(f"triton rope_append {name}{kind}{layout}", call, shapes)


def _delta_cases() -> Iterator[KernelCase]:
    """T: tokens of a prompt; 1: a decode step; few: with as many draft slots."""
    for rows, T, K, N, H, Y, dtype in (
        (8, 1, 16, 32, 128, 128, "bfloat16"),  # Qwen3.5-9B and 35B-A3B, Qwen3-Next
        (64, 1, 16, 32, 128, 128, "bfloat16"),
        (1, 1, 16, 16, 128, 128, "float16"),  # Qwen3.5-0.8B
        (8, 1, 4, 12, 64, 256, "float32"),
        (2, 1, 4, 4, 256, 64, "float32"),
        (8, 5, 16, 32, 128, 128, "bfloat16"),
        (2, 3, 4, 4, 256, 64, "float32"),
        (1, 2048, 16, 32, 128, 128, "bfloat16"),
        (4, 512, 4, 12, 64, 64, "float16"),
        (4, 512, 8, 8, 128, 128, "float32"),
    ):
        sizes = K * H, K * H, N * Y, N * Y, N, N
        new = NewToken(*(SD((rows, size) if T == 1 else (rows, T, size), dtype) for size in sizes))
        taps = [SD((size, 4), dtype) for size in (K * H, K * H, N * Y)]
        weights = DeltaWeights(*taps, SD((N,), dtype), SD((N,), dtype), SD((Y,), dtype))
        is_draft = 1 < T < 64
        slots = 3 + T * is_draft
        states = (rows, K, slots, H), (rows, K, slots, H), (rows, N, slots, Y), (rows, N, H, Y)
        old = DeltaState(*(SD(shape, "float32") for shape in states))
        numbers = [SD((rows,), jnp.int32)] * 2
        kernel = "delta_step" if T == 1 else "delta_drafts" if is_draft else "delta_prefill"
        run = partial(kernels_pallas.run_kernel, "triton", kernel, eps=1e-6)
        if is_draft:
            numbers = [SD((rows, N, T, 2), "float32"), *numbers, numbers[0]]
            run = partial(run, holds=True)
        name = f"triton {kernel} {rows} rows, {N} heads of {H} and {Y} {dtype}"
        yield KernelCase(name, run, (new, weights, old, *numbers))


def _matrix(kind: str, outputs: int, inputs: int) -> Matrix:
    if kind == "int8":
        return Matrix(SD((outputs, inputs), jnp.int8), SD((outputs,), jnp.float32))
    if kind == "fp8":
        blocks = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
        return Matrix(SD((outputs, inputs), jnp.float8_e4m3fn), SD(blocks, jnp.float32))
    if kind == "int4":
        groups = SD((inputs // 64, outputs), jnp.float16), SD((inputs // 64, outputs), jnp.uint8)
        return Matrix(SD((inputs // 64, 32, outputs), jnp.uint8), *groups)
    return Matrix(SD((outputs, inputs), kind))
