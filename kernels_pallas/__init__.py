"""Pallas GPU kernels for attention and the greedy token. Each has a plain jnp reference of the same name in
`reference`. This package does not import the library that uses it.

`dispatch` has `select(kernel, impl, …)`, which chooses the implementation of a call and says why,
`run_kernel(impl, kernel, …)`, and `assume_device`, to compile for a GPU that is not here. `mosaic` has
kernels for Hopper (TMA, wgmma). `triton` has the same four for Ampere, Ada and newer, through a backend that
JAX has deprecated; it is small and removable. `compat` has the differences between versions of jax.

- Shapes, dtypes and the NVIDIA GPU of the process (all its cards are taken to be alike) decide, never the
  default device. With such a GPU a call becomes `lax.platform_dependent(cuda=kernel, default=jnp)`. Without
  one only the jnp path is used, and Pallas is not imported. float32 on Hopper takes the jnp path, since wgmma
  would compute it as TF32. A named `impl` runs, or raises with the reason.
- Decode attention splits the key blocks that a row needs, not the capacity, among its programs. There are two
  programs per multiprocessor over all rows and heads, a static number. The G queries of a key head are rows
  of one 64-row wgmma tile: this wastes arithmetic, which is free while memory is the limit. The split axis is
  last in the partial results; otherwise XLA merges them in three kernels instead of one.
- Values beyond the length are set to zero in shared memory, in the one block that contains the end: a weight
  of 0 does not remove a NaN. In prefill the warpgroup that loads does it before it passes the block on, so
  there is no race.
- TMA needs multiples of 8 rows and of 16 columns. A cache has such a number of slots; other widths and
  vocabularies are padded, with a copy per call.
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
    run_kernel,
    select,
    unavailable_reason,
)

__all__ = [
    "IMPLS",
    "KERNELS",
    "Selection",
    "assume_device",
    "device_impl",
    "match_varying_axes",
    "reference",
    "run_kernel",
    "select",
    "unavailable_reason",
]
