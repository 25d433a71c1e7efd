"""Forms of operations for NVIDIA GPUs, in plain jnp: `reductions`, `top_k`, `gpu_sampler`, `verify`; and
`cudnn_attention`, by cuDNN.
"""
