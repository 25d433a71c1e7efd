"""SmolLM3: some layers have no rotary embedding."""

import dataclasses
from collections.abc import Mapping

from ..errors import InputError, format_value
from . import llama
from .family import Family
from .layer_fields import layer_windows, with_windows
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
    windows = layer_windows(hf, [not u for u in uses_rope[:layers]])
    specs = with_windows(llama.llama_layer(hf), windows)
    return dict(
        layers=tuple(
            dataclasses.replace(spec, mixer=dataclasses.replace(spec.mixer, uses_rope=bool(u)))
            for spec, u in zip(specs, uses_rope, strict=False)
        )
    )


FAMILY = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    read_smollm3,
)  # fmt: skip
