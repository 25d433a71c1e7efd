"""The parameters of a model, quantized weights, and matrix products with both.

In the order to read: `param_specs` is the tree of parameter shapes and logical axes, the one source for
`initialization`, for the loader's check and byte counts. `params` counts bytes and chooses dtypes; `layout`
says how the tree is divided over a mesh; `stacking` stacks equal layers, `resharding` moves a tree to other
devices, `params_like` gives it another's form. `weight_leaf` is the protocol of leaves that are no float
arrays, `quantized_weight` their common part, `rotated_weight` that of int8 and int4. A kind is a file:
`int8_weight`, `grouped_weight` (int4), `fp8_weight`, `ternary` (BitNet), `mxfp4` (gpt-oss's experts);
`padded_weight` (for TPUs) and `adapted_weight` (LoRA) hold others. `quantization` quantizes, on
accelerators `device_quantization`; `dequantization` makes floats of them; `hadamard` rotates. `layers` has
norms, RoPE, and products with leaves.

- Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and the product of a
  single row reads each output's weights contiguously.
- A matrix with a side of at most 64 has more scales: in so small a model many tokens are near ties.
"""
