"""The parameters of a model, quantized weights, and matrix products with both.

Reading order:

- `param_specs` is the tree of parameter shapes and logical axes. It is the one source for `initialization`,
  for the loader's check and for byte counts.
- `params` counts bytes and chooses dtypes.
- `layout` says how the tree is divided over a mesh, and `resharding` moves a tree to other devices.
- `stacking` stacks equal layers. `params_like` gives a tree the form of another tree.
- `weight_leaf` is the protocol of leaves that are no float arrays. `quantized_weight` is their common part,
  and `rotated_weight` is the common part of int8 and int4.
- A kind of leaf is a file: `int8_weight`, `grouped_weight` (int4), `fp8_weight`, `ternary` (BitNet), `mxfp4`
  (gpt-oss's experts). `padded_weight` (for TPUs) and `adapted_weight` (LoRA) hold other leaves.
- `quantization` quantizes, and `device_quantization` does so on accelerators. `dequantization` makes floats
  of quantized leaves, and `hadamard` rotates.
- `layers` has norms, RoPE, and products with leaves.

Decisions:

- Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and the product of a
  single row reads each output's weights contiguously.
- A matrix with a side of at most 64 has more scales: in such a small model many tokens are near ties.
"""
