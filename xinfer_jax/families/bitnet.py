"""BitNet: norms of the inputs of attention's output matrix and of down_proj."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..errors import InputError, format_value
from .family import Family, Names
from .layer_fields import attention_bias
from .values import get_integer


def read_bitnet(hf: Mapping, layers: int) -> dict:
    width = get_integer(hf, "hidden_size")
    heads = get_integer(hf, "num_attention_heads")
    if hf["head_dim"] != width // heads:  # the norm of attention's output has this width
        raise InputError(
            f"head_dim {format_value(hf['head_dim'])} is not supported for model_type 'bitnet': leave it out,"
            f" heads are hidden_size / num_attention_heads wide, {width // heads}"
        )
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
