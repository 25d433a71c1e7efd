"""Forms of operations for CPUs, GPUs and TPUs, by kernels, and over a mesh of devices.

The table in `plugins.py` names these modules. Only the packages above this one import from here:
`kernels_used`, and the properties of the CPU in `cpu/cpu_features`.

- `cpu/`, `gpu/` and `tpu/` have the forms of a platform, in plain `jnp`, also of products with quantized
  leaves.
- `kernels/` has the forms by Pallas kernels of `kernels_pallas`.
- `mesh` has the forms over several devices. `auto_axes` traces a whole call over a mesh with Explicit axes.
- `expert_tiles` computes the gradient of experts by tiles of tokens.
- `row_groups` computes groups of a few rows one after the other, so that temporaries stay small.
- `kernel_report` says which kernels a model uses, and why it does not use the others.
"""
