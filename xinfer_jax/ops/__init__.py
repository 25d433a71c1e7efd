"""Operations with forms other than plain jnp: by platform, by kernel, over a mesh of devices.

`operation` is all that the core knows: `run(name, plain, *operands)` runs the form that is plugged in, else
`plain`. `largest` and `product` are operations of the core; others stand in `model/`, `sampling/` and
`generation/`. `forms` chooses the form, for every operation by one rule; `plugins.TABLE` lists the forms:
`mesh` has those over several devices, `cpu/`, `gpu/` and `tpu/` those of a platform, and `kernels/` those by
Pallas kernels. `row_groups` computes some rows after the others; `auto_axes`
traces a whole call over a mesh with Explicit axes.

- A form is chosen when a program is traced, from shapes, dtypes, `impl` and the devices of the process, never
  from the default device. `lax.platform_dependent` then decides whether a program for another device runs it.
- A process without a GPU traces no forms for GPUs, except inside `kernels_pallas.assume_device`.
- `impl` names kernels. It reaches an operation as an argument: jitted functions have it as a static one.
- The plain form is the derivative where an operation says so, since kernels have none.
"""
