"""Makes settings of config.json from the metadata of a GGUF file: the settings that one architecture has, or
reads in its own way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from ..families.layer_fields import FULL, SLIDING

_WINDOWS = "attention.sliding_window_pattern"
_KEY_HEADS = "attention.head_count_kv"
_GEMMA3_27B = 62  # layers; its attention is scaled by other than the width of a head
_SOFTMAX = 1  # a value of expert_gating_func
_SIGMOID = 2
GRANITE_MOE_TYPES = ("granitemoe", "granitemoeshared")  # model types of the architecture granitemoe
DEEPSEEK2_TYPES = ("deepseek_v3", "deepseek_v2", "youtu")  # model types of this architecture
Settings = dict[str, Any]


def integer(own: Mapping[str, Any], key: str) -> int:
    value = own.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise InputError(f"{key} must be a whole number above 0, got {format_value(value)}")
    return value


def divided(own: Mapping[str, Any], key: str, by: str) -> int:
    """Returns the value of a key divided by the value of another key."""
    (result, rest) = divmod(integer(own, key), integer(own, by))
    if rest:
        raise InputError(f"{key} is not a multiple of {by}")
    return result


def _width_of_heads(own: Mapping[str, Any]) -> int:
    return integer(own, "embedding_length") // integer(own, "attention.head_count")


def head_width(own: Mapping[str, Any]) -> int:
    key = "attention.key_length"
    return integer(own, key) if key in own else _width_of_heads(own)


def number(own: Mapping[str, Any], key: str, default: float) -> float:
    value = own.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InputError(f"{key} must be a number from 0 on, got {format_value(value)}")
    return value


def of_layers(own: Mapping[str, Any], key: str, layers: int) -> list[int]:
    """Returns a number from 0 on for each layer. The file has a list, or one number for all layers."""
    value = own.get(key, 0)
    numbers = value if isinstance(value, list) else [value] * layers
    if len(numbers) < layers or not all(type(x) is int and 0 <= x < 2**31 for x in numbers):
        raise InputError(f"{key} is {format_value(value)}, for {layers} layers")
    return numbers[:layers]


def key_heads(own: Mapping[str, Any], settings: Settings) -> tuple[list[int], Settings]:
    """Returns the number of key heads of each layer, and the setting for the layers that have some."""
    heads = of_layers(own, _KEY_HEADS, settings["num_hidden_layers"])
    if len({*heads} - {0}) > 1:
        raise InputError(f"{_KEY_HEADS} {format_value(heads)} is not supported: only one number and 0 are")
    return heads, dict(num_key_value_heads=max(heads) or None)


def _layer_types(own: Mapping[str, Any], settings: Settings, period: int = 6) -> list[str]:
    """Returns the type of each layer. The pattern in the file is the number of layers until one has no
    window, or says for each layer whether it has one.
    """
    pattern = own.get(_WINDOWS, period)
    layers = settings["num_hidden_layers"]
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise InputError(f"{_WINDOWS} is {format_value(pattern)}, for {layers} layers")
    return [SLIDING if slides and "sliding_window" in settings else FULL for slides in pattern[:layers]]


def _qwen35(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    width = divided(own, "ssm.inner_size", "ssm.time_step_rank")
    part = integer(own, "rope.dimension_count") / head_width(own)
    found = dict(linear_value_head_dim=width, partial_rotary_factor=part)
    recurrent = own.get("attention.recurrent_layers")
    if recurrent is None:
        return found
    layers = settings["num_hidden_layers"]
    if not isinstance(recurrent, list) or len(recurrent) < layers:
        raise InputError(f"attention.recurrent_layers is {format_value(recurrent)}, for {layers} layers")
    return found | dict(layer_types=["linear_attention" if x else FULL for x in recurrent[:layers]])


def _gemma3(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    is_27b = settings["num_hidden_layers"] == _GEMMA3_27B
    scalar = _width_of_heads(own) if is_27b else head_width(own)
    local = own.get("rope.freq_base_swa", own.get("rope.local.freq_base", 1e4))
    types = _layer_types(own, settings)
    return dict(query_pre_attn_scalar=scalar, rope_local_base_freq=local, layer_types=types)


def _gemma4(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    types = _layer_types(own, settings)
    (heads, widths) = (
        value if isinstance(value := settings.get(name), list) else [value] * len(types)
        for name in ("num_key_value_heads", "intermediate_size")
    )
    if min(len(heads), len(widths)) < len(types) or FULL not in types:
        raise InputError("attention.head_count_kv or feed_forward_length lack layers, or all have a window")
    of_full = {"head_dim": settings.get("head_dim"), "num_key_value_heads": heads[types.index(FULL)]}
    freqs = tensors.get("rope_freqs.weight")
    part = 1.0 if freqs is None else float(np.mean(freqs.array() == 1))
    full = dict(rope_type="proportional", partial_rotary_factor=part, rope_theta=settings["rope_theta"])
    sliding = dict(rope_type="default", rope_theta=own.get("rope.freq_base_swa", 1e4))
    per_layer = tensors.get("per_layer_token_embd.weight", tensors["token_embd.weight"])
    return dict(
        layer_types=types,
        hidden_size_per_layer_input=own["embedding_length_per_layer_input"],
        head_dim=integer(own, "attention.key_length_swa"),
        num_key_value_heads=heads[types.index(SLIDING) if SLIDING in types else 0],
        per_layer_config={str(i): of_full for i, kind in enumerate(types) if kind == FULL},
        attention_k_eq_v=f"blk.{types.index(FULL)}.attn_v.weight" not in tensors,
        intermediate_size=widths[0],
        use_double_wide_mlp=widths[len(types) - 1] != widths[0],
        enable_moe_block=bool(settings.get("num_experts")),
        top_k_experts=settings.get("num_experts_per_tok"),
        vocab_size_per_layer_input=per_layer.shape[0],
        rope_parameters={FULL: full, SLIDING: sliding},
    )


def _gpt_oss(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of gpt-oss. It always sets `rope_scaling`: without a scaling, the family would use
    the published one.
    """
    if own.get("rope.freq_base_swa", settings["rope_theta"]) != settings["rope_theta"]:
        raise InputError("rope.freq_base_swa other than rope.freq_base is not supported")
    return dict(
        num_local_experts=settings.get("num_experts"),
        intermediate_size=settings.get("moe_intermediate_size"),
        rope_scaling=settings["rope_scaling"] or dict(rope_type="default"),
        layer_types=_layer_types(own, settings, 2),
    )


