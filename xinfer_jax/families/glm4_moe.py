"""GLM-4.5, GLM-4.6 and GLM-4.5-Air: experts of DeepSeek-V3's kind. Files also have a layer that drafts tokens
(multi-token prediction) after the last one of the model. `load_model` reads it if you ask for the draft head.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .draft_heads import DEEPSEEK_MTP
from .family import Family
from .grouped_experts import DEFAULTS, NAMES, with_grouped_experts, write_grouped_experts
from .layer_fields import unused_shared_experts
from .rope_settings import read_rope, write_partial_rope
from .values import get_boolean


def read_glm4_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    mixer = AttentionSpec(
        qkv_bias=get_boolean(hf, "attention_bias"),
        qk_norm="head" if get_boolean(hf, "use_qk_norm") else None,
    )
    specs = with_grouped_experts(hf, [LayerSpec((mixer,))] * layers)
    return dict(rope=read_rope(hf, partial=True), layers=specs)


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    settings: dict[str, Any] = dict(
        attention_bias=mixer.qkv_bias,
        use_qk_norm=mixer.qk_norm is not None,
        num_nextn_predict_layers=0,
        rope_parameters=write_partial_rope(config.rope),
    )
    return settings | write_grouped_experts(config)


FAMILY = Family(
    DEFAULTS
    | dict(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5,
        use_qk_norm=False, first_k_dense_replace=1, moe_intermediate_size=1408, num_experts_per_tok=8,
        n_routed_experts=128, n_shared_experts=1, norm_topk_prob=True,
    ),
    read_glm4_moe,
    "Glm4MoeForCausalLM",
    write_glm4_moe,
    NAMES,
    unused=unused_shared_experts,
    draft_head=DEEPSEEK_MTP,
)  # fmt: skip
