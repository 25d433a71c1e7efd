"""Layers that `stack_layers` stacked, as one scan: 80 layers are compiled as those of one pattern are."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
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
    run_config: RunConfig,
) -> tuple[jax.Array, tuple[None, ...], list[jax.Array | None]]:
    """`run_layers` of layers that are stacked, without a cache."""
    if config.shares_kv:
        raise InputError("layers that use another layer's keys cannot be stacked: give unstack_layers' tree")
    blocks = layers["blocks"]
    pattern = len(blocks)
    rest = len(layers["rest"])
    whole = config.num_hidden_layers - rest
    run_one = layer_runner(run_config)

    def stack(of_layers: tuple) -> tuple:
        """As blocks are."""
        kinds = [of_layers[i:whole:pattern] for i in range(pattern)] if of_layers else ()
        return tuple(jax.tree.map(lambda *xs: jnp.stack(xs), *kind) for kind in kinds)

    def step(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, list]:
        layers, inputs, routes = block
        experts = []
        for i, layer in enumerate(layers):
            of_layer = positions._replace(layer_inputs=inputs[i : i + 1], routes=routes[i : i + 1])
            x_BTD, _, expert_MU = run_one(layer, config, kinds[i], x_BTD, of_layer, None, run_config, None)
            experts.append(expert_MU)
        return x_BTD, experts

    xs = blocks, stack(positions.layer_inputs), stack(positions.routes)
    x_BTD, stacked = lax.scan(step, x_BTD, xs)
    of_blocks = [jax.tree.map(lambda x, i=i: x[i // pattern], stacked[i % pattern]) for i in range(whole)]
    after = positions.of_layers(slice(whole, None))
    x_BTD, kv, experts = run_layers(
        layers["rest"], config, kinds[whole:], range(rest), x_BTD, after, kv[whole:], run_config
    )
    return x_BTD, kv, of_blocks + experts
