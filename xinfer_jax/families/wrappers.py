"""The text model within a model that also sees or hears: its settings in config.json."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value

# Model types of such models, and of their text model where config.json does not say it.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "deepseek_v3",
}
_FLAT = ("qwen2_vl", "qwen2_5_vl")  # published without `text_config`; tied too if that says so
_TIED = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "kimi_k25",
    "mistral3",
)  # by default, whatever their text models are
# For text all three positions of mrope are equal, so these are models of families without it.
_SAME = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
}
_QWEN2_VL = dict(rms_norm_eps=1e-5, rope_theta=1e6, num_key_value_heads=8)
_QWEN3_VL = dict(rope_theta=5e5, max_position_embeddings=128000)
_DEFAULTS: dict[str, dict[str, Any]] = {  # where they are not the family's
    "gemma3_text": dict(num_attention_heads=8, vocab_size=262208),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL | dict(num_key_value_heads=16, norm_topk_prob=True),
}
# "boi", "boa": the begin of an image, and of audio.
_PLACEHOLDERS = ("image", "video", "audio", "vision_start", "boi", "boa", "media_placeholder")
_NOT_READ = ("text_config", "vision_config", "audio_config")


def placeholder_ids(hf: Mapping[str, Any]) -> dict[int, str]:
    """Returns the ids that stand for images or sound, with their names in these settings."""
    names = [f"{start}_token_{end}" for start in _PLACEHOLDERS for end in ("id", "index")]
    return {hf[name]: name for name in names if type(hf.get(name)) is int}


def is_tied_without_head(hf: Mapping[str, Any]) -> bool:
    """Returns True if the embedding is also the head in files without a head, and is not in files with one.
    This is so if config.json does not decide, but its default or the settings of the text model do.
    transformers loads such a model in this way.
    """
    kind = hf.get("model_type")
    text = hf.get("text_config")
    if not isinstance(kind, str) or kind not in WRAPPERS or hf.get("tie_word_embeddings") is not None:
        return False
    return kind in _TIED or isinstance(text, Mapping) and text.get("tie_word_embeddings") is True


def text_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the text model: config.json itself, or its `text_config` with the fields that
    only the outer object has. Images are not served: the settings of a vision model are not read. Raises
    InputError.
    """
    outer_type = hf.get("model_type")
    if not isinstance(outer_type, str) or outer_type not in WRAPPERS:
        same = _SAME.get(outer_type, outer_type) if isinstance(outer_type, str) else outer_type
        return {**hf, "model_type": same} if "model_type" in hf else dict(hf)
    text = {} if "text_config" not in hf and outer_type in _FLAT else hf.get("text_config")
    if not isinstance(text, Mapping):
        raise InputError(
            f"config.json: text_config of model_type {outer_type!r} must be an object, got"
            f" {format_value(text)}"
        )
    of_text = {k: v for k, v in text.items() if v is not None}
    named = hf.get("architectures")
    if isinstance(named, list | tuple):
        named = [name for name in named if not str(name).endswith("ForConditionalGeneration")]
    outer = {k: v for k, v in hf.items() if k not in _NOT_READ} | dict(architectures=named)
    own_type = text.get("model_type", WRAPPERS[outer_type])
    if "text_config" in hf:
        outer.pop("is_causal", None)  # transformers takes the text model's
    settings = outer | of_text | dict(model_type=own_type)
    if isinstance(own_type, str):
        settings = _DEFAULTS.get(own_type, {}) | settings | dict(model_type=_SAME.get(own_type, own_type))
    is_tied = outer.get("tie_word_embeddings")  # which transformers goes by
    if outer_type in _FLAT and text.get("tie_word_embeddings") is True:
        is_tied = True
    settings["tie_word_embeddings"] = outer_type in _TIED if is_tied is None else is_tied
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := settings.get(name), Mapping):
            plain = {k: "default" for k in ("type", "rope_type") if rope.get(k) == "mrope"}
            settings[name] = {**rope, **plain}
    width = settings.get("moe_intermediate_size")
    if own_type == "qwen3_vl_moe_text" and width == settings.get("hidden_size"):
        raise InputError(
            "config.json: moe_intermediate_size is hidden_size, and files of qwen3_vl_moe have experts with"
            " inputs or with outputs first: these cannot be told apart"
        )
    return settings
