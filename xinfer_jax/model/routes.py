"""Routes of mixtures of experts: the experts that each token uses in each layer, given or recorded."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_array, check_range
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..mixers.mixer import Positions


def routes_shape(config: ModelConfig) -> tuple[int, int]:
    """Returns [L, U] of a token's routes. Raises InputError if the model has no mixture."""
    mixtures = sum(layer.experts is not None for layer in config.layers)
    if not mixtures:
        raise InputError(
            "routed_experts are of mixtures of experts, and this model has none: do not ask for them"
        )
    return mixtures, config.num_experts_per_tok


def free_routes(config: ModelConfig, tokens_shape: tuple[int, ...]) -> jax.Array:
    """Returns routes of tokens [B, T], int32 [B, T, L, U], that are all -1: the router chooses. Raises
    InputError if the model has no mixture.
    """
    return jnp.full((*tokens_shape, *routes_shape(config)), -1, jnp.int32)


def free_routes_of_layers(config: ModelConfig, tokens_shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns `LayerInputs.route_BTU` of the host, for which nothing is compiled."""
    free_BTU = np.full((*tokens_shape, config.num_experts_per_tok), -1, np.int32)
    return tuple(free_BTU if layer.experts else None for layer in config.layers)


def routes_of_layers(
    config: ModelConfig, tokens_shape: tuple[int, ...], given: Any
) -> tuple[jax.Array | None, ...]:
    """Returns `LayerInputs.route_BTU` of each layer, from routes of all layers. given: None: `free_routes`.

    Raises:
        InputError: the shape or type is another, or the model has no mixtures. Outside a trace also if there
            is no such expert.
    """
    free = free_routes(config, tokens_shape)
    given = free if given is None else given
    check_array("routed_experts", given, np.integer, *free.shape)
    check_range("routed_experts: expert", given, -1, config.num_experts - 1)
    mixtures = iter(jnp.moveaxis(jnp.asarray(given, jnp.int32), 2, 0))
    return tuple(next(mixtures) if layer.experts else None for layer in config.layers)


def routes_used(experts: Sequence[jax.Array | None], positions: Positions) -> jax.Array:
    """Returns routes, int32 [B, T, L, U], of the experts [B·T, U] that layers used. -1 at padding."""
    B, T = positions.position_BT.shape
    of_mixtures = [x.reshape(B, T, -1) for x in experts if x is not None]
    is_real_BT = jnp.arange(T) < positions.num_tokens_B[:, None]
    return jnp.where(is_real_BT[..., None, None], jnp.stack(of_mixtures, 2), -1)
