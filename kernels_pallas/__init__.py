"""Pallas GPU kernels for attention, the append to a cache, matrix products and the greedy token. Each has a
plain jnp reference of the same name in `reference`, `reference_products` or `reference_append`. This package
does not import the library that uses it.

`dispatch` has `select(kernel, impl, …)`, which chooses the implementation of a call and says why,
`run_kernel(impl, kernel, …)`, and `assume_device`, to compile for a GPU that is not here. `support` says
what each kernel supports. `key_layouts` says where keys are, and has their quantized form. `mosaic` has
kernels for Hopper (TMA, wgmma). `triton` has all kernels for Ampere, Ada and newer, through a backend that
JAX has deprecated (`triton/products.py` says how products work). `compat` has the differences between
versions of jax.

- Shapes, dtypes and the NVIDIA GPU of the process (all its cards are taken to be alike) decide, never the
  default device. With such a GPU a call becomes `lax.platform_dependent(cuda=kernel, default=jnp)`. Without
  one only the jnp path is used, and Pallas is not imported. A named `impl` runs, or raises with the reason.
- On Hopper attention takes Mosaic's kernels for bfloat16 and float16 keys, and Triton's for others: wgmma
  would compute float32 as TF32, and Mosaic has no conversion of 8-bit tiles to operands of wgmma without
  another pass through shared memory.
- Attention kernels read contiguous caches, rings, and pages through the block table. Nothing is gathered
  before. A block of keys is one slice of slots, since its size divides a page and a ring.
- Quantized keys stay levels in the products: q · (low + step · level) = low · Σq + step · (q · level), and
  the weights of values are multiplied by the step. Levels are exact in bfloat16. A bias of keys that RoPE
  rotates has a table of 64 positions; for each block the queries are rotated back by the angle of its first
  position.
- Decode attention takes up to 17 queries of a row (draft tokens and the token before), and splits the key
  blocks that a row needs, not the capacity, among its programs. There are two programs per multiprocessor
  over all rows and heads, a static number. The G queries of a key head, of all tokens, are rows of one tile:
  this wastes arithmetic, which is free while memory is the limit.
- Values beyond the length are zeros: a weight of 0 does not remove a NaN. Triton loads them with a mask.
  Mosaic writes zeros to shared memory, in the one block that contains the end; in prefill the warpgroup that
  loads does it before it passes the block on, so there is no race.
- TMA needs multiples of 8 rows and of 16 columns. A cache has such a number of slots; other widths and
  vocabularies are padded, with a copy per call.
- A mixture of experts has kernels for Triton only, which serve Hopper too. Choices are sorted by expert; each
  program finds its tile in that order by itself, which saves launches. jax's `ragged_dot_mgpu` computes a
  whole tile for each of the X - 1 tiles that may be empty, and needs x gathered in the sorted order.
- Mosaic's entry point disables the check of `jax.shard_map` inside, so results must be marked as varying
  (`match_varying_axes`).
"""

from . import reference
from .dispatch import (
    IMPLS,
    KERNELS,
    Selection,
    assume_device,
    device_impl,
    match_varying_axes,
    platform_of,
    run_kernel,
    select,
    unavailable_reason,
)
from .key_layouts import BIAS_STRIDE, KeyBias, Levels, SideBySide

__all__ = [
    "BIAS_STRIDE",
    "IMPLS",
    "KERNELS",
    "KeyBias",
    "Levels",
    "Selection",
    "SideBySide",
    "assume_device",
    "device_impl",
    "match_varying_axes",
    "platform_of",
    "reference",
    "run_kernel",
    "select",
    "unavailable_reason",
]