def grouped(own: Mapping[str, Any], *, is_sigmoid: bool) -> Settings:
    """Returns the settings of experts in groups. If the keys of groups are absent, there is one group."""
    norm = own.get("expert_weights_norm", False)
    if not is_sigmoid and norm:
        raise InputError("expert_weights_norm true is supported with the sigmoid of scores only")
    return dict(
        n_routed_experts=own.get("expert_count"),
        n_shared_experts=own.get("expert_shared_count", 0),
        n_group=own.get("expert_group_count") or 1,
        topk_group=own.get("expert_group_used_count") or 1,
        norm_topk_prob=norm,
        routed_scaling_factor=own.get("expert_weights_scale") or 1.0,
        first_k_dense_replace=own.get("leading_dense_block_count", 0),
    )


def _is_sigmoid(own: Mapping[str, Any], default: int) -> bool:
    kind = own.get("expert_gating_func") or default
    if kind not in (_SOFTMAX, _SIGMOID):
        raise InputError(f"expert_gating_func {format_value(kind)} is not supported: only 1 and 2 are")
    return kind == _SIGMOID


def _deepseek2(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of DeepSeek-V3 if scores are sigmoids, of DeepSeek-V2 if they are a softmax, or of
    Youtu-LLM if there are no experts.

    Newer files say that there is one key head, with the width of a latent. Their keys `_mla` have the widths
    of heads. If a file does not say how experts are scored, scores are sigmoids if a bias is added to them.
    """
    heads = integer(own, "attention.head_count")
    key_heads = 1 if "attention.key_length_mla" in own else heads
    if (given := own.get("attention.head_count_kv", key_heads)) != key_heads:
        raise InputError(f"attention.head_count_kv must be {key_heads}, got {format_value(given)}")
    width = {x: f"attention.{x}_length_mla" for x in ("key", "value")}
    width = {x: key if key in own else key.removesuffix("_mla") for x, key in width.items()}
    rotated = integer(own, "rope.dimension_count")
    found = dict(
        num_key_value_heads=heads,
        head_dim=rotated,
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=integer(own, width["key"]) - rotated,
        v_head_dim=integer(own, width["value"]),
        kv_lora_rank=integer(own, "attention.kv_lora_rank"),
        q_lora_rank=own.get("attention.q_lora_rank") or None,
        attention_bias="blk.0.attn_kv_a_mqa.bias" in tensors,
        rope_interleave=True,
    )
    if not own.get("expert_count"):
        return found | dict(model_type="youtu")
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    is_sigmoid = _is_sigmoid(own, _SIGMOID if has_bias else _SOFTMAX)
    found |= grouped(own, is_sigmoid=is_sigmoid)
    if is_sigmoid:
        return found | dict(model_type="deepseek_v3")
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return found | dict(model_type="deepseek_v2", topk_method=method)


def _glm4moe(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    if not _is_sigmoid(own, _SIGMOID):
        raise InputError("expert_gating_func 1 is not supported: only 2 is, as the model has")
    return grouped(own, is_sigmoid=True) | dict(
        attention_bias="blk.0.attn_q.bias" in tensors,
        use_qk_norm="blk.0.attn_q_norm.weight" in tensors,
        partial_rotary_factor=integer(own, "rope.dimension_count") / head_width(own),
    )


def granite_factors(own: Mapping[str, Any]) -> Settings:
    """Returns the factors of Granite models."""
    return dict(
        attention_multiplier=own.get("attention.scale") or head_width(own) ** -0.5,
        embedding_multiplier=own.get("embedding_scale") or 1.0,
        residual_multiplier=own.get("residual_scale") or 1.0,
        logits_scaling=own.get("logit_scale") or 1.0,
    )


def _granite(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    """Returns the settings of Granite. Files of Granite 4 without Mamba-2 have this architecture too."""
    if own.get("rope.scaling.finetuned", True) is not True:
        raise InputError("rope.scaling.finetuned must be true: the family has RoPE in all layers")
    (heads, found) = key_heads(own, settings)
    if not all(heads):
        raise InputError(f"{_KEY_HEADS} {format_value(heads)} is not supported: all layers have attention")
    return found | granite_factors(own)


def _granite_moe(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    shared = own.get("expert_shared_feed_forward_length") or 0
    return _granite(own, settings, tensors) | dict(
        model_type="granitemoeshared" if shared else "granitemoe",
        num_local_experts=own.get("expert_count"),
        shared_intermediate_size=shared,
    )


OWN: dict[str, Callable[[Mapping[str, Any], Settings, Mapping[str, Any]], Settings]] = {
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
    "granite": _granite,
    "granitemoe": _granite_moe,
}
