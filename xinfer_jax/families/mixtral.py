"""Mixtral: experts in every layer, whose weights sum to 1."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Joined, Names
from .layer_fields import STACKED, read_experts, same_windows, with_windows, write_window


def read_mixtral(hf: Mapping, layers: int) -> dict[str, Any]:
    experts = read_experts({**hf, "moe_intermediate_size": hf["intermediate_size"]})
    layer = LayerSpec(feed_forward=experts)
    return dict(layers=with_windows(layer, same_windows(hf, layers)))


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    sizes = dict(num_local_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)
    return write_window(config) | sizes


_LETTERS = dict(gate="w1", down="w2", up="w3")
NAMES = dict(router="block_sparse_moe.gate")
NAMES |= {f"experts.{leaf}": f"block_sparse_moe.experts.{{}}.{name}" for leaf, name in _LETTERS.items()}
# The names of transformers 5.
JOINED = (Joined("mlp.gate", ("router",), is_published=False), *STACKED)
FAMILY = Family(
    dict(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e6,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    read_mixtral,
    "MixtralForCausalLM",
    write_mixtral,
    Names(NAMES, JOINED),
)  # fmt: skip
