"""Runs the Mosaic kernels in JAX's GPU interpreter with race detection, and prints the largest error of each
case.

It is a program of its own: `test_kernels_mosaic.py` runs it under a time limit, since a kernel that waits for
a barrier to which nobody arrives never ends.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas import mosaic, reference
from kernels_pallas.mosaic import argmax as argmax_module

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


def poisoned(x_BKSH, length_B):
    """Returns keys or values with NaN in the slots that were never written."""
    return jnp.where((jnp.arange(x_BKSH.shape[2]) < length_B[:, None])[:, None, :, None], x_BKSH, jnp.nan)


def prefill(shape, starts, counts, dtype="bfloat16", **kwargs):
    B, T, N, K, S, H = shape
    start = np.array(starts, np.int32)
    count = np.array(counts, np.int32)
    q, k, v = arrays(T, dtype, (B, T, N, H), (B, K, S, H), (B, K, S, H))
    k = poisoned(k, start + count)
    v = poisoned(v, start + count)
    oracle = {name: value for name, value in kwargs.items() if name in ("window", "soft_cap")}
    got = run(mosaic.prefill_attention, q, k, v, start, start + count, scale=H**-0.5, **kwargs)
    return error(got, reference.prefill_attention(q, k, v, start, start + count, scale=H**-0.5, **oracle))


def decode(shape, lengths, dtype="bfloat16", **kwargs):
    B, N, K, S, H = shape
    length = np.array(lengths, np.int32)
    q, k, v = arrays(S, dtype, (B, N, H), (B, K, S, H), (B, K, S, H))
    k = poisoned(k, length)
    v = poisoned(v, length)
    oracle = {name: value for name, value in kwargs.items() if name in ("window", "soft_cap")}
    got = run(mosaic.decode_attention, q, k, v, length, scale=H**-0.5, **kwargs)
    return error(got, reference.decode_attention(q, k, v, length, scale=H**-0.5, **oracle))


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
    argmax_module.PROGRAMS = 3  # several tiles for each program, though the matrix is small
    cases = {
        "prefill causal": lambda: prefill((2, 150, 2, 1, 300, 64), (0, 0), (150, 90)),
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
        "prefill width 80": lambda: prefill((1, 20, 3, 3, 64, 80), (11,), (20,)),
        "decode split": lambda: decode((3, 4, 2, 200, 64), (200, 0, 77), splits=3),
        "decode window, soft cap": lambda: decode(
            (2, 7, 1, 150, 64), (150, 64), splits=2, stages=2, window=70, soft_cap=2.0
        ),
        "decode length beyond the cache": lambda: decode((3, 2, 1, 64, 64), (64, 66, 70), window=40),
        "decode odd sizes": lambda: decode((1, 3, 1, 37, 36), (37,), "float16"),
        "argmax float32": lambda: argmax(5000, "float32"),
        "argmax bfloat16, narrow": lambda: argmax(77, "bfloat16"),
        "head": lambda: head(3, 456, 128),
        "head, odd sizes, soft cap": lambda: head(9, 203, 72, "float16", soft_cap=9.0),
        "head, 70 rows, a NaN": lambda: head(70, 200, 64, nan=True),
    }
    print(json.dumps({name: case() for name, case in cases.items()}))


if __name__ == "__main__":
    sys.exit(main())
