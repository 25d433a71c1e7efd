"""What is not supported for models with some kinds of layers: the one table that every such check reads."""

from collections.abc import Callable

from ..errors import InputError
from .model_config import ModelConfig


def _has_other_norms(config: ModelConfig) -> bool:
    """Norms whose gains cannot be folded into the matrices after them."""
    return bool(config.norm_offset) or any(
        layer.post_norm
        or not layer.pre_norm
        or getattr(layer.mixer, "o_norm", False)
        or (layer.mlp is not None and layer.mlp.down_norm)
        for layer in config.layers
    )


_PARTS: dict[str, Callable[[ModelConfig], bool]] = {
    "a mixture of experts": lambda config: config.experts is not None,
    "norms of another kind or in other places": _has_other_norms,
    "linear attention": lambda config: config.linear_attention is not None,
    "layers whose output is scaled": lambda config: any(layer.scalar for layer in config.layers),
    "inputs of each layer by token id": lambda config: config.hidden_size_per_layer_input > 0,
    "attention to later tokens": lambda config: any(getattr(x.mixer, "ahead", 0) for x in config.layers),
    "an MLP without a gate": lambda config: any(x.mlp and not x.mlp.gated for x in config.layers),
}
_EXPERTS, _NORMS, _LINEAR, _SCALED, _INPUTS, _LATER, _NO_GATE = _PARTS
_UNSUPPORTED = {  # by feature: the parts of a model with which it is not
    "scales": (_EXPERTS, _NORMS, _LINEAR, _NO_GATE),
    "leaf formats": (_EXPERTS, _LINEAR, _SCALED),  # ours and BitNet's
    "inputs_BTD": (_INPUTS,),
    "draft model": (_LINEAR, _LATER),
    "causal": (_LATER,),
}


def check_supported(config: ModelConfig, feature: str, what: str, remedy: str) -> None:
    """Raises InputError where the model has a part with which a feature, a key of the table, is not
    supported. what: the feature in the message, with its verb.
    """
    for part in _UNSUPPORTED[feature]:
        if _PARTS[part](config):
            raise InputError(
                f"{what} not supported for model_type {config.model_type!r}, which has {part}: {remedy}"
            )


def check_causal(config: ModelConfig, what: str) -> None:
    """Raises InputError where hidden states depend on later tokens. what: needs that they do not."""
    check_supported(config, "causal", f"{what} is", "use hidden_states or embed_texts")
