"""Configs with other layers than those of their family."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from xinfer_jax.config.model_config import ModelConfig


def with_mixer(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of the mixers that have them, of every layer."""
    return dataclasses.replace(config, layers=tuple(layer.with_mixer(**changes) for layer in config.layers))


def with_windows(config: ModelConfig, windows: Sequence[int | None], **changes: Any) -> ModelConfig:
    """The first layers of the config, with these windows. changes: of the config."""
    layers = (layer.with_mixer(window=window) for layer, window in zip(config.layers, windows, strict=False))
    return dataclasses.replace(config, layers=tuple(layers), num_hidden_layers=len(windows), **changes)


def with_experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of all experts."""
    layers = (
        dataclasses.replace(layer, feed_forward=dataclasses.replace(layer.experts, **changes))
        if layer.feed_forward is layer.experts and layer.experts
        else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=tuple(layers))
