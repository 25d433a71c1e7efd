"""Pallas GPU kernels for attention and the greedy token, each beside a plain jnp oracle of the same name in
`reference`. This package knows nothing of the library that uses it.

`dispatch` has `select(kernel, impl, …)`, which says which implementation serves a call and why, and
`run(impl, kernel, …)`; `mosaic` is for Hopper (TMA, wgmma), `triton` the same four for Ampere, Ada and newer,
through a back end that JAX has deprecated: small, removable; `compat` is what differs between versions of
jax.

- The choice is made from shapes, dtypes and the kind of NVIDIA GPU in the process (the cards of one process
  are taken to be alike), never by asking for the default device. With such a GPU a call becomes
  `lax.platform_dependent(cuda=kernel, default=jnp)`; without one it is the jnp path alone, and Pallas is not
  imported. float32 on Hopper takes the jnp path, since wgmma would make it TF32. A named `impl` runs or is
  refused with the reason.
- Decode attention divides the key blocks that a row needs, not the capacity, among its programs, two per
  multiprocessor over rows and heads, a static number. The G queries of a key head are rows of one 64-row
  wgmma tile: the waste is arithmetic that the tensor cores have to spare while memory is the limit. Parts
  come last in what they leave, or XLA merges them in three kernels instead of one.
- Values past the length are zeroed in shared memory, in the one block that holds the border: a weight of 0
  does not silence a NaN. In prefill the fetching warpgroup does it before it hands the block over, so no
  other races.
- TMA wants rows in eights and columns in sixteens: a cache has its slots so; other widths and vocabularies
  are padded, a copy per call.
- Mosaic's entry point switches off the check of `jax.shard_map` inside, so results say themselves that they
  vary (`varying_as`).
"""

from . import reference
from .dispatch import IMPLS, KERNELS, Selection, device_impl, run, select, unavailable, varying_as

__all__ = [
    "IMPLS",
    "KERNELS",
    "Selection",
    "device_impl",
    "reference",
    "run",
    "select",
    "unavailable",
    "varying_as",
]
