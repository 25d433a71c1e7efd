"""Compiles the TPU kernels for a TPU that is not here, at the shapes of models, and checks that no program
copies a cache, or weights. Prints a line for each. The exit code is 1 where one fails.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python tests/support/compile_for_tpu.py v5e
"""

import math
import re
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from xinfer_jax import kernels_pallas
from xinfer_jax.kernels_pallas import HeadNorms, Latents, Mxfp4, SideBySide
from xinfer_jax.kernels_pallas.key_layouts import scale_rows
from xinfer_jax.kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from xinfer_jax.kernels_pallas.reference_mamba import MambaState, MambaToken, MambaWeights
from xinfer_jax.kernels_pallas.reference_products import Matrix
from xinfer_jax.ops.operation import run

BF16, F32, INT8 = jnp.bfloat16, jnp.float32, jnp.uint8
# Key heads, query heads of each, their width, window.
MODELS = {
    "0.5B": (2, 7, 64, None),
    "7B": (4, 7, 128, None),
    "gemma3": (1, 4, 256, 512),
    "gemma4": (2, 8, 512, None),
    "MHA": (32, 1, 128, None),
    "GLM-4.7-Flash": (1, 20, 576, None),
    "DeepSeek-V3": (1, 128, 576, None),
}
RANKS = {"GLM-4.7-Flash": 512, "DeepSeek-V3": 512}  # of their latents
# Model, rows, tokens of a row, where the cache is, its dtype: each width, place, dtype and kind of call.
CASES = [
    ("0.5B", 64, 1, "pages", BF16),
    ("7B", 64, 17, "pages", BF16),
    ("7B", 8, 1, "contiguous", INT8),
    ("7B", 1, 2048, "pages", BF16),
    ("gemma3", 64, 5, "ring", INT8),
    ("gemma4", 64, 17, "pages", BF16),
    ("gemma4", 1, 2048, "contiguous", INT8),
    ("MHA", 8, 1, "pages", BF16),
    ("GLM-4.7-Flash", 64, 1, "pages", BF16),
    ("GLM-4.7-Flash", 1, 2048, "pages", BF16),
    ("DeepSeek-V3", 8, 17, "contiguous", BF16),
]
CAPACITY = 4096
RING = 1024


def shapes_on(device, default=BF16):
    """A function that makes shapes of arrays on a device."""

    def shape(*axes, dtype=default):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=SingleDeviceSharding(device))

    return shape


