"""Gemma 2: norms before and after, whose weights are offset by 1; scaled embeddings; soft caps."""

import math
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family, Names
from .layer_fields import attention_bias, period_windows, with_windows
from .values import get_integer, get_number, get_optional_number, reject_setting

DEFAULTS = dict(
    num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096,
    tie_word_embeddings=True, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip
NAMES = Names(dict(mlp_norm="pre_feedforward_layernorm.weight"))


def read_shared(hf: Mapping, **attention: Any) -> tuple[dict[str, Any], LayerSpec]:
    """Fields of Gemma 2 and 3, and a layer. attention: fields of its `AttentionSpec`."""
    reject_setting(hf, "use_bidirectional_attention")
    scalar = get_number(hf, "query_pre_attn_scalar")
    mixer = AttentionSpec(**attention_bias(hf), query_pre_attn_scalar=scalar, **attention)
    fields = dict(
        norm_offset=1.0,
        embed_scale=math.sqrt(get_integer(hf, "hidden_size")),
        final_logit_softcapping=get_optional_number(hf, "final_logit_softcapping"),
    )
    return fields, LayerSpec(mixer, post_norm=True)


def read_gemma2(hf: Mapping, layers: int) -> dict[str, Any]:
    cap = get_optional_number(hf, "attn_logit_softcapping")
    fields, layer = read_shared(hf, logit_softcapping=cap)
    return fields | dict(layers=with_windows(layer, period_windows(hf, layers, 2)))


FAMILY = Family(DEFAULTS, read_gemma2, NAMES)
