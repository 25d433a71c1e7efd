"""BitNet: norms of the inputs of attention's output matrix and of down_proj."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from .family import Family, Names
from .layer_fields import attention_bias, check_default_head_dim


def read_bitnet(hf: Mapping, layers: int) -> dict:
    check_default_head_dim(hf)  # the norm of attention's output has this width
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), o_norm=True),), MlpSpec(down_norm=True))
    return dict(layers=(layer,) * layers)


FAMILY = Family(
    dict(
        num_key_value_heads=5, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=5e5,
        hidden_act="relu2",
    ),
    read_bitnet,
    "BitNetForCausalLM",
    names=Names(dict(o_norm="self_attn.attn_sub_norm.weight", down_norm="mlp.ffn_sub_norm.weight")),
)  # fmt: skip
