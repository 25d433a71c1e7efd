"""LoRA adapters with random numbers, large enough to change answers."""

import jax

import xinfer_jax as xj


def random_adapter(config: xj.ModelConfig, seed: int, rank: int, **how) -> xj.lora.Adapter:
    adapter = xj.lora.init_adapter(config, jax.random.key(seed), rank, alpha=2 * rank, **how)
    key = jax.random.key(100 + seed)
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(key, x.shape), adapter)
