"""SmolLM3: some layers have no rotary embedding."""

from collections.abc import Mapping

from ..errors import InputError, format_value
from . import llama
from .family import Family
from .layer_fields import layer_windows
from .values import get_integer


def read_smollm3(hf: Mapping, layers: int) -> dict:
    uses_rope = hf.get("no_rope_layers")  # despite its name, 1 means rotary embedding
    if uses_rope is None:
        interval = get_integer(hf, "no_rope_layer_interval")
        uses_rope = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(uses_rope, list | tuple) or len(uses_rope) < layers:
        raise InputError(
            f"no_rope_layers must be a list of at least {layers} entries, one per layer, got"
            f" {format_value(uses_rope)}"
        )
    if bad := [u for u in uses_rope if u not in (0, 1)]:
        raise InputError(
            f"no_rope_layers holds 1 for rotary embedding and 0 for none, got {format_value(bad[0])}"
        )
    rotated = [bool(u) for u in uses_rope[:layers]]
    windows = layer_windows(hf, [not u for u in rotated])
    layer = llama.llama_layer(hf)
    pairs = zip(windows, rotated, strict=True)
    return dict(layers=tuple(layer.with_mixer(window=window, uses_rope=u) for window, u in pairs))


FAMILY = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    read_smollm3,
)  # fmt: skip
