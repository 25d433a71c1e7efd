"""Differences between jax 0.10.2, 0.11 and 0.12, and nothing else."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_AFTER_0_10 = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)


def transpose_ref(ref):
    """Returns the transpose of a two-dimensional reference."""
    return ref.transpose((1, 0)) if _AFTER_0_10 else plgpu.transpose_ref(ref, (1, 0))


def load(ref, start, size, layout):
    """Returns `size` elements of a one-dimensional reference from `start` on, in the given register
    layout.
    """
    return (
        plgpu.load(ref.at[pl.ds(start, size)], layout=layout)
        if _AFTER_0_10
        else plgpu.load(ref, (pl.ds(start, size),), layout=layout)
    )


def store_scattered(ref, value):
    """Stores to scattered addresses, which jax 0.12 requires to be stated."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
