"""Model families: defaults of config.json, and one small function per family for its own settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, format_value
from . import gemma4, gpt_oss, hybrids
from .rope import read_rope, read_rope_per_layer_type, rope_settings
from .sparse_layers import read_experts, read_sparse_layers
from .values import (
    get_boolean,
    get_integer,
    get_number,
    get_optional_number,
    reject_setting,
)


def _qwen2(hf: Mapping, layers: int) -> dict:
    return dict(qkv_bias=True, layer_windows=_late_windows(hf, layers))


def _qwen3(hf: Mapping, layers: int) -> dict:
    return _attention_bias(hf) | dict(qk_norm=True, layer_windows=_late_windows(hf, layers))


def _qwen3_moe(hf: Mapping, layers: int) -> dict:
    windowed = hf if get_boolean(hf, "use_sliding_window") else {**hf, "sliding_window": None}
    return _attention_bias(hf) | read_experts(hf) | dict(
        qk_norm=True,
        layer_windows=_same_windows(windowed, layers),
        layer_experts=read_sparse_layers(hf, layers),
        norm_topk_prob=get_boolean(hf, "norm_topk_prob"),
    )  # fmt: skip


def _llama(hf: Mapping, layers: int) -> dict:
    return _attention_bias(hf) | dict(mlp_bias=get_boolean(hf, "mlp_bias"))


def _mistral(hf: Mapping, layers: int) -> dict:
    return dict(layer_windows=_same_windows(hf, layers))


def _smollm3(hf: Mapping, layers: int) -> dict:
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
    uses_rope = tuple(bool(u) for u in uses_rope[:layers])
    windows = _windows(hf, [not u for u in uses_rope])
    return _llama(hf, layers) | dict(layer_rope=uses_rope, layer_windows=windows)


def _olmo3(hf: Mapping, layers: int) -> dict:
    # Versions of transformers disagree about the sliding layers where rope_theta is not the default.
    if hf["rope_theta"] != _OLMO3_THETA:
        raise InputError(
            f"rope_theta {format_value(hf['rope_theta'])} is not supported for model_type 'olmo3': give"
            " rope_parameters per layer type"
        )
    windows = _period_windows(hf, layers, 4)
    return _attention_bias(hf) | read_rope_per_layer_type(hf, _OLMO3_THETA) | dict(
        pre_norm=False, post_norm=True, norm_offset=0.0, qk_norm=True, qk_norm_joint=True,
        layer_windows=windows,
    )  # fmt: skip


def _gemma(hf: Mapping, layers: int) -> dict:
    """Gemma 2 and 3."""
    reject_setting(hf, "use_bidirectional_attention")
    return _attention_bias(hf) | dict(
        post_norm=True,
        norm_offset=1.0,
        embed_scale=math.sqrt(get_integer(hf, "hidden_size")),
        query_pre_attn_scalar=get_number(hf, "query_pre_attn_scalar"),
        final_logit_softcapping=get_optional_number(hf, "final_logit_softcapping"),
    )


def _gemma2(hf: Mapping, layers: int) -> dict:
    return _gemma(hf, layers) | dict(
        attn_logit_softcapping=get_optional_number(hf, "attn_logit_softcapping"),
        layer_windows=_period_windows(hf, layers, 2),
    )


def _gemma3_text(hf: Mapping, layers: int) -> dict:
    reject_setting(hf, "attn_logit_softcapping")
    windows = _period_windows(hf, layers, get_integer(hf, "sliding_window_pattern"))
    ropes = read_rope_per_layer_type(hf, get_number(hf, "rope_local_base_freq"))
    return _gemma(hf, layers) | ropes | dict(qk_norm=True, layer_windows=windows)


def _phi3(hf: Mapping, layers: int) -> dict:
    scaling = dict(rope_settings(hf))
    if scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):  # its earlier names
        scaling["rope_type"] = "longrope"
    flat = {**hf, "rope_scaling": None, "rope_parameters": scaling}
    rope = read_rope(flat, ("default", "longrope"), partial=True)
    return dict(rope=rope, fused_projections=True, layer_windows=_same_windows(hf, layers))


def _gpt_oss(hf: Mapping, layers: int) -> dict:
    slides = [i % 2 == 0 for i in range(layers)]
    if hf.get("layer_types") is None:
        get_integer(hf, "sliding_window")
    windows = _windows({**hf, "use_sliding_window": True}, slides)
    return gpt_oss.gpt_oss(hf, layers) | dict(layer_windows=windows)


def _bitnet(hf: Mapping, layers: int) -> dict:
    width = get_integer(hf, "hidden_size")
    heads = get_integer(hf, "num_attention_heads")
    if hf.get("head_dim") not in (None, width // heads):  # the norm of attention's output has this width
        raise InputError(
            f"head_dim {format_value(hf['head_dim'])} is not supported for model_type 'bitnet': leave it out,"
            f" heads are hidden_size / num_attention_heads wide, {width // heads}"
        )
    return _attention_bias(hf) | dict(sub_norm=True)


# Defaults of config.json, as in transformers.
SHARED_DEFAULTS = dict(
    rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, mlp_bias=False, hidden_act="silu",
    use_sliding_window=False,
)  # fmt: skip
_QWEN_DEFAULTS = dict(
    num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28
)
_MOE_DEFAULTS = dict(
    num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, decoder_sparse_step=1,
    moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
    mlp_only_layers=None,
)  # fmt: skip
_SMOLLM3_DEFAULTS = dict(
    num_key_value_heads=4, max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4,
    tie_word_embeddings=True,
)  # fmt: skip
_OLMO3_THETA = 500000.0
_OLMO3_DEFAULTS = dict(
    max_position_embeddings=2048, rms_norm_eps=1e-5, sliding_window=4096, rope_theta=_OLMO3_THETA
)
_GEMMA2_DEFAULTS = dict(
    num_key_value_heads=4, head_dim=256, max_position_embeddings=8192, sliding_window=4096,
    tie_word_embeddings=True, query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh",
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
)  # fmt: skip
_GEMMA3_DEFAULTS = _GEMMA2_DEFAULTS | dict(
    max_position_embeddings=131072, attn_logit_softcapping=None, final_logit_softcapping=None, rope_theta=1e6,
    rope_local_base_freq=1e4, sliding_window_pattern=6,
)  # fmt: skip
_PHI3_DEFAULTS = dict(max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5)
_BITNET_DEFAULTS = dict(
    num_key_value_heads=5, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=5e5, hidden_act="relu2"
)
_Family = Callable[[Mapping, int], dict[str, Any]]
FAMILIES: dict[str, tuple[dict[str, Any], _Family]] = {  # by model_type: defaults and function
    "qwen2": (_QWEN_DEFAULTS, _qwen2),
    "qwen3": (_QWEN_DEFAULTS | dict(head_dim=128), _qwen3),
    "qwen3_moe": (_MOE_DEFAULTS, _qwen3_moe),
    "llama": (dict(max_position_embeddings=2048), _llama),
    "mistral": (dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096), _mistral),
    "smollm3": (_SMOLLM3_DEFAULTS, _smollm3),
    "olmo3": (_OLMO3_DEFAULTS, _olmo3),
    "gemma2": (_GEMMA2_DEFAULTS, _gemma2),
    "gemma3_text": (_GEMMA3_DEFAULTS, _gemma3_text),
    "gemma4_text": (gemma4.DEFAULTS, gemma4.gemma4_text),
    "phi3": (_PHI3_DEFAULTS, _phi3),
    "bitnet": (_BITNET_DEFAULTS, _bitnet),
    "gpt_oss": (gpt_oss.DEFAULTS, _gpt_oss),
    "qwen3_next": (hybrids.DEFAULTS["qwen3_next"], hybrids.qwen3_next),
    "qwen3_5_text": (hybrids.DEFAULTS["qwen3_5_text"], hybrids.qwen3_5),
    "qwen3_5_moe_text": (hybrids.DEFAULTS["qwen3_5_moe_text"], hybrids.qwen3_5_moe),
}


def _attention_bias(hf: Mapping) -> dict[str, bool]:
    bias = get_boolean(hf, "attention_bias")
    return dict(qkv_bias=bias, o_bias=bias)


# --- sliding windows ----------------------------------------------------------------------------------------


def _same_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """One `sliding_window` for all layers, or None."""
    if hf.get("layer_types") is not None:  # transformers rejects or ignores it
        raise InputError(
            f"layer_types is not supported for model_type {hf['model_type']!r}: only one sliding_window for"
            " all layers is"
        )
    return (None if hf.get("sliding_window") is None else get_integer(hf, "sliding_window"),) * layers


def _late_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Qwen: layers from `max_window_layers` on have a sliding window."""
    first = hf["max_window_layers"]
    if type(first) is not int or first < 0:
        raise InputError(
            f"config.json: max_window_layers must be an integer from 0 on, got {format_value(first)}"
        )
    return _windows(hf, [i >= first for i in range(layers)])


def _period_windows(hf: Mapping, layers: int, period: int) -> tuple[int | None, ...]:
    """Olmo and Gemma: all layers but every period-th have a sliding window."""
    get_integer(hf, "sliding_window")
    return _windows({**hf, "use_sliding_window": True}, [(i + 1) % period != 0 for i in range(layers)])


def _windows(hf: Mapping, slides: list[bool]) -> tuple[int | None, ...]:
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
