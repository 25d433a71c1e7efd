"""EXAONE 4: norms after attention and MLP only, and norms of each head of queries and keys. If other layers
have a sliding window, full layers have no rotary embedding.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family
from .layer_fields import FULL, layer_windows, write_layer_types
from .values import get_integer


def read_exaone4(hf: Mapping, layers: int) -> dict[str, Any]:
    layer = LayerSpec((AttentionSpec(qk_norm="head"),), pre_norm=False, post_norm=True)
    if hf.get("sliding_window") is None:
        return dict(layers=(layer,) * layers)
    pattern = hf["sliding_window_pattern"]  # how many layers, or a letter for each: L has a window, G none
    if isinstance(pattern, str) and pattern and not {*pattern} - {*"LG"}:
        slides = [pattern[i % len(pattern)] == "L" for i in range(layers)]
    else:
        period = get_integer(hf, "sliding_window_pattern")
        slides = [(i + 1) % period != 0 for i in range(layers)]
    windows = layer_windows({**hf, "use_sliding_window": True}, slides)
    return dict(layers=tuple(layer.with_mixer(window=w, uses_rope=w is not None) for w in windows))


def write_exaone4(config: ModelConfig) -> dict[str, Any]:
    has_rope = config.layer_rope(config.num_hidden_layers - 1) is not None
    if config.layer_windows[-1] is None and has_rope:
        return dict(sliding_window=None, layer_types=[FULL] * config.num_hidden_layers)
    return write_layer_types(config)


FAMILY = Family(
    dict(
        num_key_value_heads=32, max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096,
        sliding_window_pattern=4,
    ),
    read_exaone4,
    "Exaone4ForCausalLM",
    write_exaone4,
)  # fmt: skip
