"""DeepSeek-V3 and R1, and Kimi K2, which is the same: latent attention, in the first layers an MLP, and in
all others experts that a sigmoid router chooses in groups, with one that all tokens use.

The norms of latents have an epsilon of 1e-6 whatever `rms_norm_eps` is, as in transformers. vLLM, SGLang and
mlx-lm use `rms_norm_eps`. Files also have layers that draft tokens (multi-token prediction) after the last
one of the model. They are not read.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..mixers.latent_attention import LatentAttentionSpec
from .family import Family, Names
from .glm4_moe import ROUTED_NAMES, read_routed_experts, unused_glm4_moe, write_routed_experts
from .latent_fields import KV_B, check_setting, read_latent_attention, write_latent_attention
from .layer_fields import STACKED, with_experts
from .values import get_count


def read_deepseek_v3(hf: Mapping, layers: int) -> dict[str, Any]:
    check_setting(hf, "scoring_func", "sigmoid")
    check_setting(hf, "topk_method", "noaux_tc")
    check_setting(hf, "moe_layer_freq", 1)
    (mixer, fields) = read_latent_attention(hf)
    dense = get_count(hf, "first_k_dense_replace")
    sparse = [i >= dense for i in range(layers)]
    return fields | dict(layers=with_experts([LayerSpec((mixer,))] * layers, sparse, read_routed_experts(hf)))


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    dense = sum(layer.experts is None for layer in config.layers)
    own = dict(first_k_dense_replace=dense, num_nextn_predict_layers=0)
    return write_latent_attention(config) | write_routed_experts(config) | own


DEEPSEEK_V3 = Family(
    dict(
        head_dim=64, num_key_value_heads=None, max_position_embeddings=4096, rope_interleave=True,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=3, moe_intermediate_size=2048, num_experts_per_tok=8, n_routed_experts=256,
        n_shared_experts=1, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
    ),
    read_deepseek_v3,
    "DeepseekV3ForCausalLM",
    write_deepseek_v3,
    Names(ROUTED_NAMES, STACKED),
    {LatentAttentionSpec.kind: KV_B},
    unused_glm4_moe,
)  # fmt: skip
