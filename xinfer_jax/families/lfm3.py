"""LFM3: short convolutions of 7 tokens, sliding attention, and full attention with a RoPE of its own.
Attention has a gate for each head, and there are norms before and after each part.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..mixers.head_gated_attention import HeadGatedAttentionSpec
from ..mixers.short_conv import ShortConvSpec
from .family import Family, Names
from .layer_fields import FULL, SLIDING, attention_bias, read_layer_types
from .lfm2 import CONV, LEAVES, MIXER_NAMES, check_silu, read_convolution, write_convolution
from .rope_settings import read_rope, rope_per_layer_type, write_rope_per_layer_type
from .values import get_boolean, get_integer, get_number

_ROPE_TYPES = ("default", "linear", "proportional")
_ROPES: dict[str, dict[str, Any]] = {  # if config.json has none
    FULL: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e6),
    SLIDING: dict(rope_type="default", rope_theta=1e4),
}
_PERIOD = 4  # layers: of each period the third one is full, and the first one slides, except the layer 0


def read_lfm3(hf: Mapping, layers: int) -> dict[str, Any]:
    check_silu(hf, "LFM3")
    types = read_layer_types(hf, layers, (CONV, FULL, SLIDING))
    if types is None:
        types = [
            FULL if i % _PERIOD == 2 else CONV if i % _PERIOD or i == 0 else SLIDING for i in range(layers)
        ]
    rope, sliding_rope = _read_ropes(hf)
    attention = HeadGatedAttentionSpec if get_boolean(hf, "use_attention_gate") else AttentionSpec
    of_all: dict[str, Any] = dict(qk_norm="head", **attention_bias(hf))
    mixers = {CONV: read_convolution(hf), FULL: attention(**of_all)}
    if SLIDING in types:
        mixers[SLIDING] = attention(window=get_integer(hf, "sliding_window"), rope=sliding_rope, **of_all)
    post_norm = get_boolean(hf, "use_sandwich_norm")
    return dict(
        layers=tuple(LayerSpec((mixers[kind],), post_norm=post_norm) for kind in types),
        rope=rope,
        rms_norm_eps=get_number(hf, "rms_norm_eps" if hf["norm_eps"] is None else "norm_eps", (1e-30, 1)),
    )


def _read_ropes(hf: Mapping) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the embeddings of full and of sliding layers. None: they are equal."""
    given = rope_per_layer_type(hf)
    full, sliding = (
        read_rope({**hf, "rope_parameters": given[kind] or _ROPES[kind]}, _ROPE_TYPES, partial=True)
        for kind in (FULL, SLIDING)
    )
    return full, None if full == sliding else sliding


def write_lfm3(config: ModelConfig) -> dict[str, Any]:
    mixers = [layer.mixers[0] for layer in config.layers]
    windows = config.layer_windows
    types = [
        CONV if isinstance(mixer, ShortConvSpec) else SLIDING if window else FULL
        for mixer, window in zip(mixers, windows, strict=True)
    ]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    settings: dict[str, Any] = dict(
        layer_types=types,
        norm_eps=config.rms_norm_eps,
        use_sandwich_norm=config.layers[0].post_norm,
        use_attention_gate=any(mixer.output_gate for mixer in attentions),
    )
    if window := next(filter(None, windows), None):
        settings["sliding_window"] = window
    return settings | write_convolution(config) | write_rope_per_layer_type(config)


_NORMS = dict(attn_post_norm="post_operator_norm.weight", mlp_post_norm="post_ffn_norm.weight")
# The published name. `skipped_tensors` knows the name of transformers 5.
_ATTENTION = Names(dict(attn_gate="self_attn.gate_proj"))
FAMILY = Family(
    dict(
        intermediate_size=7680,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=128000,
        rope_theta=1e6,
        norm_eps=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        conv_bias=False,
        conv_L_cache=7,
        sliding_window=256,
        use_sandwich_norm=True,
        use_attention_gate=True,
    ),
    read_lfm3,
    "Lfm3ForCausalLM",
    write_lfm3,
    Names(LEAVES | _NORMS),
    {
        HeadGatedAttentionSpec.kind: _ATTENTION,
        ShortConvSpec.kind: MIXER_NAMES[ShortConvSpec.kind],
    },
)
