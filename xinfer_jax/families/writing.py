"""`to_hf`: the config.json of a model."""

import dataclasses
from typing import Any

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..plugins import load
from .reading import SIZES, from_hf
from .rope_settings import write_rope


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of a model, in the field names of transformers 5: the inverse of `from_hf`.

    Raises:
        InputError: config.json of its family has no such model: the fields that it would lose are named.
    """
    family = load("family", config.model_type)
    attention = next((x.mixer for x in config.layers if isinstance(x.mixer, AttentionSpec)), AttentionSpec())
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
    ) | family.write(config)  # fmt: skip
    read = from_hf(settings)
    lost = [
        f.name
        for f in dataclasses.fields(config)
        if f.compare and getattr(config, f.name) != getattr(read, f.name)
    ]
    if lost:
        raise InputError(f"config.json of a {config.model_type} model has no place for its {', '.join(lost)}")
    return settings
