"""A model with artificial outliers in its activations, to measure what quantization loses to them."""

import jax.numpy as jnp

from ..config.model_config import ModelConfig
from ..config.unsupported import check_supported
from ..weights.params import Params


def with_outliers(params: Params, config: ModelConfig, factor: float) -> Params:
    """Returns parameters of the same function, in which one in 64 input channels of every matrix has
    activations larger by a factor: gains of norms, values and up_proj are multiplied, the next weights
    divided. Raises InputError where the model has a part with which that is not supported.
    """
    check_supported(config, "rotations", "artificial outliers are", "leave them out")

    def channel_factors(size: int) -> jnp.ndarray:
        return jnp.where(jnp.arange(size) % 64 == 5, factor, 1.0)

    def multiply_outputs(leaf: Params, by_O: jnp.ndarray) -> Params:
        bias = {"bias": leaf["bias"] * by_O} if "bias" in leaf else {}
        return {"weight": leaf["weight"] * by_O[:, None]} | bias

    def divide_inputs(leaf: Params, by_I: jnp.ndarray) -> Params:
        return leaf | {"weight": leaf["weight"] / by_I}

    def layer(layer: Params) -> Params:
        by_D = channel_factors(config.hidden_size)
        by_F = channel_factors(config.intermediate_size)
        by_KH = channel_factors(config.num_key_value_heads * config.head_dim)
        groups = config.num_attention_heads // config.num_key_value_heads
        by_NH = jnp.repeat(by_KH.reshape(-1, config.head_dim), groups, 0).reshape(-1)
        gains = {name: layer[name] * by_D for name in ("attn_norm", "mlp_norm")}
        first = {name: divide_inputs(layer[name], by_D) for name in ("q", "k", "v", "gate", "up")}
        scaled = {"v": multiply_outputs(first["v"], by_KH), "up": multiply_outputs(first["up"], by_F)}
        last = {"o": divide_inputs(layer["o"], by_NH), "down": divide_inputs(layer["down"], by_F)}
        return layer | gains | first | scaled | last

    return params | {"layers": tuple(map(layer, params["layers"]))}
