"""Forms of operations by kernels of `kernels_pallas`: `product_kernels`, `attention_kernels`,
`append_kernels`, `expert_kernels`, `delta_kernels`, `mamba_kernels`, and `head` for greedy tokens.
"""
