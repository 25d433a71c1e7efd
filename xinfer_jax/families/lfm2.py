"""LFM2: most layers are gated short convolutions, and the others are attention with norms of each head of
queries and keys. The width of MLPs is computed from `intermediate_size`.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.short_conv import ShortConvSpec
from .family import Family, Joined, Names
from .layer_fields import FULL, read_layer_types
from .values import get_boolean, get_integer, get_number

CONV = "conv"
# Names of the first published files, which transformers prefers to those of today.
_OLDER_NAMES = dict(block_ff_dim="intermediate_size", tie_embedding="tie_word_embeddings")


def read_lfm2(hf: Mapping, layers: int) -> dict[str, Any]:
    check_silu(hf, "LFM2")
    hf = {**hf, **{name: hf[older] for older, name in _OLDER_NAMES.items() if older in hf}}
    of_type = {
        CONV: LayerSpec((read_convolution(hf),)),
        FULL: LayerSpec((AttentionSpec(qk_norm="head"),)),
    }
    return dict(
        layers=tuple(of_type[kind] for kind in _layer_types(hf, layers)),
        intermediate_size=_mlp_width(hf),
        rms_norm_eps=get_number(hf, "norm_eps", (1e-30, 1)),
        tie_word_embeddings=get_boolean(hf, "tie_word_embeddings"),
    )


def check_silu(hf: Mapping, name: str) -> None:
    """Raises InputError for another activation than silu. name: of the models, for the message."""
    if hf["hidden_act"] not in ("silu", "swish"):
        raise InputError(f"hidden_act {format_value(hf['hidden_act'])} is not supported: {name}'s is 'silu'")


def read_convolution(hf: Mapping) -> ShortConvSpec:
    """Returns the short convolution that config.json describes."""
    width = get_integer(hf, "conv_L_cache")
    if width < 2:
        raise InputError(f"config.json: conv_L_cache must be at least 2, got {width}")
    return ShortConvSpec(width, get_boolean(hf, "conv_bias"))


def _layer_types(hf: Mapping, layers: int) -> list[str]:
    """Returns the type of each layer, by `layer_types` or `full_attn_idxs`. Without them all are
    attention.
    """
    types = read_layer_types(hf, layers, (CONV, FULL))
    if types is not None:
        return types
    full = hf.get("full_attn_idxs")
    if full is None:
        return [FULL] * layers
    if not isinstance(full, list | tuple) or not all(type(i) is int and 0 <= i < layers for i in full):
        raise InputError(f"full_attn_idxs must list layers from 0 to {layers - 1}, got {format_value(full)}")
    return [FULL if i in full else CONV for i in range(layers)]


def _mlp_width(hf: Mapping) -> int:
    """Returns F: two thirds of `intermediate_size`, times a factor, rounded up to a multiple, or
    `intermediate_size` itself.
    """
    width = get_integer(hf, "intermediate_size")
    if not get_boolean(hf, "block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if hf.get("block_ffn_dim_multiplier") is None:
        return width
    multiple = get_integer(hf, "block_multiple_of")
    return -(-int(get_number(hf, "block_ffn_dim_multiplier") * width) // multiple) * multiple


def write_lfm2(config: ModelConfig) -> dict[str, Any]:
    convolutions = [layer.mixer_of(ShortConvSpec.kind) for layer in config.layers]
    settings: dict[str, Any] = dict(
        layer_types=[CONV if convolution else FULL for convolution in convolutions],
        block_auto_adjust_ff_dim=False,
        norm_eps=config.rms_norm_eps,
    )
    return settings | write_convolution(config)


def write_convolution(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `read_convolution`. {}: no layer has a convolution."""
    mixers = (layer.mixer_of(ShortConvSpec.kind) for layer in config.layers)
    convolution = next(filter(None, mixers), None)
    return dict(conv_L_cache=convolution.kernel_dim, conv_bias=convolution.bias) if convolution else {}


LEAVES = dict(
    final_norm="model.embedding_norm.weight", attn_norm="operator_norm.weight", mlp_norm="ffn_norm.weight",
    gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2",
)  # fmt: skip
_ATTENTION = dict(
    q_norm="self_attn.q_layernorm.weight", k_norm="self_attn.k_layernorm.weight", o="self_attn.out_proj"
)
_CONVOLUTION = dict(
    conv_b="conv.b_proj", conv_c="conv.c_proj", conv_x="conv.x_proj", conv_taps="conv.conv.weight",
    conv_bias="conv.conv.bias", conv_o="conv.out_proj",
)  # fmt: skip
_JOINED = (
    Joined("conv.in_proj", ("conv_b", "conv_c", "conv_x")),
    Joined("conv.conv.weight", ("conv_taps",), axes_of_leaves=(0, None, 1)),
)
MIXER_NAMES = {AttentionSpec.kind: Names(_ATTENTION), ShortConvSpec.kind: Names(_CONVOLUTION, _JOINED)}
FAMILY = Family(
    dict(
        intermediate_size=12288, num_key_value_heads=8, max_position_embeddings=128000, rope_theta=1e6,
        norm_eps=1e-5, tie_word_embeddings=True, conv_bias=False, conv_L_cache=3, block_multiple_of=256,
        block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True,
    ),
    read_lfm2,
    "Lfm2ForCausalLM",
    write_lfm2,
    Names(LEAVES),
    MIXER_NAMES,
)  # fmt: skip
