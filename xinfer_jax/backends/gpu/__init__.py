"""Forms of operations for NVIDIA GPUs: `reductions`, `top_k`, `gpu_sampler` and `verify` are in plain jnp,
and `cudnn_attention` is by cuDNN.
"""
