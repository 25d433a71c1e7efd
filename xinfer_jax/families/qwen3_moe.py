"""Qwen3 with a mixture of experts in some layers."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family, Names
from .layer_fields import attention_bias, same_windows, with_windows
from .sparse_layers import EXPERTS, STACKED, read_experts, read_sparse_layers, with_experts
from .values import get_boolean


def read_qwen3_moe(hf: Mapping, layers: int) -> dict:
    windowed = hf if get_boolean(hf, "use_sliding_window") else {**hf, "sliding_window": None}
    layer = LayerSpec(AttentionSpec(**attention_bias(hf), qk_norm="head"))
    experts = read_experts(hf, norm_topk_prob=get_boolean(hf, "norm_topk_prob"))
    specs = with_windows(layer, same_windows(windowed, layers))
    return dict(layers=with_experts(specs, read_sparse_layers(hf, layers), experts))


FAMILY = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
        mlp_only_layers=None,
    ),
    read_qwen3_moe,
    Names(EXPERTS, STACKED),
)  # fmt: skip
