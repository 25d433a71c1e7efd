"""Checks of features that models with some parts do not support. Every such check asks the parts."""

from collections.abc import Iterator

from ..errors import InputError
from .model_config import ModelConfig


def check_supported(config: ModelConfig, feature: str, what: str, remedy: str) -> None:
    """Raises InputError if the model has a part that does not support a feature. what: the name of the
    feature in the message, with its verb.

    Features: "scales" (of inputs of matrices), "leaf formats" (ours and BitNet's), "inputs_BTD", "draft
    model", and "causal" (hidden states that depend on no later token).
    """
    for part in _obstacles(config, feature):
        raise InputError(
            f"{what} not supported for model_type {config.model_type!r}, which has {part}: {remedy}"
        )


def _obstacles(config: ModelConfig, feature: str) -> Iterator[str]:
    """Yields the parts of the model with which a feature is not supported."""
    layers = range(config.num_hidden_layers)
    for feed_forward in filter(None, map(config.feed_forward, layers)):
        yield from filter(None, [feed_forward.unsupported.get(feature)])
    specs = config.layers
    are_plain = all(x.pre_norm and not x.post_norm and not x.centered_norms for x in specs)
    if feature == "scales" and (config.norm_offset or not are_plain):
        yield "norms of another kind or in other places"
    if feature == "leaf formats" and any(spec.scalar for spec in specs):
        yield "layers whose output is scaled"
    if feature == "inputs_BTD" and config.hidden_size_per_layer_input > 0:
        yield "inputs of each layer by token id"
    for layer in layers:
        for mixer in config.mixers(layer):
            yield from filter(None, [mixer.unsupported.get(feature)])


def check_causal(config: ModelConfig, what: str) -> None:
    """Raises InputError if hidden states depend on later tokens. what: the feature that needs causal hidden
    states, for the message.
    """
    check_supported(config, "causal", f"{what} is", "use hidden_states or embed_texts")
