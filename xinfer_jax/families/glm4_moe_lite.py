"""GLM-4.7-Flash: latent attention, and experts as in GLM-4.5 in the layers that `mlp_layer_types` names.
Files also have a layer that drafts tokens (multi-token prediction) after the last one of the model.
`load_model` reads it if you ask for the draft head.

The norms of latents have an epsilon of 1e-6, as in transformers, and `rms_norm_eps` is 1e-5
(`latent_fields.py`).
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.latent_attention import LatentAttentionSpec
from .draft_heads import DEEPSEEK_MTP
from .family import Family
from .grouped_experts import DEFAULTS, NAMES, with_grouped_experts, write_grouped_experts
from .latent_fields import KV_B, read_latent_attention, write_latent_attention
from .layer_fields import unused_shared_experts

_DENSE = "dense"
_SPARSE = "sparse"


def read_glm4_moe_lite(hf: Mapping, layers: int) -> dict[str, Any]:
    """As in transformers, `first_k_dense_replace` is not read."""
    types = hf.get("mlp_layer_types")
    if types is None:
        types = [_DENSE] + [_SPARSE] * (layers - 1)
    is_list = isinstance(types, list | tuple) and len(types) == layers
    if not is_list or any(kind not in (_DENSE, _SPARSE) for kind in types):
        raise InputError(
            f"config.json: mlp_layer_types must list {_DENSE!r} or {_SPARSE!r} for each of the {layers}"
            f" layers, got {format_value(types)}"
        )
    mixer, fields = read_latent_attention(hf)
    sparse = [kind == _SPARSE for kind in types]
    return fields | dict(layers=with_grouped_experts(hf, [LayerSpec((mixer,))] * layers, sparse))


def write_glm4_moe_lite(config: ModelConfig) -> dict[str, Any]:
    types = [_SPARSE if layer.experts else _DENSE for layer in config.layers]
    settings = write_latent_attention(config) | write_grouped_experts(config)
    if _DENSE in types[settings["first_k_dense_replace"] :]:  # dense layers do not come first
        del settings["first_k_dense_replace"]
    return settings | dict(mlp_layer_types=types, num_nextn_predict_layers=0)


FAMILY = Family(
    DEFAULTS
    | dict(
        head_dim=64,
        num_key_value_heads=20,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        rope_interleave=True,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        moe_intermediate_size=1536,
        num_experts_per_tok=4,
        n_routed_experts=64,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
    ),
    read_glm4_moe_lite,
    "Glm4MoeLiteForCausalLM",
    write_glm4_moe_lite,
    NAMES,
    {LatentAttentionSpec.kind: KV_B},
    unused_shared_experts,
    DEEPSEEK_MTP,
)
