"""Opens a GGUF file as a checkpoint, with a config.json of its metadata and the shapes of its tensors.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from ..families.layer_fields import FULL, SLIDING
from ..families.reading import from_hf
from ..weights.quantization import check_quantize
from .directory import OpenedFiles
from .gguf_file import GgufFile, open_gguf
from .gguf_format import gguf_form
from .gguf_tensors import gguf_tensors
from .gguf_tokenizer import read_gguf_tokenizer

_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gpt-oss": "gpt_oss",
}  # fmt: skip
_KEYS = dict(
    hidden_size="embedding_length", intermediate_size="feed_forward_length",
    num_attention_heads="attention.head_count", num_key_value_heads="attention.head_count_kv",
    head_dim="attention.key_length", max_position_embeddings="context_length",
    rms_norm_eps="attention.layer_norm_rms_epsilon", rope_theta="rope.freq_base",
    sliding_window="attention.sliding_window", final_logit_softcapping="final_logit_softcapping",
    num_experts="expert_count", num_experts_per_tok="expert_used_count",
    moe_intermediate_size="expert_feed_forward_length",
    shared_expert_intermediate_size="expert_shared_feed_forward_length",
    linear_conv_kernel_dim="ssm.conv_kernel", linear_key_head_dim="ssm.state_size",
    linear_num_key_heads="ssm.group_count", linear_num_value_heads="ssm.time_step_rank",
    full_attention_interval="full_attention_interval", num_kv_shared_layers="attention.shared_kv_layers",
    hidden_size_per_layer_input="embedding_length_per_layer_input",
)  # fmt: skip
_SCALING = dict(
    factor="factor", original_max_position_embeddings="original_context_length",
    attention_factor="attn_factor", beta_fast="yarn_beta_fast", beta_slow="yarn_beta_slow",
)  # fmt: skip
_WINDOWS = "attention.sliding_window_pattern"
_GEMMA3_27B = 62  # layers; its attention is scaled by other than the width of a head

Settings = dict[str, Any]


def open_gguf_checkpoint(path: Path, quantize: str | None, dequantize: bool) -> OpenedFiles:
    """Reads the header of a GGUF file, and those of its other splits. Arguments and errors as of
    `load_model`.
    """
    file = open_gguf(path)
    try:
        arch, settings = _settings(file)
        config = from_hf(settings)
    except InputError as error:
        raise InputError(f"{path}: its metadata as a config.json: {error}") from error
    check_quantize(config, quantize)
    tokenizer = read_gguf_tokenizer(file, config.vocab_size)
    (tensors, skipped) = gguf_tensors(file, arch, config)
    keeps = quantize is None and not dequantize
    kept = "gguf" if keeps and any(gguf_form([x]) for x in file.tensors.values()) else None
    ends = tokenizer.eos_token_ids if tokenizer else ()
    return OpenedFiles(config, tensors, skipped, tokenizer, ends, {}, kept=kept)


def _settings(file: GgufFile) -> tuple[str, Settings]:
    """The architecture, and config.json."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _TYPES:
        raise InputError(f"architecture {format_value(arch)} is not read: only {', '.join(_TYPES)} are")
    own = {key.removeprefix(f"{arch}."): x for key, x in file.metadata.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" not in file.tensors or arch == "llama" and own.get("expert_count"):
        raise InputError("only language models with token_embd.weight are read, and no llama with experts")
    drafts = own.get("nextn_predict_layers", 0)  # layers at the end that are not read
    layers = _integer(own, "block_count")
    if drafts not in range(layers) or layers > len(file.tensors):
        what = f"block_count {layers} and nextn_predict_layers {format_value(drafts)}"
        raise InputError(f"{what} do not fit the {len(file.tensors)} tensors")
    settings = {"rope_theta": 1e4} | {name: own[key] for name, key in _KEYS.items() if key in own}
    settings |= dict(
        model_type=_TYPES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        num_hidden_layers=layers - int(drafts),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        rope_scaling=_rope_scaling(arch, own, file.tensors),
        norm_topk_prob=True,
        use_sliding_window=False,
    )
    if arch == "llama":
        settings.setdefault("head_dim", own.get("rope.dimension_count"))
    read = _OWN.get(arch)
    return arch, settings | read(own, settings, file.tensors) if read else settings


def _integer(own: Mapping[str, Any], key: str) -> int:
    value = own.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise InputError(f"{key} must be a whole number above 0, got {format_value(value)}")
    return value


def _rope_scaling(arch: str, own: Mapping[str, Any], tensors: Mapping[str, Any]) -> Settings | None:
    """A tensor has the divisors of llama's frequencies; gemma4's says only which pairs are rotated."""
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise InputError(f"rope.scaling.type {format_value(kind)} is not supported")
    if kind == "none" and arch == "llama" and "rope_freqs.weight" in tensors:
        factors = tensors["rope_freqs.weight"].array().astype(float).tolist()
        return dict(rope_type="longrope", short_factor=factors, long_factor=factors, attention_factor=1.0)
    found = {name: own.get(f"rope.scaling.{key}") for name, key in _SCALING.items()}
    truncate = {"truncate": False} if kind == "yarn" and arch == "gpt-oss" else {}
    return None if kind == "none" else {"rope_type": kind, **found, **truncate}


def _layer_types(own: Mapping[str, Any], settings: Settings) -> list[str]:
    """The pattern is the number of layers until one has no window, or says for each whether it has one."""
    pattern = own.get(_WINDOWS, 6)
    layers = settings["num_hidden_layers"]
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise InputError(f"{_WINDOWS} is {format_value(pattern)}, for {layers} layers")
    return [SLIDING if slides and "sliding_window" in settings else FULL for slides in pattern[:layers]]


def _qwen35(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    width = _integer(own, "ssm.inner_size") // _integer(own, "ssm.time_step_rank")
    part = _integer(own, "rope.dimension_count") / _integer(own, "attention.key_length")
    return dict(linear_value_head_dim=width, partial_rotary_factor=part)


def _gemma3(own: Mapping[str, Any], settings: Settings, tensors: Mapping[str, Any]) -> Settings:
    scalar = _integer(own, "attention.key_length")
    if settings["num_hidden_layers"] == _GEMMA3_27B:
        scalar = _integer(own, "embedding_length") // _integer(own, "attention.head_count")
    local = own.get("rope.freq_base_swa", 1e4)
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
        head_dim=_integer(own, "attention.key_length_swa"),
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
    """Without a scaling its family would have the published one."""
    scaling = settings["rope_scaling"] or dict(rope_type="default")
    width = settings.get("moe_intermediate_size")
    return dict(num_local_experts=settings.get("num_experts"), intermediate_size=width, rope_scaling=scaling)


_OWN: dict[str, Callable[[Mapping[str, Any], Settings, Mapping[str, Any]], Settings]] = {
    "qwen35": _qwen35, "qwen35moe": _qwen35, "gemma3": _gemma3, "gemma4": _gemma4, "gpt-oss": _gpt_oss,
}  # fmt: skip
