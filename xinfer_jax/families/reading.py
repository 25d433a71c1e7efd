"""`from_hf`: the config of a model from its config.json."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..plugins import load, names
from ..wrong_types import not_a_config_file
from .layer_fields import with_later_tokens
from .rope_settings import read_rope
from .values import MAX_CONTEXT, get_boolean, get_integer, get_number, no_indexer
from .wrappers import placeholder_ids, text_settings

_ACTIVATIONS = dict(silu="silu", swish="silu", gelu_pytorch_tanh="gelu_pytorch_tanh", relu2="relu2")
_DEFAULTS: dict[str, Any] = dict(  # of all families
    rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, mlp_bias=False, hidden_act="silu",
    use_sliding_window=False, is_causal=True,
)  # fmt: skip
_INDEXED = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next")  # whose indexer chooses tokens
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Runs `ModelConfig.from_hf`."""
    if not isinstance(hf, Mapping):
        raise not_a_config_file(hf)
    hf = text_settings(hf)
    model_type = hf.get("model_type")
    family = load("family", model_type) if isinstance(model_type, str) else None
    if family is None and model_type in _INDEXED:
        raise no_indexer(hf, "model_type")
    if family is None:
        raise InputError(
            f"model_type {format_value(model_type)} is not supported: use one of"
            f" {', '.join(sorted(names('family')))}"
        )
    hf = {**family.complete({**_DEFAULTS, **family.defaults, **hf})}
    activation = hf["hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"]
    if activation == "gelu" and family.defaults.get("hidden_act") == "gelu_pytorch_tanh":  # Gemma's old name
        activation = "gelu_pytorch_tanh"
    _check_supported(hf, activation, {*_ACTIVATIONS, family.defaults.get("hidden_act", "silu")})
    heads = get_integer(hf, "num_attention_heads")
    hidden = get_integer(hf, "hidden_size")
    if hf.get("num_key_value_heads") is None:
        hf["num_key_value_heads"] = heads
    if hf.get("head_dim") is None:
        if hidden % heads:
            raise InputError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and config.json"
                " gives no head_dim"
            )
        hf["head_dim"] = hidden // heads
    sizes = {name: get_integer(hf, name) for name in SIZES}
    own = family.read(hf, sizes["num_hidden_layers"])
    config = ModelConfig(
        **dict(
            model_type=model_type,
            rms_norm_eps=get_number(hf, "rms_norm_eps"),
            tie_word_embeddings=get_boolean(hf, "tie_word_embeddings"),
            hidden_act=_ACTIVATIONS.get(activation, activation),
            placeholder_ids=placeholder_ids(hf),
            rope=own["rope"] if "rope" in own else read_rope(hf),
            **sizes,
        )
        | own
    )
    if not get_boolean(hf, "is_causal"):
        config = dataclasses.replace(config, layers=tuple(map(_not_causal, config.layers)))
    _check_consistency(config)
    return config


def _not_causal(layer: LayerSpec) -> LayerSpec:
    """Returns the layer for `is_causal` false: its attention, if it has one, sees later tokens too."""
    attention = layer.attention
    if attention is None or attention.ahead:
        return layer
    return with_later_tokens(layer, attention.window)


def _check_supported(hf: Mapping, activation: Any, activations: Collection[str]) -> None:
    if not isinstance(activation, str) or activation not in activations:
        raise InputError(
            f"hidden_act {format_value(activation)} is not supported: use one of"
            f" {', '.join(sorted(activations))}"
        )
    architectures = [] if hf.get("architectures") is None else hf["architectures"]
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if not str(name).endswith("ForCausalLM"):
            raise InputError(
                f"architecture {format_value(name)} is not supported: only causal language models"
                " (…ForCausalLM) are"
            )


def _check_consistency(config: ModelConfig) -> None:
    attentions = filter(None, (layer.attention for layer in config.layers))
    own = (x.num_key_value_heads or config.num_key_value_heads for x in attentions)
    for heads in {config.num_key_value_heads, *own}:
        if config.num_attention_heads % heads:
            raise InputError(
                f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads"
                f" {heads}"
            )
    if config.context_length > MAX_CONTEXT:
        raise InputError(
            f"max_position_embeddings {config.max_position_embeddings} with rope factor {config.rope.factor}"
            f" is a context of {config.context_length} tokens, more than {MAX_CONTEXT}"
        )
    if config.ropes:
        _check_rotated_widths(config)


def _check_rotated_widths(config: ModelConfig) -> None:
    """Raises InputError for heads that RoPE cannot rotate."""
    for width in {config.head_dim, *config.head_widths}:
        if width % 2:
            raise InputError(f"head_dim {width} is odd: rotary embedding needs an even one")
    if config.rope.rope_type == "dynamic" and config.head_dim == 2:
        raise InputError("rope type 'dynamic' needs a head_dim above 2: it divides by head_dim - 2")
    width = config.rope.head_dim or config.head_dim
    rotated = config.rope.rotated_width(width)
    if rotated % 2 or not 0 < rotated <= width or config.rope.partial_rotary_factor > 1:
        raise InputError(
            f"partial_rotary_factor {config.rope.partial_rotary_factor} rotates {rotated} of"
            f" {width} numbers of a head: rotary embedding needs an even part of it"
        )
    for name in ("short_factor", "long_factor"):
        given = len(getattr(config.rope, name))
        if config.rope.rope_type == "longrope" and given != rotated // 2:
            raise InputError(
                f"{name} has {given} entries, the {rotated} rotated numbers of a head need {rotated // 2}"
            )
