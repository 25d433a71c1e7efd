"""Calls of all kernels, at shapes of Qwen2.5, of Qwen3-30B's experts and similar ones. check_gpu.py and
check_tpu.py compare each call with its reference, and `compile_programs.py --program=kernels` compiles it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu.section_cases import max_error, random
from xinfer_jax import kernels_pallas
from xinfer_jax.kernels_pallas import (
    KeyBias,
    Mxfp4,
    reference,
    reference_append,
    reference_delta,
    reference_mamba,
    reference_products,
)
from xinfer_jax.kernels_pallas.key_layouts import LANES, Latents, join, quantize
from xinfer_jax.kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from xinfer_jax.kernels_pallas.reference_mamba import MambaState, MambaToken, MambaWeights
from xinfer_jax.kernels_pallas.reference_products import FP8_BLOCK, Matrix, RowAdapters

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # in order, and by name
_PAGE = 64
_ROTATED = 64  # numbers of a latent key that are no values
_PAGES = 12  # of the longest row
# Where keys are, then head widths and dtypes. "window" is a contiguous cache too.
_ATTENTION = {
    "pages": [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (512, "bfloat16")],
    "rows": [(64, "float16"), (80, "bfloat16"), (96, "bfloat16"), (128, "bfloat16"), (128, "float32")],
    "ring": [(64, "bfloat16"), (128, "bfloat16"), (512, "bfloat16")],
    "window": [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (256, "float32")],
    "latents": [(576, "bfloat16"), (320, "bfloat16")],
    "int8": [(64, "bfloat16"), (128, "bfloat16"), (512, "bfloat16")],
    "int4": [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16")],
}
# Rows, tokens, heads, key heads, head width, pairs that RoPE rotates, dtype.
_APPENDS = {
    "64 bfloat16 1 row": (1, 1, 14, 2, 64, 32, "bfloat16"),
    "128 bfloat16 64 rows": (64, 1, 28, 4, 128, 64, "bfloat16"),
    "80 float16 17 tokens": (8, 17, 32, 32, 80, 10, "float16"),
    "256 float32 64 queries of a key head": (8, 1, 64, 1, 256, 128, "float32"),
    "512 bfloat16 8 rows": (8, 1, 8, 2, 512, 256, "bfloat16"),
    "64 bfloat16 no RoPE": (8, 1, 14, 2, 64, 0, "bfloat16"),
}
# Rows, tokens (1: a decode step, few: draft tokens), key heads, value heads, their widths, dtype.
_DELTAS = [
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
]
# Rows, tokens (1: a decode step), groups, heads, their width, size of the state, dtype.
_MAMBAS = [
    (8, 1, 8, 64, 64, 128, "bfloat16"),  # Nemotron-3-Nano
    (64, 1, 1, 48, 64, 128, "bfloat16"),  # Granite-4.0-H-Tiny
    (1, 1, 2, 32, 128, 256, "bfloat16"),  # Falcon-H1-34B
    (8, 1, 2, 6, 64, 64, "float32"),
    (2, 1, 1, 4, 256, 128, "float16"),
    (1, 2048, 8, 64, 64, 128, "bfloat16"),
    (1, 2048, 1, 48, 64, 128, "bfloat16"),
    (1, 2048, 2, 32, 128, 256, "bfloat16"),
    (4, 512, 2, 6, 64, 64, "float32"),
    (2, 512, 1, 4, 256, 256, "float16"),
]


class KernelCall(NamedTuple):
    """A call of a kernel. The arguments are drawn when it is run."""

    impl: str
    kernel: str
    label: str
    arguments: Callable[[], Arguments]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.impl} {self.kernel} {self.label}"

    @property
    def has_reference(self) -> bool:
        return self.kernel in REFERENCES

    def run(self, *args: Any, **arrays: Any) -> Any:
        return kernels_pallas.run_kernel(self.impl, self.kernel, *args, **arrays, **self.options)

    def error(self) -> float:
        """Returns the largest relative error of a row of the results."""
        args, arrays = self.arguments()
        got = jax.jit(self.run)(*args, **arrays)
        want = jax.jit(partial(REFERENCES[self.kernel], **self.options))(*args, **arrays)
        return float(np.max([*map(max_error, jax.tree.leaves(got), jax.tree.leaves(want))]))


def kernel_calls(impl: str) -> Iterator[KernelCall]:
    """Yields all calls of one implementation: mosaic, triton or tpu. Emulated ones (interpret, interpret_tpu)
    are few and small.
    """
    is_tpu = impl.endswith("tpu")
    is_tiny = impl.startswith("interpret")
    yield from _attention_calls(impl, is_tpu, is_tiny)
    if not is_tpu:
        yield from _greedy_calls(impl, is_tiny)
    if impl == "triton":
        yield from _sampler_calls(impl)
    if impl != "mosaic":
        yield from _append_calls(impl, is_tpu, is_tiny)
        yield from _product_calls(impl, is_tpu, is_tiny)
        yield from _delta_calls(impl, is_tpu, is_tiny)
        yield from _mamba_calls(impl, is_tpu, is_tiny)
    if impl in ("triton", "interpret"):
        yield from _expert_calls(impl, is_tiny)


# --- attention and the append to a cache --------------------------------------------------------------------


def _takes(impl: str, is_tpu: bool, keys: str, width: int, dtype: str) -> bool:
    """Returns True if an implementation supports such keys."""
    if keys == "latents":
        return impl != "mosaic"
    if is_tpu:
        return keys != "int4" and dtype == "bfloat16" and width in (64, 128, 256, 512)
    return impl != "mosaic" or not (keys.startswith("int") or width > 256 or dtype == "float32")


def _attention_calls(impl: str, is_tpu: bool, is_tiny: bool) -> Iterator[KernelCall]:
    for T, keys in itertools.product((2,) if is_tiny else (1, 300, 17), _ATTENTION):
        for width, dtype in _ATTENTION[keys][: 1 if is_tiny else None]:
            if not _takes(impl, is_tpu, keys, width, dtype):
                continue
            kernel = "prefill_attention" if T == 300 else "decode_attention"
            options: dict[str, Any] = dict(scale=width**-0.5)
            if keys == "window":
                options |= dict(window=100, soft_cap=30.0)
            if keys == "ring":
                options |= dict(ring=True, window=_PAGES * _PAGE - T)
            label = f"{width} {keys}" if keys.startswith("int") else f"{width} {dtype} {keys}"
            arguments = partial(_attention_arguments, is_tpu, keys, width, dtype, T)
            yield KernelCall(impl, kernel, label + f" {T} queries" * (T == 17), arguments, options)


def _attention_arguments(is_tpu: bool, keys: str, width: int, dtype: str, T: int) -> Arguments:
    k, v, length_B, arrays = _cache(is_tpu, keys, width, dtype, 3, T, 1 if keys == "latents" else 2)
    if keys.startswith("int") and width <= 128 and not is_tpu:
        angles = random(5, (_PAGES, width // 2), jnp.float32)
        arrays["key_bias"] = KeyBias(random(6, (2, _PAGE, width), jnp.float32), angles, angles)
    elif keys != "window":
        arrays["sink_N"] = random(2, (14,), jnp.float32)
    return (random(1, (3, T, 14, width), dtype), k, v, length_B - T, length_B), arrays


def _cache(
    is_tpu: bool, keys: str, width: int, dtype: str, B: int, T: int, K: int
) -> tuple[Any, Any, np.ndarray, dict[str, Any]]:
    """Returns keys and values of rows that end with T new tokens, their lengths, and the table of pages.
    Slots that no row has are NaN.
    """
    slots = _PAGES * _PAGE
    length_B = np.resize(np.array([T, T + 301, slots], np.int32), B)
    if keys == "ring":
        length_B = length_B + 5 * _PAGE  # wrapped
    is_paged = keys in ("pages", "latents", "int8", "int4")
    shape = (1 + B * _PAGES, K, _PAGE, width) if is_paged else (B, K, slots, width)
    k, v = (random(i, shape, dtype) for i in (3, 4))
    arrays = {}
    if is_paged:
        table_BP = np.random.default_rng(T).permutation(np.arange(1, shape[0])).reshape(B, _PAGES)
        is_used_BP = np.arange(_PAGES) < -(-length_B[:, None] // _PAGE)
        arrays["table_BP"] = jnp.asarray(np.where(is_used_BP, table_BP, 0), jnp.int32)
        is_used = np.isin(np.arange(shape[0]), table_BP[is_used_BP])[:, None, None, None]
    else:
        is_used = (np.arange(slots) < length_B[:, None])[:, None, :, None]
    if keys.startswith("int"):
        k, v = (quantize(x, int(keys[3:])) for x in (k, v))
    else:
        k, v = (jnp.where(is_used, x, jnp.nan).astype(dtype) for x in (k, v))
    if keys == "latents":
        zeros = -width % LANES if is_tpu else 0
        k = Latents(jnp.pad(k, [(0, 0)] * 3 + [(0, zeros)]), width - _ROTATED)
        return k, None, length_B, arrays
    return *((join(k, v), None) if is_tpu else (k, v)), length_B, arrays


def _append_calls(impl: str, is_tpu: bool, is_tiny: bool) -> Iterator[KernelCall]:
    for label, sizes in list(_APPENDS.items())[: 1 if is_tiny else None]:
        for keys in ("rows", "pages", "ring", "int8") if is_tpu else ("rows", "pages", "int8", "int4"):
            (*_, width, pairs, dtype) = sizes
            if not _takes(impl, is_tpu, keys, width, dtype) or is_tpu and 2 * pairs != width:
                continue
            capacity = (100 if keys == "ring" else _PAGES) * _PAGE
            options = dict(capacity=capacity, ring=keys == "ring")
            arguments = partial(_append_arguments, is_tpu, keys, sizes)
            yield KernelCall(impl, "rope_append", f"{label} {keys}", arguments, options)
    sizes = 8, 1, 20, 1, 576, 0, "bfloat16"
    arguments = partial(_append_arguments, is_tpu, "latents", sizes)
    yield KernelCall(impl, "rope_append", "576 bfloat16 latents", arguments, dict(capacity=_PAGES * _PAGE))


def _append_arguments(is_tpu: bool, keys: str, sizes: tuple) -> Arguments:
    B, T, N, K, width, pairs, dtype = sizes
    k, v, length_B, arrays = _cache(is_tpu, keys, width, dtype, B, T, K)
    new = [random(i, (B, T, heads, width), dtype) for i, heads in enumerate((N, K, K), 5)]
    angles = random(8, (B, T, pairs), jnp.float32)
    turns = [jnp.cos(angles), jnp.sin(angles)] if pairs else [None, None]
    num_tokens_B = np.maximum(T - np.arange(B) % 2, 1).astype(np.int32)
    return (*new, *turns, k, v, length_B - T, num_tokens_B), arrays


# --- the greedy token and the sampler -----------------------------------------------------------------------


def _greedy_calls(impl: str, is_tiny: bool) -> Iterator[KernelCall]:
    D, V = (72, 151) if is_tiny else (896, 151936)
    for dtype in ("float32", "bfloat16"):
        yield KernelCall(impl, "argmax", dtype, partial(_argmax_arguments, V, dtype), {})
    for rows, label, options in ((1, "", {}), (32, "", {}), (32, " cap", dict(soft_cap=30.0))):
        arguments = partial(_head_arguments, rows, D, V)
        yield KernelCall(impl, "lm_head_argmax", f"{rows} rows{label}", arguments, options)


def _argmax_arguments(V: int, dtype: str) -> Arguments:
    """Returns rows with many equal numbers, a row with NaN, a row of zeros of both signs, and a row of
    -inf.
    """
    x_BV = jnp.round(random(0, (5, V), jnp.float32), 1)
    x_BV = x_BV.at[1, V // 3 : V // 3 + 2].set(jnp.nan)
    x_BV = x_BV.at[2].set(jnp.copysign(0, x_BV[2])).at[3].set(-jnp.inf)
    return (x_BV.astype(dtype),), {}


def _head_arguments(rows: int, D: int, V: int, dtype: str = "bfloat16") -> Arguments:
    """Returns integers, whose sums are exact in any order. Every row of the matrix occurs twice, so every
    maximum does too.
    """
    x_BD, weight_VD = (
        jnp.round(random(i, shape, jnp.float32)) for i, shape in enumerate(((rows, D), (V, D)))
    )
    weight_VD = weight_VD[jnp.arange(V) % -(-V // 2)].astype(dtype)
    scale = (jnp.ones(V, jnp.float32),) if dtype == "int8" else ()
    return ((x_BD / 8).astype("bfloat16"), weight_VD, *scale), {}


def _sampler_calls(impl: str) -> Iterator[KernelCall]:
    V = 151936
    for rows in (1, 32, 64):
        arguments = partial(_head_arguments, rows, 896, V, "int8")
        yield KernelCall(impl, "int8_head_argmax", f"{rows} rows", arguments, {})

    def logits(has_bias: bool) -> Arguments:
        penalty_B = jnp.array([1.0, 1.5, 1.0, 2.0])
        given = random(0, (4, V), jnp.float32), penalty_B, random(1, (4, V), jnp.float32) > 0
        bias = random(2, (4, V), jnp.float32), penalty_B > 1
        return given + bias * has_bias, {}

    for label, has_bias in (("plain", False), ("bias", True)):
        yield KernelCall(impl, "summarize_logits", label, partial(logits, has_bias), {})


# --- products and experts -----------------------------------------------------------------------------------


def _matrix(kind: str, seed: int, outputs: int, inputs: int) -> Matrix:
    """Returns a matrix in a format, whose numbers have a deviation of about inputs**-0.5."""
    scale = inputs**-0.5
    if kind == "int8":
        return Matrix(_integers(seed, (outputs, inputs), "int8"), jnp.full(outputs, scale / 73, jnp.float32))
    if kind == "int4":
        Q = -(-inputs // 64)
        zero = _integers(seed, (Q, outputs), "uint8") % 4 + 6
        return Matrix(
            _integers(seed, (Q, 32, outputs), "uint8"), jnp.full((Q, outputs), scale / 4.6, jnp.float16), zero
        )
    matrix_OI = random(seed, (outputs, inputs), jnp.float32)
    if kind == "fp8":
        blocks = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
        return Matrix(matrix_OI.astype(jnp.float8_e4m3fn), jnp.full(blocks, scale, jnp.float32))
    return Matrix((scale * matrix_OI).astype(kind))


def _integers(seed: int, shape: Sequence[int], dtype: str) -> jax.Array:
    return jax.random.bits(jax.random.key(seed, impl="rbg"), shape, jnp.uint8).astype(dtype)


def _product_calls(impl: str, is_tpu: bool, is_tiny: bool) -> Iterator[KernelCall]:
    F, D = (96, 128) if is_tiny else (4864, 896)
    gated = dict(activation="silu", eps=1e-6)
    for kind in ("bfloat16",) if is_tpu else ("bfloat16", "int8", "int4", "fp8"):
        for rows in (3,) if is_tiny else (1, 8, 64, 512)[: 3 if kind == "bfloat16" else None]:
            label = f"{kind} {rows} rows"
            down = partial(_down_arguments, kind, rows, F, D)
            up = partial(_up_arguments, kind, rows, F, D)
            if not is_tpu:
                yield KernelCall(impl, "product", f"{label} gate, up", up, gated)
                yield KernelCall(impl, "product", f"{label} down", down, {})
            if is_tpu or rows in (3, 8, 64):
                adapted = partial(up, adapters=5)
                yield KernelCall(impl, "product", f"{label} adapters", adapted, gated)


def _up_arguments(kind: str, rows: int, F: int, D: int, adapters: int = 0) -> Arguments:
    """Returns the arguments of norm, gate, up and activation in one launch. With more than 64 rows there is
    no norm.
    """
    matrices = [_matrix(kind, seed, F, D) for seed in (1, 2)]
    if adapters:
        a_NRI = (random(4, (adapters, 16, D), jnp.float32) * D**-0.5).astype(jnp.bfloat16)
        b_NOR = (random(5, (adapters, F, 16), jnp.float32) / 4).astype(jnp.bfloat16)
        held = RowAdapters(a_NRI, b_NOR, np.arange(rows, dtype=np.int32) % adapters - 1, 1.0)
        matrices = [matrix._replace(adapters=held) for matrix in matrices]
    norm = (random(3, (D,), jnp.bfloat16),) if rows <= 64 else ()
    return (random(0, (rows, D), jnp.bfloat16), matrices, *norm), {}


def _down_arguments(kind: str, rows: int, F: int, D: int) -> Arguments:
    residual_MO = random(2, (rows, D), jnp.bfloat16)
    return (random(0, (rows, F), jnp.bfloat16), [_matrix(kind, 1, D, F)], None, residual_MO), {}


def _expert_calls(impl: str, is_tiny: bool) -> Iterator[KernelCall]:
    qwen = (4, 2, 32, 48) if is_tiny else (128, 8, 768, 2048)
    counts = (3,) if is_tiny else (1, 8, 64, 512, 2048)
    for kind, tokens in itertools.product(("bfloat16", "int8", "int4", "fp8"), counts):
        if is_tiny and kind != "bfloat16":
            continue
        arguments = partial(_expert_arguments, kind, tokens, *qwen)
        options = dict(activation=jax.nn.silu)
        yield KernelCall(impl, "gated_experts", f"{tokens} tokens {kind}", arguments, options)
    for kind, tokens in itertools.product(("bfloat16", "int8", "fp8"), () if is_tiny else (8, 64, 1024)):
        arguments = partial(_expert_arguments, kind, tokens, 128, 6, 1856, 2688, is_gated=False)
        options = dict(activation=lambda x: jnp.square(jax.nn.relu(x)))
        yield KernelCall(impl, "gated_experts", f"{tokens} tokens {kind} without gates", arguments, options)
    for kind, tokens in itertools.product(("bfloat16", "mxfp4"), () if is_tiny else (8, 200, 1024)):
        arguments = partial(_expert_arguments, kind, tokens, 32, 4, 2880, 2880, has_biases=True)
        options = dict(activation=jax.nn.silu, limit=7.0)
        yield KernelCall(impl, "gated_experts", f"{tokens} tokens {kind} biases", arguments, options)


def _expert_arguments(
    kind: str, tokens: int, X: int, U: int, F: int, D: int, has_biases: bool = False, is_gated: bool = True
) -> Arguments:
    weight_MU = jax.nn.softmax(random(1, (tokens, U), jnp.float32), -1)
    expert_MU = jnp.argsort(random(2, (tokens, X), jnp.float32), -1)[:, :U].astype(jnp.int32)
    shapes = (F, D), (F, D), (D, F)
    stacks = [_expert_stack(kind, seed, X, *shape) for seed, shape in enumerate(shapes, 3)]
    stacks[0] = stacks[0] if is_gated else None
    widths = (F, F, D) if has_biases else ()
    biases = [random(seed, (X, width), jnp.bfloat16) for seed, width in enumerate(widths, 6)]
    return (random(0, (tokens, D), jnp.bfloat16), weight_MU, expert_MU, *stacks, *biases), {}


def _expert_stack(kind: str, seed: int, X: int, outputs: int, inputs: int) -> Any:
    """Returns the matrices of X experts."""
    if kind == "mxfp4":
        groups = (X, inputs // 32)
        scale = _integers(seed, (*groups, outputs), "uint8") % 4 + 118
        return Mxfp4(_integers(seed, (*groups, 16, outputs), "uint8"), scale)
    stack = jax.vmap(lambda i: _matrix(kind, i, outputs, inputs))(seed * X + jnp.arange(X))
    return stack.values if kind == "bfloat16" else stack


def _experts_one_by_one(x_MD, weight_MU, expert_MU, *stacks, **options) -> jax.Array:
    """Returns the reference, of one expert after the other: all at once would take gigabytes."""

    def add(sum_MD, part):
        number, *of_expert = part
        one = jax.tree.map(lambda x: x[None], of_expert)
        chosen_MU = jnp.where(expert_MU == number, 0, -1)
        return sum_MD + reference.gated_experts(x_MD, weight_MU, chosen_MU, *one, **options), None

    count = jax.tree.leaves(stacks)[0].shape[0]
    zeros_MD = jnp.zeros(x_MD.shape, jnp.float32)
    return jax.lax.scan(add, zeros_MD, (jnp.arange(count), *stacks))[0]


# --- linear attention ---------------------------------------------------------------------------------------


def _delta_calls(impl: str, is_tpu: bool, is_tiny: bool) -> Iterator[KernelCall]:
    table = [(3, 1, 1, 2, 128, 128, "bfloat16")] if is_tiny else _DELTAS
    for rows, T, K, N, H, Y, dtype in table:
        if is_tpu and (dtype == "float16" or H != Y or H < 128):
            continue
        kernel = "delta_step" if T == 1 else "delta_drafts" if T < 64 else "delta_prefill"
        label = f"{rows} rows, {T} tokens, {N} heads of {H} and {Y} {dtype}"
        arguments = partial(_delta_arguments, rows, T, K, N, H, Y, dtype)
        options: dict[str, Any] = dict(eps=1e-6)
        if kernel == "delta_drafts":
            options["holds"] = True
        yield KernelCall(impl, kernel, label, arguments, options)


def _delta_arguments(rows: int, T: int, K: int, N: int, H: int, Y: int, dtype: str) -> Arguments:
    """Returns the arguments of a step. Each third row has no token. With draft tokens a row holds the same
    number of slots more, and their positions.
    """
    is_draft = 1 < T < 64
    slots = 3 + T * is_draft
    sizes = K * H, K * H, N * Y, N * Y, N, N
    shapes = [(rows, size) if T == 1 else (rows, T, size) for size in sizes]
    new = NewToken(*(random(i, shape, dtype) for i, shape in enumerate(shapes)))
    shapes = [*((size, 4) for size in sizes[:3]), (N,), (N,), (Y,)]
    weights = DeltaWeights(*(random(i, shape, dtype) for i, shape in enumerate(shapes, 6)))
    shapes = [(rows, K, slots, H), (rows, K, slots, H), (rows, N, slots, Y), (rows, N, H, Y)]
    old = DeltaState(*(random(i, shape, jnp.float32) for i, shape in enumerate(shapes, 12)))
    row_B = np.arange(rows, dtype=np.int32)
    numbers = row_B % 5, T * (row_B % 3 > 0).astype(np.int32)
    if is_draft:
        numbers = random(20, (rows, N, T, 2), jnp.float32), *numbers, numbers[0]
    return (new, weights, old, *numbers), {}


# --- Mamba-2 ------------------------------------------------------------------------------------------------


def _mamba_calls(impl: str, is_tpu: bool, is_tiny: bool) -> Iterator[KernelCall]:
    tiny = (3, 1, 1, 8, 64, 128, "bfloat16") if is_tpu else (3, 1, 1, 2, 64, 64, "bfloat16")
    for rows, T, G, N, Y, S, dtype in [tiny] if is_tiny else _MAMBAS:
        if is_tpu and (dtype == "float16" or S < LANES or N % 8):
            continue
        kernel = "mamba_step" if T == 1 else "mamba_prefill"
        label = f"{rows} rows, {T} tokens, {N} heads of {Y}, states of {S} {dtype}"
        yield KernelCall(impl, kernel, label, partial(_mamba_arguments, rows, T, G, N, Y, S, dtype), {})


def _mamba_arguments(rows: int, T: int, G: int, N: int, Y: int, S: int, dtype: str) -> Arguments:
    """Returns the arguments of a step or a prompt. Each third row has no token."""
    sizes = N * Y, G * S, G * S
    shapes = [(rows, size) if T == 1 else (rows, T, size) for size in (*sizes, N)]
    new = MambaToken(*(random(i, shape, dtype) for i, shape in enumerate(shapes)))
    shapes = [*((size, 4) for size in sizes), *((size,) for size in (*sizes, N, N, N))]
    weights = MambaWeights(*(random(i, shape, dtype) for i, shape in enumerate(shapes, 4)))
    shapes = [(rows, N, 3, Y), (rows, G, 3, S), (rows, G, 3, S), (rows, N, Y, S)]
    old = MambaState(*(random(i, shape, jnp.float32) for i, shape in enumerate(shapes, 13)))
    row_B = np.arange(rows, dtype=np.int32)
    return (new, weights, old, row_B % 5, T * ((row_B + (rows == 1)) % 3 > 0).astype(np.int32)), {}


REFERENCES: dict[str, Callable] = {  # draft tokens have none: it is a layer of the library
    "decode_attention": reference.prefill_attention,
    "prefill_attention": reference.prefill_attention,
    "rope_append": reference_append.rope_append,
    "product": reference_products.product,
    "gated_experts": _experts_one_by_one,
    "argmax": reference.argmax,
    "lm_head_argmax": reference.lm_head_argmax,
    "int8_head_argmax": reference.int8_head_argmax,
    "summarize_logits": reference.summarize_logits,
    "delta_step": reference_delta.delta_step,
    "delta_prefill": reference_delta.delta_prefill,
    "mamba_step": reference_mamba.mamba_step,
    "mamba_prefill": reference_mamba.mamba_prefill,
}
