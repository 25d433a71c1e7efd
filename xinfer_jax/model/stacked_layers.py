"""Layers that `stack_layers` stacked, as one scan: 80 layers compile as fast as the layers of one pattern."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.run_config import RunConfig
from ..errors import InputError
from .decoder_layer import LayerGroup, LayerInputs, LayersOutput, Positions, layer_runner, run_layers
from .extras import Extras


def run_stacked_layers(
    layers: dict[str, Any],
    group: LayerGroup,
    x_BTD: jax.Array,
    positions: Positions,
    inputs: tuple[LayerInputs, ...],
    extras: Extras,
    caches: tuple[None, ...],
    run_config: RunConfig,
) -> LayersOutput:
    """Runs `run_layers` of layers that are stacked, without a cache."""
    config = group.config
    if config.shares_kv:
        raise InputError("layers that use another layer's keys cannot be stacked: give unstack_layers' tree")
    if extras.adapters.get("layers") or extras.vectors:
        raise InputError("stacked layers take no adapters or vectors of rows: give unstack_layers' tree")
    blocks = layers["blocks"]
    pattern = len(blocks)
    whole = len(group.kinds) - len(layers["rest"])
    run_one = layer_runner(run_config)
    of_kinds = [inputs[i:whole:pattern] for i in range(pattern)]
    stacked_inputs = [jax.tree.map(lambda *xs: jnp.stack(xs), *of_kind) for of_kind in of_kinds]

    def step(x_BTD: jax.Array, block: Any) -> tuple[jax.Array, list]:
        experts = []
        for i, (layer, own) in enumerate(zip(*block, strict=True)):
            none = (None,) * len(group.caches[i])
            out = run_one(layer, config, group.kinds[i], x_BTD, positions, own, none, run_config)
            x_BTD = out.hidden_BTD
            experts.append(out.experts)
        return x_BTD, experts

    x_BTD, stacked = lax.scan(step, x_BTD, (blocks, stacked_inputs))
    of_blocks = [jax.tree.map(lambda x, i=i: x[i // pattern], stacked[i % pattern]) for i in range(whole)]
    rest = slice(whole, None)
    args = x_BTD, positions, inputs[rest], extras, caches, run_config
    out = run_layers(layers["rest"], group.part(rest), *args)
    return out._replace(experts=of_blocks + out.experts)
