"""Gemma 3: Gemma 2 with norms of heads in place of soft caps, and two rotary embeddings."""

from collections.abc import Mapping

from . import gemma2
from .family import Family
from .layer_fields import period_windows, with_windows
from .rope_settings import read_rope_per_layer_type
from .values import get_integer, get_number, reject_setting


def read_gemma3(hf: Mapping, layers: int) -> dict:
    reject_setting(hf, "attn_logit_softcapping")
    windows = period_windows(hf, layers, get_integer(hf, "sliding_window_pattern"))
    rope, sliding_rope = read_rope_per_layer_type(hf, get_number(hf, "rope_local_base_freq"))
    fields, layer = gemma2.read_shared(hf, qk_norm="head")
    return fields | dict(rope=rope, layers=with_windows(layer, windows, sliding_rope))


FAMILY = Family(
    gemma2.DEFAULTS
    | dict(
        max_position_embeddings=131072, attn_logit_softcapping=None, final_logit_softcapping=None,
        rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6,
    ),
    read_gemma3,
    gemma2.NAMES,
)  # fmt: skip
