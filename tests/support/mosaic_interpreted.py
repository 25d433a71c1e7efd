"""Runs the Mosaic kernels in JAX's GPU interpreter with race detection, and prints the largest error of each
case.

It is a program of its own: `test_kernels_mosaic.py` runs it under a time limit, since a kernel that waits for
a barrier to which nobody arrives never ends.
"""

import importlib
import json
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from xinfer_jax.kernels_pallas import mosaic, reference

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
)


def run(kernel, *args, **kwargs):
    with jax.sharding.use_abstract_mesh(H200):
        out = jax.block_until_ready(
            jax.jit(lambda *args: kernel(*args, interpret=INTERPRET, **kwargs))(*args)
        )
    assert not interpret_pallas_call.get_races().races_found
    return out


def error(got, want):
    """Returns the largest distance of a row (the output of a head) from the oracle, relative to its norm."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(
        np.max(np.linalg.norm(got - want, axis=-1) / np.maximum(np.linalg.norm(want, axis=-1), 1e-6))
    )


def arrays(seed, dtype, *shapes):
    draws = np.random.default_rng(seed)
    return [jnp.asarray(draws.standard_normal(shape), dtype) for shape in shapes]


def attended(  # noqa: PLR0913
    q, k, v, start, length, *, scale, window=None, soft_cap=None, sink_N=None, first_key=0
):
    """Returns the attention of every query over contiguous keys, in float64: a plain oracle."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N = q.shape[:3]
    k, v = (np.repeat(x, N // x.shape[1], axis=1) for x in (k, v))
    out = np.zeros(q.shape)
    for b, t in np.ndindex(B, T):
        position = start[b] + t
        first = max(0, min(position, first_key), position - window + 1 if window else 0)
        seen = slice(first, max(0, min(position + 1, length[b])))
        scores = np.einsum("nh,nsh->ns", q[b, t], k[b, :, seen]) * scale
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        sink = np.full((N, 1), -np.inf) if sink_N is None else np.asarray(sink_N)[:, None]
        weights = np.exp(scores)
        weights /= np.maximum(weights.sum(-1, keepdims=True) + np.exp(sink), 1e-30)
        out[b, t] = np.einsum("ns,nsh->nh", weights, v[b, :, seen])
    return out


def attention(
    kernel, shape, starts, counts, dtype="bfloat16", *, keys="contiguous", sinks=False, seed=0, **kwargs
):
    """Returns the error of a kernel over contiguous keys, shuffled pages or a ring (`keys`).

    Slots that no query sees are NaN, except those of contiguous keys below the window. S is the slots of a
    row, or the pages of all rows.
    """
    B, T, N, K, S, H = shape
    start = np.array(starts, np.int32)
    length = start + np.array(counts, np.int32)
    options = {name: kwargs.get(name) for name in ("window", "soft_cap", "first_key")}
    options["first_key"] = options["first_key"] or 0
    options |= {"sink_N": arrays(seed, "float32", (N,))[0] + 1 if sinks else None, "scale": H**-0.5}
    end = np.minimum(length, S) if keys == "contiguous" else length
    q, *kv = arrays(T + seed, dtype, (B, T, N, H), *[(B, K, max(64, *end), H)] * 2)
    table = np.zeros((B, pl.cdiv(max(length), 64)), np.int32)
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, S)))
    placed = [np.full((S, K, 64, H) if keys == "pages" else (B, K, S, H), np.nan, x.dtype) for x in kv]
    for b in range(B):
        below = 0 if keys == "contiguous" or not options["window"] else start[b] + 1 - options["window"]
        seen = np.arange(max(0, below), end[b])
        place = (b, slice(None), seen % S)
        if keys == "pages":
            for page in np.unique(seen // 64):
                table[b, page] = next(free)
            place = (table[b, seen // 64], slice(None), seen % 64)
        for x, slots in zip(kv, placed, strict=True):
            slots[place] = np.moveaxis(np.asarray(x)[b, :, seen], 0, 0)
    got = run(
        partial(kernel, table_BP=jnp.asarray(table) if keys == "pages" else None, ring=keys == "ring"),
        *(q, *map(jnp.asarray, placed), start, length),
        **options | kwargs,
    )
    return error(got, attended(q, *kv, start, end, **options))


prefill = partial(attention, mosaic.prefill_attention)
decode = partial(attention, mosaic.decode_attention)


def argmax(width, dtype):
    x = np.random.default_rng(width).standard_normal((5, width)).astype(np.float32)
    x[1, [3, width - 1]] = 9  # a tie
    x[2, [width // 2, width - 2]] = np.nan
    x[2, 1] = np.inf
    x[3] = -np.inf
    x[4] = -np.abs(x[4])
    x[4, [5, 7]] = -0.0, 0.0  # equal
    x = jnp.asarray(x, dtype)
    return int(np.sum(np.asarray(run(mosaic.argmax, x)) != np.asarray(reference.argmax(x))))


def head(rows, vocabulary, width, dtype="bfloat16", nan=False, **kwargs):
    # Sums exact in any order.
    x, weight = (jnp.round(4 * a) / 16 for a in arrays(rows, dtype, (rows, width), (vocabulary, width)))
    weight = weight.at[vocabulary - 1].set(3 * weight[2]).at[2].mul(3)  # a tie across programs
    x = x.at[1].set(jnp.nan) if nan else x
    ids, logprobs = run(mosaic.lm_head_argmax, x, weight, **kwargs)
    wanted, logprobs_wanted = reference.lm_head_argmax(x, weight, **kwargs)
    assert np.array_equal(ids, wanted), (ids, wanted)
    assert np.array_equal(np.isnan(logprobs), np.isnan(logprobs_wanted))
    return float(np.nanmax(np.abs(logprobs - logprobs_wanted)))


def main():
    module = importlib.import_module("xinfer_jax.kernels_pallas.mosaic.argmax")
    # Several tiles for each program, though the matrix is small.
    module.parts = SimpleNamespace(**vars(module.parts) | {"PROGRAMS": 3})
    cases = {
        "prefill after a cache": lambda: prefill(
            (2, 70, 4, 2, 300, 64), (100, 17), (70, 1), block=64, stages=2
        ),
        "prefill window, soft cap": lambda: prefill(
            (1, 130, 2, 1, 300, 64), (100,), (130,), block=64, stages=2, window=70, soft_cap=3.0
        ),
        "prefill width 128, length beyond the cache": lambda: prefill(
            (1, 20, 2, 1, 128, 128), (110,), (30,), block=64
        ),
        "prefill odd sizes, float16": lambda: prefill((2, 5, 2, 1, 21, 20), (0, 2), (0, 5), "float16"),
        "prefill pages, sinks": lambda: prefill(
            (2, 130, 2, 1, 9, 64), (100, 0), (130, 1), keys="pages", sinks=True
        ),
        "prefill of width 256, window, soft cap": lambda: prefill(
            (1, 130, 1, 1, 300, 256), (100,), (130,), window=70, soft_cap=3.0
        ),
        "prefill pages, window, half a block unused": lambda: prefill(
            (1, 70, 2, 2, 5, 64), (205,), (70,), keys="pages", window=12, soft_cap=3.0, block=128
        ),
        "prefill ring": lambda: prefill(
            (2, 65, 2, 1, 192, 64), (250, 0), (65, 33), keys="ring", window=80, block=128, sinks=True
        ),
        "prefill pages, first key": lambda: prefill(
            (2, 130, 2, 1, 9, 64), (100, 0), (130, 70), keys="pages", block=64, first_key=1
        ),
        "prefill window, first key": lambda: prefill(
            (1, 70, 1, 1, 100, 64), (10,), (70,), block=64, window=60, first_key=3
        ),
        "decode split": lambda: decode((3, 1, 4, 2, 200, 64), (199, 0, 76), (1, 0, 1), splits=3),
        "decode window, soft cap": lambda: decode(
            (2, 1, 7, 1, 150, 64), (149, 63), (1, 1), splits=2, stages=2, window=70, soft_cap=2.0
        ),
        "decode odd sizes, sinks": lambda: decode((1, 1, 3, 1, 37, 36), (36,), (1,), "float16", sinks=True),
        "decode 2 queries, pages, sinks": lambda: decode(
            (3, 2, 6, 2, 9, 64), (140, 0, 0), (2, 1, 0), keys="pages", splits=2, sinks=True
        ),
        "decode 17 queries, pages, window": lambda: decode(
            (3, 17, 7, 1, 8, 64), (130, 3, 0), (17, 9, 0), keys="pages", splits=3, window=75, soft_cap=2.0
        ),
        "decode 2 pages a step": lambda: decode(
            (1, 5, 2, 1, 6, 64), (205,), (5,), keys="pages", splits=1, window=15, block=128, stages=2
        ),
        "decode 17 queries, ring": lambda: decode(
            (1, 17, 4, 1, 128, 64), (250,), (17,), keys="ring", window=112, block=128, splits=1, stages=2
        ),
        "decode 2 queries, first key": lambda: decode(
            (2, 2, 6, 2, 200, 64), (140, 0), (2, 2), splits=2, first_key=1
        ),
        "decode pages, first key": lambda: decode(
            (2, 1, 8, 2, 7, 64), (140, 1), (1, 1), keys="pages", splits=2, first_key=1
        ),
        "argmax float32": lambda: argmax(5000, "float32"),
        "argmax bfloat16, narrow": lambda: argmax(77, "bfloat16"),
        "head": lambda: head(3, 456, 128),
        "head, odd sizes, soft cap": lambda: head(9, 203, 72, "float16", soft_cap=9.0),
        "head, 70 rows, a NaN": lambda: head(70, 200, 64, nan=True),
    }
    print(json.dumps({name: case() for name, case in cases.items()}))


if __name__ == "__main__":
    sys.exit(main())
