"""Forms of operations by kernels of `kernels_pallas`: `attention_kernels`; `head` has greedy tokens."""
