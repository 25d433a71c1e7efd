"""OLMo 3: OLMo 2 with sliding windows, and with a rotary embedding for each type of layer."""

from collections.abc import Mapping

from ..errors import InputError, format_value
from . import olmo2
from .family import Family
from .layer_fields import period_windows, with_windows
from .rope_settings import read_rope_per_layer_type

THETA = 500000.0


def read_olmo3(hf: Mapping, layers: int) -> dict:
    # Versions of transformers disagree about the sliding layers where rope_theta is not the default.
    if hf["rope_theta"] != THETA:
        raise InputError(
            f"rope_theta {format_value(hf['rope_theta'])} is not supported for model_type 'olmo3': give"
            " rope_parameters per layer type"
        )
    windows = period_windows(hf, layers, 4)
    rope, sliding_rope = read_rope_per_layer_type(hf, THETA)
    return dict(norm_offset=0.0, rope=rope, layers=with_windows(olmo2.olmo2_layer(hf), windows, sliding_rope))


FAMILY = Family(olmo2.FAMILY.defaults | dict(sliding_window=4096, rope_theta=THETA), read_olmo3)
