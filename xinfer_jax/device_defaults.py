"""What the device of this process decides where the caller does not: dtypes, and sizes of prefill chunks."""

from typing import Any

import jax
import jax.numpy as jnp

import kernels_pallas

# Tokens of all rows together in a prefill chunk: 512 queries of the 0.5B shape fill 56 of an H200's 132
# multiprocessors. A v6e reads a matrix of 7B in the time in which it multiplies 560 tokens, and holds the
# activations of 1,024.
_CHUNK_OF_ALL_ROWS = {"gpu": 2048, "tpu": 1024}


def default_dtype(narrow: Any) -> Any:
    """Returns float32 on CPU, elsewhere the narrow type."""
    return jnp.float32 if jax.default_backend() == "cpu" else narrow


def chunk_of_all_rows(length_B: Any) -> int:
    """Returns the most tokens of all rows in a prefill chunk; 0: no number of its own.

    length_B: an array of the cache, or its shape.
    """
    platform = kernels_pallas.default_platform()
    if isinstance(length_B, jax.Array):
        platform = next(iter(length_B.devices())).platform
    return _CHUNK_OF_ALL_ROWS.get(platform, 0)
