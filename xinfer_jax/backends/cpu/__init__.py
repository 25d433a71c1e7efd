"""Forms for CPUs.

`cpu_features` says what the CPU multiplies fast, and `product_table` has the forms of products by it.
`cpu_products` multiplies by float, int8 and FP8 matrices, `grouped_products` by int4 and int8 in groups,
`mxfp4_products` and `ternary_products` by these kinds. `cpu_sampler` samples tokens, and `layer_forms` has
attention, experts and the step of linear attention.

- XLA has a fast int8 and bfloat16 product on CPU from two rows on: a single bfloat16 row is padded, and an
  int8 activation is split into two int8 numbers. Sums of int8 are exact, so every form gives the same bits.
- Types without a fast product are converted to float32 a tile of outputs at a time. int4 is not unpacked for
  a few rows: activations are transformed instead. A ternary row counts the common bits of two bit planes.
"""
