"""Forms of operations by the kernels of `kernels_pallas`: `head` for greedy tokens."""