def compiled(function, *args, **of_jit):
    """The function compiled for a TPU."""
    lowered = jax.jit(function, **of_jit).trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def arguments(device, model, rows, tokens, place, dtype):
    """Shapes of new queries, keys, values, cosines, sines; of the cache, starts, lengths and block table."""
    K, G, H, _ = MODELS[model]
    shape = shapes_on(device, jnp.int32)

    of_q = F32 if dtype == F32 else BF16
    slots = {"pages": 64, "ring": RING, "contiguous": CAPACITY}[place]
    P = 1 + rows * CAPACITY // 64 if place == "pages" else rows
    parts = scale_rows(slots)
    scale = shape(P, K, parts, 4 * slots // parts, dtype=F32) if dtype == INT8 else None
    new = [shape(rows, tokens, heads, H, dtype=of_q) for heads in (K * G, K, K)]
    if model in RANKS:
        kv = Latents(shape(P, K, slots, 128 * -(-H // 128), dtype=dtype), RANKS[model])
        new += [None] * 2
    else:
        kv = SideBySide(shape(P, K, slots, 2 * H, dtype=dtype), scale)
        new += [shape(rows, tokens, H // 2, dtype=F32)] * 2
    table = shape(rows, CAPACITY // 64) if place == "pages" else None
    return new, kv, shape(rows), shape(rows), table


def step(model, place, new, kv, start_B, count_B, table_BP):
    """Appends and attends: few tokens twice, in a loop, as decode steps do; with norms to rings."""
    H, window = MODELS[model][2:]
    options = {"ring": True} if place == "ring" else {}
    of_append = {"norms": HeadNorms(jnp.ones(H), jnp.ones(H), 1e-6, 1.0)} if place == "ring" else {}
    if table_BP is not None:
        options["table_BP"] = table_BP

    def once(_, state):
        kv, start_B, q = state
        q, kv, _ = kernels_pallas.run_kernel(
            "tpu",
            "rope_append",
            q,
            *new[1:],
            kv,
            None,
            start_B,
            count_B,
            capacity=CAPACITY,
            **options,
            **of_append,
        )
        kernel = "decode_attention" if q.shape[1] <= 17 else "prefill_attention"
        args = q, kv, None, start_B, start_B + count_B
        out = kernels_pallas.run_kernel("tpu", kernel, *args, scale=H**-0.5, window=window, **options)
        out = jnp.pad(out, [(0, 0)] * 3 + [(0, H - out.shape[3])])  # values are narrower than latent keys
        return kv, start_B + count_B, out

    state = kv, start_B, new[0]
    return lax.fori_loop(0, 2, once, state) if new[0].shape[1] <= 17 else once(0, state)


def copies(text, kv):
    """The instructions of a program that copy an array of the cache."""
    shapes = ["[" + ",".join(map(str, x.shape)) + "]" for x in jax.tree.leaves(kv)]
    lines = re.findall(r"%\S+ = (\(?\w+\[.*?) copy(?:-start)?\(", text)
    return [line for line in lines if any(shape in line for shape in shapes)]


# Rows, inputs, outputs of each matrix, format.
PRODUCTS = [
    (8, 896, (896, 128, 128), "bfloat16"),
    (1, 3584, (3584, 512, 512), "bfloat16"),
    (8, 18944, (3584,), "int8"),
    (8, 3584, (18944, 18944), "int4"),
    (64, 896, (4864, 4864), "int4"),
    (8, 2816, (2112, 2112), "int4"),
    (8, 896, (896, 128, 128), "fp8"),
    (8, 4096, (2688,), "fp8"),
    (8, 896, (151936,), "head"),
]


def compile_product(device, rows, inputs, outputs, kind) -> None:
    shape = shapes_on(device)

    def matrix(size):
        if kind == "int4":
            groups = inputs // 64
            scale, zero = shape(groups, size, dtype=F32), shape(groups, size, dtype=INT8)
            return Matrix(shape(groups, 32, size, dtype=INT8), scale, zero)
        if kind == "int8":
            return Matrix(shape(size, inputs, dtype=jnp.int8), shape(size, dtype=F32))
        if kind == "fp8":
            blocks = -(-size // 128), -(-inputs // 128)
            return Matrix(shape(size, inputs, dtype=jnp.float8_e4m3fn), shape(*blocks, dtype=F32))
        return Matrix(shape(size, inputs), bias=shape(size))

    args = shape(rows, inputs), [matrix(size) for size in outputs], shape(inputs)
    function = partial(kernels_pallas.run_kernel, "tpu", "product", eps=1e-6)
    if kind == "head":
        args = args[0], args[1][0].values
        function = partial(kernels_pallas.run_kernel, "tpu", "lm_head_argmax")
    compiled(function, *args)


# Rows, experts, choices of a row, hidden size, outputs of the gate of a shared expert.
ROUTES = [(8, 256, 8, 2048, 1), (64, 32, 4, 2880, 0)]
_V3 = dict(scoring_func="sigmoid", n_group=8, topk_group=4, group_score="top2", masked_score=-math.inf)
_V3 |= dict(norm_topk_prob=True, norm_epsilon=1e-20, norm_minimum=0.0, routed_scaling_factor=2.5)
# The rows, and the experts and settings of a grouped router.
GROUPED_ROUTES = [(8, 256, 8, 7168, "8 groups"), (64, 64, 4, 2048, "1 group")]


def compile_grouped_route(device, rows, X, count, width, groups) -> None:
    shape = shapes_on(device, F32)
    grouped = _V3 if groups == "8 groups" else _V3 | dict(n_group=1, topk_group=1)
    args = shape(rows, width, dtype=BF16), [Matrix(shape(X, width), bias=shape(X))], shape(width, dtype=BF16)
    compiled(
        partial(kernels_pallas.run_kernel, "tpu", "route", count=count, eps=1e-6, grouped=grouped), *args
    )


def compile_route(device, rows, X, count, width, shared) -> None:
    shapes = [(rows, width), [Matrix((X, width), bias=(X,))] + [Matrix((1, width))] * shared, (width,)]
    of = partial(jax.ShapeDtypeStruct, dtype=BF16, sharding=SingleDeviceSharding(device))
    is_shape = lambda x: isinstance(x, tuple) and not isinstance(x, Matrix)  # noqa: E731
    args = jax.tree.map(of, shapes, is_leaf=is_shape)
    compiled(partial(kernels_pallas.run_kernel, "tpu", "route", count=count, eps=1e-6), *args)


# Tokens, dtype of an embedding that XLA stores by inputs.
EMBEDDINGS = [(1, BF16), (8, jnp.int8), (1024, BF16)]


def compile_embedding(device, tokens, dtype) -> list[str]:
    """A loop of steps that take rows of gpt-oss's table. Returns the temporaries that are as large as it."""

    def steps(token_B, table):
        def once(_, token_B):
            rows = run("embedding", lambda token, table: table[token], token=token_B, table=table)
            return token_B + rows.astype(F32).sum(1).astype(jnp.int32)

        return lax.fori_loop(0, 2, once, token_B)

    shape = shapes_on(device, jnp.int32)
    table = shape(201_088, 2880, dtype=dtype)
    size = compiled(steps, shape(tokens), table).memory_analysis().temp_size_in_bytes
    return [f"{size} bytes"] if size > table.size // 8 else []


# Rows, key heads, value heads, their widths, dtype.
DELTA_STEPS = [
    (8, 16, 32, 128, 128, BF16),
    (3, 8, 24, 128, 256, F32),
    (70, 8, 8, 256, 128, BF16),
]


def delta_step(new, weights, old, start_B, count_B):
    def once(_, state):
        old, start_B, q = state
        args = new._replace(q=q), weights, old, start_B, count_B
        _, old = kernels_pallas.run_kernel("tpu", "delta_step", *args, eps=1e-6)
        return old, start_B + count_B, q

    return lax.fori_loop(0, 2, once, (old, start_B, new.q))


def delta_shapes(device, rows: tuple[int, ...], K, N, H, Y, dtype):
    """The shapes of the operands for [rows] or [rows, tokens]."""
    shape = shapes_on(device, dtype)

    new = NewToken(*(shape(*rows, size) for size in (K * H, K * H, N * Y, N * Y, N, N)))
    weights = DeltaWeights(*(shape(size, 4) for size in (K * H, K * H, N * Y)), shape(N), shape(N), shape(Y))
    shapes = (K, 3, H), (K, 3, H), (N, 3, Y), (N, H, Y)
    old = DeltaState(*(shape(rows[0], *axes, dtype=F32) for axes in shapes))
    return new, weights, old, *[shape(rows[0], dtype=jnp.int32)] * 2


def compile_delta_step(device, rows, *sizes) -> list[str]:
    """Two steps in a loop. Returns the copies of the state."""
    args = delta_shapes(device, (rows,), *sizes)
    return copies(compiled(delta_step, *args, donate_argnums=2).as_text(), args[2])


# Tokens, choices of one, experts, their features, hidden size, format.
EXPERTS = [
    (64, 8, 128, 768, 2048, "int8"),
    (8, 8, 128, 704, 2816, "int4"),
    (8, 8, 128, 768, 2048, "fp8"),
    (8, 4, 128, 2880, 2880, "mxfp4"),
    (8, 6, 128, 1856, 2688, "without gates"),
]


def compile_experts(device, tokens, choices, X, features, width, kind) -> list[str]:
    """A loop of steps. Returns the copies of weights."""
    shape = shapes_on(device)

    def matrix(O, I):  # noqa: E741
        if kind in ("mxfp4", "int4"):  # as `device_form` has them
            O += -O % 128  # noqa: E741
        if kind == "mxfp4":
            return Mxfp4(shape(X, I // 2, O, dtype=INT8), shape(X, -(-I // 256) * 8, O, dtype=INT8))
        if kind == "int8":
            return Matrix(shape(X, O, I, dtype=jnp.int8), shape(X, O, dtype=F32))
        if kind == "fp8":
            scale = shape(X, -(-O // 128), -(-I // 128), dtype=F32)
            return Matrix(shape(X, O, I, dtype=jnp.float8_e4m3fn), scale)
        if kind == "int4":
            scale, zero = (shape(X, -(-I // 512) * 8, O, dtype=dtype) for dtype in (F32, INT8))
            return Matrix(shape(X, I // 64, 32, O, dtype=INT8), scale, zero)
        return shape(X, O, I)

    sizes = (features, width), (features, width), (width, features)
    matrices = [matrix(*size) for size in sizes]
    matrices[0] = None if kind == "without gates" else matrices[0]
    biases = [shape(X, size[0]) for size in sizes] if width == 2880 else []  # those of gpt-oss
    options = dict(activation=jax.nn.silu, limit=7.0 if biases else None)
    run = partial(kernels_pallas.run_kernel, "tpu", "gated_experts", **options)

    def steps(x_MD, *rest):
        return lax.fori_loop(0, 2, lambda _, x_MD: run(x_MD, *rest).astype(BF16), x_MD)

    args = shape(tokens, width), shape(tokens, choices, dtype=F32), shape(tokens, choices, dtype=jnp.int32)
    return copies(compiled(steps, *args, *matrices, *biases).as_text(), matrices)


# Rows, tokens, key heads, value heads, their widths, dtype.
DELTA_PROMPTS = [
    (3, 70, 16, 16, 128, 128, F32),
    (2, 300, 8, 24, 128, 256, BF16),
]


def compile_delta_prompts(device, rows, tokens, *sizes) -> None:
    args = delta_shapes(device, (rows, tokens), *sizes)
    compiled(partial(kernels_pallas.run_kernel, "tpu", "delta_prefill", eps=1e-6), *args)


# Rows, heads, their width, groups, state size, dtype: Nemotron-3-Nano, Granite-4-H, Falcon-H1.
MAMBA_STEPS = [
    (8, 64, 64, 8, 128, BF16),
    (40, 48, 64, 1, 128, BF16),
    (1, 128, 64, 1, 128, F32),
    (8, 32, 128, 2, 256, BF16),
]


def mamba_shapes(device, rows: tuple[int, ...], N, Y, G, S, dtype):
    """The shapes of the operands for [rows] or [rows, tokens]."""
    shape = shapes_on(device, dtype)
    sizes = N * Y, G * S, G * S
    new = MambaToken(*(shape(*rows, size) for size in (*sizes, N)))
    taps = (shape(size, 4) for size in sizes)
    weights = MambaWeights(*taps, *map(shape, sizes), *[shape(N, dtype=F32)] * 3)
    shapes = (N, 3, Y), (G, 3, S), (G, 3, S), (N, Y, S)
    old = MambaState(*(shape(rows[0], *axes, dtype=F32) for axes in shapes))
    return new, weights, old, *[shape(rows[0], dtype=jnp.int32)] * 2


def compile_mamba_step(device, rows, *sizes) -> list[str]:
    """Two steps in a loop. Returns the copies of the state."""

    def steps(new, weights, old, start_B, count_B):
        def once(_, state):
            old, start_B = state
            args = new, weights, old, start_B, count_B
            return kernels_pallas.run_kernel("tpu", "mamba_step", *args)[1], start_B + count_B

        return lax.fori_loop(0, 2, once, (old, start_B))

    args = mamba_shapes(device, (rows,), *sizes)
    return copies(compiled(steps, *args, donate_argnums=2).as_text(), args[2])


# Rows, tokens, then as above.
MAMBA_PROMPTS = [
    (2, 300, 64, 64, 8, 128, BF16),
    (1, 70, 48, 64, 1, 128, F32),
    (1, 256, 32, 128, 2, 256, BF16),
]


def compile_mamba_prompts(device, rows, tokens, *sizes) -> None:
    args = mamba_shapes(device, (rows, tokens), *sizes)
    compiled(partial(kernels_pallas.run_kernel, "tpu", "mamba_prefill"), *args)


SLOTS = 5
DELTA_DRAFTS = [(8, tokens, 16, 32, 128, 128, BF16) for tokens in (SLOTS, 0)]  # 0: before those of a prompt


def compile_delta_drafts(device, rows, tokens, *sizes) -> list[str]:
    """A call of so many tokens. Returns the copies of the state."""
    new, weights, old, *numbers = delta_shapes(device, (rows, tokens), *sizes)
    state = old.state

    def resized(x, *axes):
        return jax.ShapeDtypeStruct(axes, x.dtype, sharding=x.sharding)

    held = (resized(x, *x.shape[:2], x.shape[2] + SLOTS, x.shape[3]) for x in old[:3])
    old = DeltaState(*held, state)
    args = new, weights, old, resized(state, *state.shape[:2], SLOTS, 2), numbers[0], *numbers
    kernel = partial(kernels_pallas.run_kernel, "tpu", "delta_drafts", eps=1e-6, holds=tokens > 0)
    return copies(compiled(kernel, *args, donate_argnums=2).as_text(), state)


def main(tpu: str) -> int:
    device = topologies.get_topology_desc(platform="tpu", topology_name=f"{tpu}:2x2").devices[0]
    mesh = jax.sharding.Mesh([device], ("one",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(device):
        return compile_all(device, tpu)


def compile_step(device, model, rows, tokens, place, dtype) -> list[str]:
    """Append and attention. Returns the copies of the cache."""
    new, kv, *rest = arguments(device, model, rows, tokens, place, dtype)
    appended = compiled(step, model, place, new, kv, *rest, static_argnums=(0, 1), donate_argnums=3)
    return copies(appended.as_text(), kv)


def compile_all(device, tpu: str) -> int:
    kinds = [
        ("product", compile_product, PRODUCTS),
        ("route", compile_route, ROUTES),
        ("grouped route", compile_grouped_route, GROUPED_ROUTES),
        ("experts", compile_experts, EXPERTS),
        ("embedding", compile_embedding, EMBEDDINGS),
        ("delta_step", compile_delta_step, DELTA_STEPS),
        ("delta_prefill", compile_delta_prompts, DELTA_PROMPTS),
        ("delta_drafts", compile_delta_drafts, DELTA_DRAFTS),
        ("mamba_step", compile_mamba_step, MAMBA_STEPS),
        ("mamba_prefill", compile_mamba_prompts, MAMBA_PROMPTS),
        ("append and attention", compile_step, CASES),
    ]
    failures = 0
    for name, compile_one, cases in kinds:
        for case in cases:
            before = time.monotonic()
            found = compile_one(device, *case)
            failures += bool(found)
            numbers = ", ".join(jnp.dtype(x).name if isinstance(x, type) else str(x) for x in case)
            counted = [] if found is None else [f"{len(found)} copies", *found[:2]]
            print(f"{tpu} {name} {numbers}: {time.monotonic() - before:.1f} s", *counted)
    return int(failures > 0)


if __name__ == "__main__":
    with kernels_pallas.assume_device(None, f"TPU {sys.argv[1]}", "tpu"):
        sys.exit(main(sys.argv[1]))
