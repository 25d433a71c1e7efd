"""Bamba: most layers are Mamba-2, and the others are attention that rotates a half of each head. Each layer
has an MLP.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.mamba2 import Mamba2Spec
from .family import Family, Names
from .layer_fields import attention_bias
from .mamba_fields import mamba2_names
from .mamba_hybrids import (
    ATTENTION,
    MAMBA,
    MAMBA_DEFAULTS,
    mamba_types,
    read_mamba,
    read_mamba_types,
    write_mamba,
)
from .rope_settings import ROPE_TYPES, read_rope, write_partial_rope
from .values import get_boolean

_ROTATED = 0.5  # of each head, if config.json does not say it


def read_bamba(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("partial_rotary_factor") is None:
        hf = {**hf, "partial_rotary_factor": _ROTATED}
    mlp = MlpSpec(bias=get_boolean(hf, "mlp_bias"))
    of_type = {
        MAMBA: LayerSpec((read_mamba(hf),), mlp),
        ATTENTION: LayerSpec((AttentionSpec(**attention_bias(hf)),), mlp),
    }
    types = _layer_types(hf, layers)
    return dict(rope=read_rope(hf, ROPE_TYPES, partial=True), layers=tuple(of_type[kind] for kind in types))


def _layer_types(hf: Mapping, layers: int) -> list[str]:
    """Returns the type of each layer, by `layer_types` or `attn_layer_indices`. Without them all are
    Mamba-2.
    """
    types = read_mamba_types(hf, layers)
    if types is not None:
        return types
    found = () if hf.get("attn_layer_indices") is None else hf["attn_layer_indices"]
    if not isinstance(found, list | tuple) or not all(type(i) is int and 0 <= i < layers for i in found):
        raise InputError(
            f"attn_layer_indices must list layers from 0 to {layers - 1}, got {format_value(found)}"
        )
    return [ATTENTION if i in found else MAMBA for i in range(layers)]


def write_bamba(config: ModelConfig) -> dict[str, Any]:
    indices = [i for i, kind in enumerate(mamba_types(config)) if kind == ATTENTION]
    return write_mamba(config) | dict(
        attn_layer_indices=indices, rope_parameters=write_partial_rope(config.rope)
    )


# Of a layer also those of Falcon-H1.
LEAVES = dict(final_norm="model.final_layernorm.weight", mlp_norm="pre_ff_layernorm.weight") | {
    leaf: f"feed_forward.{leaf}_proj" for leaf in ("gate", "up", "down")
}
FAMILY = Family(
    dict(
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        attn_layer_indices=None,
        **MAMBA_DEFAULTS,
    ),
    read_bamba,
    "BambaForCausalLM",
    write_bamba,
    Names(LEAVES),
    {Mamba2Spec.kind: mamba2_names("mamba")},
)
