"""A model whose activations have outliers made on purpose, to measure what roundings lose to them."""

import jax.numpy as jnp

from ..config.model_config import ModelConfig
from ..weights.params import Params
from ..weights.rotation import check_gains


def with_outliers(params: Params, config: ModelConfig, factor: float) -> Params:
    """The same function of a float model without experts, in which a channel in 64 of what enters matrices is
    so many times larger: norms' gains, values and the MLP's inside; the weights behind are divided.

    Raises:
        InputError: as `check_gains`.
    """
    check_gains(config, "outliers made on purpose")

    def factors(size: int) -> jnp.ndarray:
        return jnp.where(jnp.arange(size) % 64 == 5, factor, 1.0)

    def rows(leaf: Params, by_O: jnp.ndarray) -> Params:
        bias = {"bias": leaf["bias"] * by_O} if "bias" in leaf else {}
        return {"weight": leaf["weight"] * by_O[:, None]} | bias

    def columns(leaf: Params, by_I: jnp.ndarray) -> Params:
        return leaf | {"weight": leaf["weight"] / by_I}

    def layer(layer: Params) -> Params:
        by_D = factors(config.hidden_size)
        by_F = factors(config.intermediate_size)
        by_KH = factors(config.num_key_value_heads * config.head_dim)
        groups = config.num_attention_heads // config.num_key_value_heads
        by_NH = jnp.repeat(by_KH.reshape(-1, config.head_dim), groups, 0).reshape(-1)
        gains = {name: layer[name] * by_D for name in ("attn_norm", "mlp_norm")}
        read = {name: columns(layer[name], by_D) for name in ("q", "k", "v", "gate", "up")}
        inside = {"v": rows(read["v"], by_KH), "up": rows(read["up"], by_F)}
        behind = {"o": columns(layer["o"], by_NH), "down": columns(layer["down"], by_F)}
        return layer | gains | read | inside | behind

    return params | {"layers": tuple(map(layer, params["layers"]))}
