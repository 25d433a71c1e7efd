"""Fields that several families read from config.json: biases of attention, and sliding windows."""

import dataclasses
from collections.abc import Iterable, Mapping

from ..config.layer_spec import LayerSpec
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from .values import get_boolean, get_integer


def attention_bias(hf: Mapping) -> dict[str, bool]:
    """Biases of the queries, keys and values, and of the output matrix."""
    bias = get_boolean(hf, "attention_bias")
    return dict(qkv_bias=bias, o_bias=bias)


def with_windows(
    layer: LayerSpec, windows: Iterable[int | None], sliding_rope: RopeConfig | None = None
) -> tuple[LayerSpec, ...]:
    """Layers like this one, with these windows. sliding_rope: of those that have one; None: the model's."""
    return tuple(
        dataclasses.replace(
            layer,
            mixer=dataclasses.replace(layer.mixer, window=window, rope=sliding_rope if window else None),
        )
        for window in windows
    )


def same_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """One `sliding_window` for all layers, or None."""
    if hf.get("layer_types") is not None:  # transformers rejects or ignores it
        raise InputError(
            f"layer_types is not supported for model_type {hf['model_type']!r}: only one sliding_window for"
            " all layers is"
        )
    return (None if hf.get("sliding_window") is None else get_integer(hf, "sliding_window"),) * layers


def late_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Qwen: layers from `max_window_layers` on have a sliding window."""
    first = hf["max_window_layers"]
    if type(first) is not int or first < 0:
        raise InputError(
            f"config.json: max_window_layers must be an integer from 0 on, got {format_value(first)}"
        )
    return layer_windows(hf, [i >= first for i in range(layers)])


def period_windows(hf: Mapping, layers: int, period: int) -> tuple[int | None, ...]:
    """Olmo and Gemma: all layers but every period-th have a sliding window."""
    get_integer(hf, "sliding_window")
    return layer_windows({**hf, "use_sliding_window": True}, [(i + 1) % period != 0 for i in range(layers)])


def layer_windows(hf: Mapping, slides: list[bool]) -> tuple[int | None, ...]:
    """Returns each layer's window from `use_sliding_window`, `sliding_window` and `layer_types`.

    slides: which layers have a window where config.json has no `layer_types`.
    """
    slides_at_all = get_boolean(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    window = get_integer(hf, "sliding_window") if slides_at_all else None
    types = hf.get("layer_types")
    if types is None:
        return tuple(window if s else None for s in slides)
    if not isinstance(types, list | tuple) or len(types) != len(slides):
        raise InputError(
            f"layer_types must list one type for each of the {len(slides)} layers, got {format_value(types)}"
        )
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError(
                f"layer type {format_value(kind)} is not supported: only full_attention and sliding_attention"
                " are"
            )
        if kind == "sliding_attention" and window is None:
            raise InputError(
                "layer_types names sliding_attention, but use_sliding_window is false or sliding_window is"
                " null: set both"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
