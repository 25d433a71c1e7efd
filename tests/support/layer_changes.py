"""Configs with other layers than those of their family."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from xinfer_jax.config.model_config import ModelConfig


def with_mixer(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of the attention, or linear attention, that has them, of every layer."""
    layers = (
        dataclasses.replace(x, mixer=dataclasses.replace(x.mixer, **changes))
        if all(hasattr(x.mixer, name) for name in changes)
        else x
        for x in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers))


def with_windows(config: ModelConfig, windows: Sequence[int | None], **changes: Any) -> ModelConfig:
    """The first layers of the config, with these windows. changes: of the config."""
    layers = (
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))
        for layer, window in zip(config.layers, windows, strict=False)
    )
    return dataclasses.replace(config, layers=tuple(layers), num_hidden_layers=len(windows), **changes)


def with_experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of all experts."""
    layers = (
        dataclasses.replace(layer, experts=layer.experts and dataclasses.replace(layer.experts, **changes))
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers))
