"""DeepSeek-V3 and R1, DeepSeek-V2, and Youtu-LLM: latent attention. DeepSeek's first layers have an MLP, all
others experts that a router chooses in groups, and some that all tokens use. All layers of Youtu-LLM have an
MLP. Kimi K2 is a DeepSeek-V3.

Files of DeepSeek-V3 also have a layer that drafts tokens (multi-token prediction) after the last one of the
model. `load_model` reads it if you ask for the draft head.
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
from .latent_fields import KV_B, check_setting, read_latent_attention, write_latent_attention
from .layer_fields import unused_shared_experts

_GREEDY = "greedy"
_IN_GROUPS = "group_limited_greedy"


def read_deepseek_v3(hf: Mapping, layers: int) -> dict[str, Any]:
    check_setting(hf, "scoring_func", "sigmoid")
    check_setting(hf, "topk_method", "noaux_tc")
    check_setting(hf, "moe_layer_freq", 1)
    mixer, fields = read_latent_attention(hf)
    return fields | dict(layers=with_grouped_experts(hf, [LayerSpec((mixer,))] * layers))


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    settings = write_latent_attention(config) | write_grouped_experts(config)
    return settings | dict(num_nextn_predict_layers=0)


def read_deepseek_v2(hf: Mapping, layers: int) -> dict[str, Any]:
    """Reads DeepSeek-V2 as transformers does: RoPE is always interleaved, and weights of experts are never
    normalized, whatever `rope_interleave` and `norm_topk_prob` say.
    """
    check_setting(hf, "scoring_func", "softmax")
    check_setting(hf, "moe_layer_freq", 1)
    check_setting(hf, "mlp_bias", False)
    method = hf["topk_method"]
    if method not in (_GREEDY, _IN_GROUPS):
        raise InputError(
            f"config.json: topk_method {format_value(method)} is not supported for model_type"
            f" {hf['model_type']!r}: only {_GREEDY!r} and {_IN_GROUPS!r} are"
        )
    mixer, fields = read_latent_attention({**hf, "rope_interleave": True})
    router: dict[str, Any] = dict(
        scoring_func="softmax", correction_bias=False, group_score="max", masked_score=0.0
    )
    hf = {**hf, "norm_topk_prob": False} | (dict(n_group=1, topk_group=1) if method == _GREEDY else {})
    return fields | dict(layers=with_grouped_experts(hf, [LayerSpec((mixer,))] * layers, **router))


def write_deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    settings = write_latent_attention(config) | write_grouped_experts(config)
    return settings | dict(topk_method=_GREEDY if settings.get("n_group", 1) == 1 else _IN_GROUPS)


def read_youtu(hf: Mapping, layers: int) -> dict[str, Any]:
    mixer, fields = read_latent_attention(hf)
    return fields | dict(layers=(LayerSpec((mixer,)),) * layers)


_LATENT = dict(
    head_dim=64,
    rope_interleave=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
DEEPSEEK_V3 = Family(
    DEFAULTS
    | _LATENT
    | dict(
        max_position_embeddings=4096, first_k_dense_replace=3, moe_intermediate_size=2048,
        num_experts_per_tok=8, n_routed_experts=256, n_shared_experts=1, n_group=8, topk_group=4,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    read_deepseek_v3,
    "DeepseekV3ForCausalLM",
    write_deepseek_v3,
    NAMES,
    {LatentAttentionSpec.kind: KV_B},
    unused_shared_experts,
    DEEPSEEK_MTP,
)  # fmt: skip
DEEPSEEK_V2 = Family(
    DEFAULTS
    | _LATENT
    | dict(
        max_position_embeddings=2048, moe_intermediate_size=1407, n_routed_experts=64, n_shared_experts=2,
        topk_method=_GREEDY,
    ),
    read_deepseek_v2,
    "DeepseekV2ForCausalLM",
    write_deepseek_v2,
    NAMES,
    {LatentAttentionSpec.kind: KV_B},
    unused_shared_experts,
)  # fmt: skip
YOUTU = Family(
    _LATENT | dict(num_key_value_heads=16, max_position_embeddings=131072, tie_word_embeddings=True),
    read_youtu,
    "YoutuForCausalLM",
    write_latent_attention,
    mixer_names={LatentAttentionSpec.kind: KV_B},
)
