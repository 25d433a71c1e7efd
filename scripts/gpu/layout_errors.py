"""Errors of kernels against their references: attention and the append over layouts of the cache, products
with packed matrices, experts, linear attention. Arguments begin with the implementation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from gpu.section_cases import max_error, random
from kernels_pallas import KeyBias, reference, reference_append, reference_delta, reference_products
from kernels_pallas.key_layouts import join, quantize
from kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from kernels_pallas.reference_products import Matrix, RowAdapters

_PAGE = 64
_PAGES = 12  # of the longest row


def _cache(impl: str, keys: str, width: int, T: int) -> tuple[Any, Any, np.ndarray, dict[str, Any]]:
    """Keys and values of three rows with two key heads; their lengths; options of kernels. Unused pages are
    NaN.
    """
    B = 3
    length_B = np.array([T, T + 301, _PAGES * _PAGE], np.int32)
    options: dict[str, Any] = {}
    paged = keys in ("pages", "int8", "int4")
    rows = 1 + B * _PAGES if paged else B
    slots = _PAGE if paged else _PAGES * _PAGE
    k, v = (random(i, (rows, 2, slots, width), jnp.bfloat16) for i in (3, 4))
    if paged:
        draws = np.random.default_rng(T)
        table_BP = draws.permutation(np.arange(1, rows)).reshape(B, _PAGES).astype(np.int32)
        used_BP = np.arange(_PAGES) < -(-length_B[:, None] // _PAGE)
        options["table_BP"] = jnp.asarray(np.where(used_BP, table_BP, 0))
        unused = jnp.asarray(~np.isin(np.arange(rows), table_BP[used_BP]))[:, None, None, None]
    if keys == "pages":
        k, v = (jnp.where(unused, jnp.nan, x) for x in (k, v))
    if keys.startswith("int"):
        k, v = (quantize(x, int(keys[3:])) for x in (k, v))
    if keys == "ring":
        options["ring"] = True
        length_B = length_B + 5 * _PAGE  # wrapped
    return *((join(k, v), None) if "tpu" in impl else (k, v)), length_B, options


def attention_error(impl: str, keys: str, width: int, T: int) -> float:
    """The largest error over rows of different lengths."""
    k, v, length_B, options = _cache(impl, keys, width, T)
    options["scale"] = width**-0.5
    if keys == "ring":
        options["window"] = _PAGES * _PAGE - T
    if keys.startswith("int") and "tpu" not in impl:
        angles = random(5, (_PAGES, width // 2), jnp.float32)
        options["key_bias"] = KeyBias(random(6, (2, _PAGE, width), jnp.float32), angles, angles)
    else:
        options["sink_N"] = random(2, (14,), jnp.float32)
    kernel = "decode_attention" if T <= 17 else "prefill_attention"
    q_BTNH = random(1, (3, T, 14, width), jnp.bfloat16)
    args = q_BTNH, k, v, jnp.asarray(length_B - T), jnp.asarray(length_B)
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, kernel, **options))(*args)
    return max_error(got, jax.jit(partial(reference.prefill_attention, **options))(*args))


def append_error(impl: str, keys: str, width: int, T: int) -> float:
    """The largest difference between numbers of the caches after the append, relative to the largest number;
    NaN equals NaN.
    """
    k, v, length_B, options = _cache(impl, keys, width, T)
    options["capacity"] = _PAGES * _PAGE if keys != "ring" else 100 * _PAGE
    q_BTNH = random(1, (3, T, 14, width), jnp.bfloat16)
    k_BTKH, v_BTKH = (random(i, (3, T, 2, width), jnp.bfloat16) for i in (5, 6))
    angles = random(7, (3, T, width // 2), jnp.float32)
    num_tokens_B = jnp.asarray([T, max(T - 1, 1), T])
    args = q_BTNH, k_BTKH, v_BTKH, jnp.cos(angles), jnp.sin(angles), k, v
    args = *args, jnp.asarray(length_B - T), num_tokens_B
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, "rope_append", **options))(*args)
    want = jax.jit(partial(reference_append.rope_append, **options))(*args)
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
        off = np.where(np.isnan(x) & np.isnan(y), 0, np.abs(x - y))
        worst = max(worst, float(off.max() / np.nanmax(np.abs(y))))
    return worst


def product_error(impl: str, kind: str, rows: int, outputs: int, inputs: int) -> float:
    """The error of norm, gate and up, and activation in one launch. kind: a format, or "adapters" of rows."""
    matrices = [_matrix(kind, seed, outputs, inputs) for seed in (1, 2)]
    if kind == "adapters":
        a_NRI, b_NOR = (
            (random(i, shape, jnp.float32) * shape[2] ** -0.5).astype(jnp.bfloat16)
            for i, shape in ((4, (5, 16, inputs)), (5, (5, outputs, 16)))
        )
        adapters = RowAdapters(a_NRI, b_NOR, jnp.arange(rows) % 5 - 1, 1.0)
        matrices = [matrix._replace(adapters=adapters) for matrix in matrices]
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
    return max_error(jax.jit(run)(*args), jax.jit(_experts_one_by_one)(*args))


def _experts_one_by_one(x_MD, weight_MU, expert_MU, *stacks) -> jax.Array:
    """The reference, of one expert after the other: all at once would take gigabytes."""

    def add(sum_MD, part):
        number, *matrices = part
        one = [matrix[None] for matrix in matrices]
        chosen_MU = jnp.where(expert_MU == number, 0, -1)
        return sum_MD + reference.gated_experts(
            x_MD, weight_MU, chosen_MU, *one, activation=jax.nn.silu
        ), None

    zeros_MD = jnp.zeros(x_MD.shape, jnp.float32)
    return jax.lax.scan(add, zeros_MD, (jnp.arange(len(stacks[0])), *stacks))[0]


def delta_error(impl: str, rows: int, K: int, N: int, width: int) -> float:
    """The largest error of a step of linear attention, of results and states; each third row has no token."""
    widths = [heads * width for heads in (K, K, N)]
    new = [random(i, (rows, size), jnp.bfloat16) for i, size in enumerate((*widths, widths[2], N, N))]
    shapes = [*((size, 4) for size in widths), (N,), (N,), (width,)]
    weights = [random(i, shape, jnp.bfloat16) for i, shape in enumerate(shapes, 6)]
    shapes = [*((rows, heads, 3, width) for heads in (K, K, N)), (rows, N, width, width)]
    old = [random(i, shape, jnp.float32) for i, shape in enumerate(shapes, 12)]
    numbers = jnp.arange(rows) % 5, (jnp.arange(rows) % 3 > 0).astype(jnp.int32)
    args = NewToken(*new), DeltaWeights(*weights), DeltaState(*old), *numbers
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, "delta_step", eps=1e-6))(*args)
    want = jax.jit(partial(reference_delta.delta_step, eps=1e-6))(*args)
    return float(np.max([*map(max_error, jax.tree.leaves(got), jax.tree.leaves(want))]))
