"""Forms of operations for CPUs.

- `cpu_features` finds the kinds of products that the CPU computes fast, and `product_table` chooses the forms
  of products by them.
- `cpu_products` multiplies by float, int8 and FP8 matrices, and `grouped_products` by int4 and int8 in
  groups. `mxfp4_products` and `ternary_products` multiply by these kinds.
- `cpu_sampler` samples tokens.
- `layer_forms` has attention, experts and the step of linear attention.

Decisions:

- XLA has a fast int8 and bfloat16 product on CPU from two rows on: a single bfloat16 row is padded, and an
  int8 activation is split into two int8 numbers. Sums of int8 are exact, so every form gives the same bits.
- Types without a fast product are converted to float32 a tile of outputs at a time. int4 is not unpacked for
  a few rows: activations are transformed instead. A ternary row counts the common bits of two bit planes.
"""
