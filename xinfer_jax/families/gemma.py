"""Gemma: scaled embeddings, and norms whose weights are offset by 1. Gemma 2 and 3 also have norms after
attention and MLP. Gemma 2 has soft caps, and Gemma 3 has norms of heads and two rotary embeddings.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Names
from .layer_fields import (
    BOTH_SIDES,
    attention_bias,
    period_windows,
    with_later_tokens,
    with_windows,
    write_layer_types,
)
from .rope_settings import read_rope_per_layer_type, write_rope_per_layer_type
from .values import get_boolean, get_integer, get_number, get_optional_number, reject_setting


def _read_shared(hf: Mapping, **attention: Any) -> tuple[dict[str, Any], LayerSpec]:
    """Returns fields of both, and a layer. attention: fields of its `AttentionSpec`."""
    scalar = get_number(hf, "query_pre_attn_scalar")
    mixer = AttentionSpec(**attention_bias(hf), query_pre_attn_scalar=scalar, **attention)
    fields = dict(
        norm_offset=1.0,
        embed_scale=math.sqrt(get_integer(hf, "hidden_size")),
        final_logit_softcapping=get_optional_number(hf, "final_logit_softcapping"),
    )
    return fields, LayerSpec((mixer,), post_norm=True)


def read_gemma(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, BOTH_SIDES)
    layer = LayerSpec((AttentionSpec(**attention_bias(hf)),))
    scale = math.sqrt(get_integer(hf, "hidden_size"))
    return dict(norm_offset=1.0, embed_scale=scale, layers=(layer,) * layers)


def read_gemma2(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, BOTH_SIDES)
    cap = get_optional_number(hf, "attn_logit_softcapping")
    fields, layer = _read_shared(hf, logit_softcapping=cap)
    return fields | dict(layers=with_windows(layer, period_windows(hf, layers, 2)))


def read_gemma3(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, "attn_logit_softcapping")
    windows = period_windows(hf, layers, get_integer(hf, "sliding_window_pattern"))
    rope, sliding_rope = read_rope_per_layer_type(hf, get_number(hf, "rope_local_base_freq"))
    fields, layer = _read_shared(hf, qk_norm="head")
    specs = with_windows(layer, windows, sliding_rope)
    if hf[BOTH_SIDES] is not None and get_boolean(hf, BOTH_SIDES):
        more = 0 if get_boolean(hf, "is_causal") else 1  # transformers makes half the window, plus 1, of it
        reaches = (window and window // 2 + more for window in windows)
        specs = tuple(map(with_later_tokens, specs, reaches))
    return fields | dict(rope=rope, layers=specs)


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return write_layer_types(config) | dict(
        query_pre_attn_scalar=mixer.query_pre_attn_scalar,
        attn_logit_softcapping=mixer.logit_softcapping,
        final_logit_softcapping=config.final_logit_softcapping,
    )


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    return write_gemma2(config) | write_rope_per_layer_type(config)


_NAMES = Names(dict(mlp_norm="pre_feedforward_layernorm.weight"))
GEMMA = Family(
    dict(
        num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    read_gemma,
    "GemmaForCausalLM",
)  # fmt: skip
GEMMA2 = Family(
    dict(
        num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096,
        tie_word_embeddings=True, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh",
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    read_gemma2,
    "Gemma2ForCausalLM",
    write_gemma2,
    _NAMES,
)  # fmt: skip
GEMMA3 = Family(
    GEMMA2.defaults
    | dict(
        max_position_embeddings=131072, attn_logit_softcapping=None, final_logit_softcapping=None,
        rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6, **{BOTH_SIDES: False},
    ),
    read_gemma3,
    "Gemma3ForCausalLM",
    write_gemma3,
    _NAMES,
)  # fmt: skip
