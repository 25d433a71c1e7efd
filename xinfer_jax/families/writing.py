"""`to_hf`: the config.json of a model."""

import dataclasses
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..plugins import load
from .draft_heads import mtp_spec, write_draft_head
from .layer_fields import BOTH_SIDES
from .reading import SIZES, from_hf
from .rope_settings import write_rope


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a model, in the field names of transformers 5: the inverse of
    `ModelConfig.from_hf`.

    Raises:
        InputError: config.json of its family has no such model: the fields that it would lose are named.
    """
    family = load("family", config.model_type)
    once = (layer.with_mixer(kv_copies=1) for layer in config.layers)  # of a mesh: not in config.json
    head: Any = config.draft_head
    if head is not None:
        head = dataclasses.replace(head, layer=head.layer.with_mixer(kv_copies=1))
    config = dataclasses.replace(config, layers=tuple(once), draft_head=head)
    causal = dataclasses.replace(config, layers=tuple(map(_causal, config.layers)))
    attention = next(filter(None, (layer.attention for layer in config.layers)), AttentionSpec())
    activation = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    ends = config.eos_token_ids
    settings = dict(
        architectures=[family.architecture], model_type=config.model_type,
        **{name: getattr(config, name) for name in (*SIZES, "rms_norm_eps", "tie_word_embeddings")},
        **{activation: config.hidden_act},
        attention_bias=attention.o_bias,
        mlp_bias=any(layer.mlp is not None and layer.mlp.bias for layer in config.layers),
        rope_parameters=write_rope(config.rope),
        bos_token_id=None,
        eos_token_id=ends[0] if len(ends) == 1 else [*ends] or None,
        pad_token_id=None,
    ) | family.write(causal) | write_draft_head(config)  # fmt: skip
    if causal.layers != config.layers and BOTH_SIDES in family.defaults:
        settings |= {BOTH_SIDES: True, "sliding_window": 2 * settings.get("sliding_window", 1)}
    elif causal.layers != config.layers:
        settings["is_causal"] = False
    read = from_hf(settings)
    if head is not None:
        read = dataclasses.replace(read, draft_head=mtp_spec(read))
    lost = [
        f.name
        for f in dataclasses.fields(config)
        if f.compare and getattr(config, f.name) != getattr(read, f.name)
    ]
    if lost:
        raise InputError(f"config.json of a {config.model_type} model has no place for its {', '.join(lost)}")
    return settings


def _causal(layer: LayerSpec) -> LayerSpec:
    """Returns the layer without attention to later tokens: the inverse of `with_later_tokens`."""
    attention = layer.attention
    if attention is None or not attention.ahead:
        return layer
    return layer.with_mixer(window=attention.window and attention.ahead, ahead=0)
