"""Plain `jnp` forms of operations, and the one rule that chooses another form.

Reading order:

- `operation` is all that the core knows: `run(name, plain, run_config, **operands)` runs the form that is
  plugged in, otherwise `plain`.
- `largest` and `product` are operations of the core. Other packages have their own plain forms next to the
  code that calls them.
- `forms` chooses the form, for every operation by one rule. `plugins.TABLE` lists the forms, which are in
  `backends/`. An entry of the table gets a `Call` and returns the form for it, or None.

Decisions:

- A form is chosen when a program is traced, from shapes, dtypes, `impl` and the devices of the process, never
  from the default device. `lax.platform_dependent` then decides whether a program for another device runs it.
- A process without a GPU traces no forms for GPUs, except inside `kernels_pallas.assume_device`.
- `RunConfig.impl` names kernels. Jitted functions have the `RunConfig` as a static argument.
- The plain form is the derivative if an operation says so, since kernels have none.
"""
