"""Forms of operations by the kernels of `kernels_pallas`: `attention`, and `head` for greedy tokens."""
