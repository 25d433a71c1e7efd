"""Layers that `stack_layers` stacked, as one scan: 80 layers are compiled as those of one pattern are."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..errors import InputError
from .decoder_layer import Positions, layer_runner, run_layers


def run_stacked_layers(  # noqa: PLR0913
    layers: dict[str, Any],
    config: ModelConfig,
    kinds: Sequence[int],
    caches: Sequence[int],
    x_BTD: jax.Array,
    positions: Positions,
    kv: tuple[None, ...],
    impl: str | None,
    remat: Any = None,
) -> tuple[jax.Array, tuple[None, ...]]:
    """`run_layers` of layers that are stacked, without a cache."""
    if config.shares_kv:
        raise InputError("layers that use another layer's keys cannot be stacked: give unstack_layers' tree")
    blocks = layers["blocks"]
    pattern = len(blocks)
    rest = len(layers["rest"])
    whole = config.num_hidden_layers - rest
    of_layers = positions.layer_inputs[:whole]
    inputs = tuple(jnp.stack(of_layers[i::pattern]) for i in range(pattern)) if of_layers else ()
    run_one = layer_runner(remat)

    def step(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, None]:
        layers, inputs = block
        for i, layer in enumerate(layers):
            of_layer = positions._replace(layer_inputs=inputs[i : i + 1])
            x_BTD, _ = run_one(layer, config, kinds[i], x_BTD, of_layer, None, impl)
        return x_BTD, None

    x_BTD, _ = lax.scan(step, x_BTD, (blocks, inputs))
    after = positions.of_layers(slice(whole, None))
    return run_layers(
        layers["rest"], config, kinds[whole:], range(rest), x_BTD, after, kv[whole:], impl, remat
    )
