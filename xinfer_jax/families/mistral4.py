"""Mistral Small 4: latent attention with queries scaled by position, and experts that a softmax router
chooses, with one that all tokens use.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..mixers.latent_attention import LatentAttentionSpec
from .family import Family
from .grouped_experts import DEFAULTS, NAMES, with_grouped_experts, write_grouped_experts
from .latent_fields import KV_B, read_latent_attention, write_latent_attention
from .layer_fields import unused_shared_experts
from .llama import read_query_scaling, write_query_scaling
from .rope_settings import flat_rope_settings

_ROUTER: dict[str, Any] = dict(scoring_func="softmax", correction_bias=False, masked_score=0.0)


def read_mistral4(hf: Mapping, layers: int) -> dict[str, Any]:
    """`partial_rotary_factor` is the part of a whole head, and always gives the width `qk_rope_head_dim`."""
    is_absent = hf.get("rope_scaling") is None and hf.get("rope_parameters") is None
    given = _ROPE if is_absent else flat_rope_settings(hf)
    given = {name: x for name, x in given.items() if name != "partial_rotary_factor"}
    hf = {**hf, "rope_scaling": None, "rope_parameters": given, "partial_rotary_factor": None}
    mixer, fields = read_latent_attention(hf)
    mixer = dataclasses.replace(mixer, query_scaling=read_query_scaling(hf, fields["rope"]))
    return fields | dict(layers=with_grouped_experts(hf, [LayerSpec((mixer,))] * layers, **_ROUTER))


def write_mistral4(config: ModelConfig) -> dict[str, Any]:
    settings = write_latent_attention(config) | write_grouped_experts(config)
    width = settings["qk_head_dim"]
    own = write_query_scaling(config) | dict(partial_rotary_factor=settings["qk_rope_head_dim"] / width)
    return settings | dict(head_dim=width, rope_parameters=settings["rope_parameters"] | own)


_ROPE = dict(  # if config.json has none
    rope_type="yarn",
    rope_theta=1e4,
    factor=128.0,
    original_max_position_embeddings=8192,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
FAMILY = Family(
    DEFAULTS
    | dict(
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=1048576,
        rope_interleave=True,
        q_lora_rank=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        num_experts_per_tok=4,
        n_routed_experts=128,
        n_shared_experts=1,
        norm_topk_prob=True,
    ),
    read_mistral4,
    "Mistral4ForCausalLM",
    write_mistral4,
    dataclasses.replace(
        NAMES, joined=tuple(dataclasses.replace(tensor, is_published=True) for tensor in NAMES.joined)
    ),
    {LatentAttentionSpec.kind: KV_B},
    unused_shared_experts,
)
