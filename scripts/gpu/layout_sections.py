"""Section of check_gpu.py that compares kernels with their references: attention over pages, rings and
quantized keys, products with packed matrices, experts.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from gpu.section_cases import Case, max_error, random
from kernels_pallas import KeyBias, reference, reference_products
from kernels_pallas.key_layouts import quantize
from kernels_pallas.reference_products import Matrix

_PAGE = 64
_TOLERANCE = 2e-2  # relative to the norm of a row, in bfloat16


def layouts(plan: SimpleNamespace) -> Iterator[Case]:
    """Cases of attention by layout of the keys, of products by format, and of experts."""
    widths = (64,) if plan.tiny else (64, 128)
    queries = (2,) if plan.tiny else (1, 5, 17, 300)
    triton = "interpret" if plan.tiny else "triton"
    for keys in ("pages", "ring", "int8", "int4"):
        impls = (triton,) if plan.tiny or keys.startswith("int") else ("mosaic", triton)
        for impl, width, T in itertools.product(impls, widths, queries):
            error = partial(attention_error, impl, width, T, keys)
            yield _case(impl, f"attention {keys} {width}, {T} queries", error)
    for kind, rows in itertools.product(("bfloat16", "int8", "int4"), (3,) if plan.tiny else (1, 8, 64)):
        sizes = (96, 128) if plan.tiny else (4864, 896)
        error = partial(product_error, triton, kind, rows, *sizes)
        yield _case(triton, f"product {kind}, {rows} rows", error)
    for tokens in (3,) if plan.tiny else (1, 8, 64, 512):
        sizes = (4, 2, 32, 48) if plan.tiny else (128, 8, 768, 2048)
        error = partial(experts_error, triton, tokens, *sizes)
        yield _case(triton, f"experts, {tokens} tokens", error)


def _case(impl: str, name: str, error: Callable[[], float]) -> Case:
    def run() -> dict[str, Any]:
        if (reason := kernels_pallas.unavailable_reason(impl)) is not None:
            return {"skipped": reason, "ok": None}
        worst = error()
        quantity = "relative error of a row"
        return {"compared": quantity, "worst": worst, "tolerance": _TOLERANCE, "ok": worst <= _TOLERANCE}

    return Case(f"{name}, {impl}", run)


def attention_error(impl: str, width: int, T: int, keys: str) -> float:
    """The largest error over rows of different lengths. Unused pages are NaN."""
    B = 3
    N = 14
    K = 2
    pages = 12
    draws = np.random.default_rng(T)
    length_B = np.array([T, T + 301, pages * _PAGE], np.int32)
    options: dict[str, Any] = {"scale": width**-0.5, "sink_N": random(2, (N,), jnp.float32)}
    rows = 1 + B * pages
    if keys == "ring":
        options |= {"ring": True, "window": pages * _PAGE - T}
        rows = B
    else:
        table_BP = draws.permutation(np.arange(1, rows)).reshape(B, pages).astype(np.int32)
        used_BP = np.arange(pages) < -(-length_B[:, None] // _PAGE)
        options["table_BP"] = jnp.asarray(np.where(used_BP, table_BP, 0))
        unused = jnp.asarray(~np.isin(np.arange(rows), table_BP[used_BP]))[:, None, None, None]
    slots = pages * _PAGE if keys == "ring" else _PAGE
    k, v = (random(i, (rows, K, slots, width), jnp.bfloat16) for i in (3, 4))
    if keys in ("int8", "int4"):
        k, v = (quantize(x, int(keys[3:])) for x in (k, v))
        angles = random(5, (pages, width // 2), jnp.float32)
        options["key_bias"] = KeyBias(random(6, (K, _PAGE, width), jnp.float32), angles, angles)
        del options["sink_N"]
    elif keys == "pages":
        k, v = (jnp.where(unused, jnp.nan, x) for x in (k, v))
    if keys == "ring":
        length_B = length_B + 5 * _PAGE  # wrapped
    kernel = "decode_attention" if T <= 17 else "prefill_attention"
    args = random(1, (B, T, N, width), jnp.bfloat16), k, v, jnp.asarray(length_B - T), jnp.asarray(length_B)
    run = partial(kernels_pallas.run_kernel, impl, kernel, **options)
    got = jax.jit(run)(*args)
    return max_error(got, jax.jit(partial(reference.prefill_attention, **options))(*args))


def product_error(impl: str, kind: str, rows: int, outputs: int, inputs: int) -> float:
    """The error of norm, gate and up, and activation in one launch."""
    matrices = [_matrix(kind, seed, outputs, inputs) for seed in (1, 2)]
    norm_I = random(3, (inputs,), jnp.bfloat16)
    args = random(0, (rows, inputs), jnp.bfloat16), matrices, norm_I
    options = {"activation": "silu", "eps": 1e-6}
    (got,) = jax.jit(partial(kernels_pallas.run_kernel, impl, "product", **options))(*args)
    (want,) = jax.jit(partial(reference_products.product, **options))(*args)
    return max_error(got, want)


def _matrix(kind: str, seed: int, outputs: int, inputs: int) -> Matrix:
    key = jax.random.key(seed, impl="rbg")
    scale = inputs**-0.5
    if kind == "int8":
        values = jax.random.randint(key, (outputs, inputs), -127, 128).astype(jnp.int8)
        return Matrix(values, jnp.full(outputs, scale / 73, jnp.float32))
    if kind == "int4":
        Q = inputs // 64
        values = jax.random.randint(key, (Q, 32, outputs), 0, 256).astype(jnp.uint8)
        zero = jax.random.randint(key, (Q, outputs), 6, 10).astype(jnp.uint8)
        return Matrix(values, jnp.full((Q, outputs), scale / 4.6, jnp.float16), zero)
    return Matrix((random(seed, (outputs, inputs), jnp.float32) * scale).astype(jnp.bfloat16))


def experts_error(impl: str, tokens: int, X: int, U: int, F: int, D: int) -> float:
    """The error of the experts that random tokens choose."""
    x_MD = random(0, (tokens, D), jnp.bfloat16)
    weight_MU = jax.nn.softmax(random(1, (tokens, U), jnp.float32), -1)
    expert_MU = jnp.argsort(random(2, (tokens, X), jnp.float32), -1)[:, :U].astype(jnp.int32)
    shapes = (X, F, D), (X, F, D), (X, D, F)
    stacks = [
        (random(i + 3, shape, jnp.float32) * shape[2] ** -0.5).astype(jnp.bfloat16)
        for i, shape in enumerate(shapes)
    ]
    args = x_MD, weight_MU, expert_MU, *stacks
    run = partial(kernels_pallas.run_kernel, impl, "gated_experts", activation=jax.nn.silu)
    want = jax.jit(partial(_experts_one_by_one, activation=jax.nn.silu))
    return max_error(jax.jit(run)(*args), want(*args))


def _experts_one_by_one(x_MD, weight_MU, expert_MU, *stacks, activation) -> jax.Array:
    """The reference, of one expert after the other: all at once would take gigabytes."""

    def add(sum_MD, part):
        number, *matrices = part
        one = [matrix[None] for matrix in matrices]
        chosen_MU = jnp.where(expert_MU == number, 0, -1)
        return sum_MD + reference.gated_experts(x_MD, weight_MU, chosen_MU, *one, activation=activation), None

    zeros_MD = jnp.zeros(x_MD.shape, jnp.float32)
    return jax.lax.scan(add, zeros_MD, (jnp.arange(len(stacks[0])), *stacks))[0]


SECTIONS = {"layouts": layouts}
