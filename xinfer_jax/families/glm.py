"""GLM-4: interleaved RoPE of a part of each head, gate and up in one tensor. `glm4` (GLM-4-0414, GLM-Z1) also
has norms after attention and MLP, `glm` (GLM-4-9B, GLM-Edge) has not.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Joined, Names
from .rope_settings import read_rope, write_partial_rope
from .values import get_boolean


def read_glm(hf: Mapping, layers: int) -> dict[str, Any]:
    layer = LayerSpec((AttentionSpec(qkv_bias=get_boolean(hf, "attention_bias")),))
    rope = read_rope(hf, partial=True, interleaved=True)
    return dict(rope=rope, layers=(layer,) * layers)


def read_glm4(hf: Mapping, layers: int) -> dict[str, Any]:
    read = read_glm(hf, layers)
    return read | dict(layers=tuple(dataclasses.replace(layer, post_norm=True) for layer in read["layers"]))


def write_glm(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return dict(attention_bias=mixer.qkv_bias, rope_parameters=write_partial_rope(config.rope))


_DEFAULTS = dict(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7)
_DEFAULTS |= dict(attention_bias=True, partial_rotary_factor=0.5)
_JOINED = (Joined("mlp.gate_up_proj", ("gate", "up")),)
_POST_NORMS = dict(
    attn_post_norm="post_self_attn_layernorm.weight", mlp_post_norm="post_mlp_layernorm.weight"
)
GLM = Family(_DEFAULTS, read_glm, "GlmForCausalLM", write_glm, Names({}, _JOINED))
GLM4 = Family(_DEFAULTS, read_glm4, "Glm4ForCausalLM", write_glm, Names(_POST_NORMS, _JOINED))
