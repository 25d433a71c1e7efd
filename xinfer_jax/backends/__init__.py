"""Forms of operations for CPUs, GPUs and TPUs, by kernels, and over a mesh of devices.

The table in `plugins.py` names these modules. Of the other packages only those above it import from here:
`kernels_used`, and what `cpu/cpu_features` says about the CPU.

- `cpu/`, `gpu/` and `tpu/` have the forms of a platform, in plain `jnp`, also of products with quantized
  leaves.
- `kernels/` has the forms by Pallas kernels of `kernels_pallas`.
- `mesh` has the forms over several devices. `auto_axes` traces a whole call over a mesh with Explicit axes.
- `expert_tiles` computes the gradient of experts by tiles of tokens.
- `row_groups` computes some rows after the others, so that temporaries are those of few rows.
- `kernel_report` says which kernels a model uses, and why it does not use the others.
"""
