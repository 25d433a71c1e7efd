"""Cohere 2 (Command R7B, Command A): attention and MLP are side by side after one LayerNorm. Layers with a
sliding window have interleaved RoPE, and the other layers have none.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import LayerSpec
from ..config.model_config import ModelConfig
from ..feed_forward.attention_and_mlp import AttentionAndMlpSpec
from .family import Family
from .layer_fields import (
    attention_bias,
    check_default_head_dim,
    layer_windows,
    period_windows,
    write_layer_types,
)
from .rope_settings import read_rope
from .values import get_integer, get_number, reject_setting


def read_cohere2(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, "use_qk_norm")
    check_default_head_dim(hf)
    bias = attention_bias(hf)
    if hf.get("layer_types") is None:
        windows = period_windows(hf, layers, get_integer(hf, "sliding_window_pattern"))
    else:
        windows = layer_windows({**hf, "use_sliding_window": True}, [False] * layers)
    mixers = (AttentionAndMlpSpec(**bias, window=window, uses_rope=window is not None) for window in windows)
    return dict(
        layers=tuple(LayerSpec((mixer,), feed_forward=None, centered_norms=True) for mixer in mixers),
        rope=read_rope(hf, interleaved=True),
        rms_norm_eps=get_number(hf, "layer_norm_eps", (1e-30, 1)),
        norm_offset=0.0,
        logits_scaling=1 / get_number(hf, "logit_scale"),
    )


def write_cohere2(config: ModelConfig) -> dict[str, Any]:
    own = dict(layer_norm_eps=config.rms_norm_eps, logit_scale=1 / config.logits_scaling)
    return write_layer_types(config) | own


FAMILY = Family(
    dict(max_position_embeddings=8192, layer_norm_eps=1e-5, logit_scale=0.0625, tie_word_embeddings=True)
    | dict(sliding_window=4096, sliding_window_pattern=4),
    read_cohere2,
    "Cohere2ForCausalLM",
    write_cohere2,
)
