"""Opens a GGUF file as a checkpoint, with a config.json of its metadata and the shapes of its tensors.

Absent keys have the defaults of llama.cpp, not the defaults of a family in transformers. `gguf_keys` has the
keys.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..families.reading import from_hf
from ..formats.gguf_file import GgufFile, open_gguf
from ..formats.gguf_format import gguf_form
from ..formats.gguf_keys import check_keys
from ..mixers.latent_attention import LatentAttentionSpec
from ..sampling.generation_config import check_generation_config
from ..tokenization.gguf_tokenizer import read_gguf_tokenizer
from ..weights.quantization import check_quantize
from .directory import OpenedFiles
from .embedding_modules import EmbeddingModules
from .gguf_architectures import DEEPSEEK2_TYPES, GRANITE_MOE_TYPES, OWN, Settings, integer, number
from .gguf_states import OF_STATES
from .gguf_tensors import check_reranker, gguf_tensors

_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "gpt-oss": "gpt_oss",
    "deepseek2": DEEPSEEK2_TYPES[0], "glm4moe": "glm4_moe", "mamba2": "mamba2", "falcon-h1": "falcon_h1",
    "granite": "granite", "granitemoe": GRANITE_MOE_TYPES[0],
    "granitehybrid": "granitemoehybrid", "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h",
    "lfm2": "lfm2", "lfm2moe": "lfm2_moe",
}  # fmt: skip
FAMILIES = {*_TYPES.values(), *DEEPSEEK2_TYPES, *GRANITE_MOE_TYPES}
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
_SAMPLING = dict(
    temp="temperature", top_k="top_k", top_p="top_p", min_p="min_p", penalty_repeat="repetition_penalty"
)
_POOLINGS = {0: None, 1: "mean", 2: "first", 3: "last", 4: None}  # 4: a reranker


def open_gguf_checkpoint(path: Path, quantize: str | None, dequantize: bool) -> OpenedFiles:
    """Reads the header of a GGUF file, and the headers of its other splits. It takes the arguments of
    `load_model`, and raises its errors.
    """
    file = open_gguf(path)
    keepable = {name: dataclasses.replace(x, kept=gguf_form) for name, x in file.tensors.items()}
    file = file._replace(tensors=keepable)
    try:
        (arch, own, settings) = _settings(file)
        config = from_hf(settings)
        _check_model(own, config)
        embedding = _embedding(own)
        generation = _generation_config(file.metadata)
        check_generation_config(generation, config.vocab_size)
    except InputError as error:
        raise InputError(f"{path}: its metadata as a config.json: {error}") from error
    check_quantize(config, quantize)
    tokenizer = read_gguf_tokenizer(file, config.vocab_size)
    (tensors, skipped) = gguf_tensors(file, arch, config)
    check_reranker(file, own.get("classifier.output_labels"), tokenizer)
    keeps = quantize is None and not dequantize
    kept = "gguf" if keeps and any(gguf_form(x.shape, [x]) for x in file.tensors.values()) else None
    ends = tokenizer.eos_token_ids if tokenizer else ()
    return OpenedFiles(config, tensors, skipped, tokenizer, ends, generation, embedding, kept=kept)


def _settings(file: GgufFile) -> tuple[str, Mapping[str, Any], Settings]:
    """Returns the architecture, its keys without its name, and config.json."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _TYPES:
        raise InputError(f"architecture {format_value(arch)} is not read: only {', '.join(_TYPES)} are")
    if "token_embd.weight" not in file.tensors:
        raise InputError("only language models with token_embd.weight are read")
    check_keys(arch, file.metadata)
    own = {key.removeprefix(f"{arch}."): x for key, x in file.metadata.items() if key.startswith(f"{arch}.")}
    drafts = own.get("nextn_predict_layers", 0)  # layers at the end that are not read
    layers = integer(own, "block_count")
    if drafts not in range(layers) or layers > len(file.tensors):
        what = f"block_count {layers} and nextn_predict_layers {format_value(drafts)}"
        raise InputError(f"{what} do not fit the {len(file.tensors)} tensors")
    given = {name: own[key] for name, key in _KEYS.items() if own.get(key)}  # 0: as if it were absent
    settings = dict(rope_theta=1e4, head_dim=None, num_key_value_heads=None) | given
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
        is_causal=own.get("attention.causal", True),
    )
    read = OWN.get(arch) or OF_STATES.get(arch)
    return arch, own, settings | read(own, settings, file.tensors) if read else settings


def _rope_scaling(arch: str, own: Mapping[str, Any], tensors: Mapping[str, Any]) -> Settings | None:
    """Returns the scaling of RoPE, as llama.cpp reads it. Scaling without a type is linear, and `attn_factor`
    multiplies yarn's own factor. For llama, a tensor has the divisors of the frequencies. The tensor of
    gemma4 only says which pairs are rotated. Files of deepseek2 have a tenth of `mscale_all_dim`, and
    `mscale` is equal to it.
    """
    kind = own.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise InputError(f"rope.scaling.type {format_value(kind)} is not supported")
    factor = number(own, "rope.scaling.factor", number(own, "rope.scale_linear", 0)) or 1
    scaled = kind != "none" and factor != 1
    attention = number(own, "rope.scaling.attn_factor", 1)
    is_yarn = scaled and kind == "yarn"
    if attention != 1 and not is_yarn:
        raise InputError(f"rope.scaling.attn_factor {attention} is supported with yarn only")
    multiplier = number(own, "rope.scaling.yarn_log_multiplier", 0)
    if multiplier and (not is_yarn or attention != 1):
        raise InputError(
            f"rope.scaling.yarn_log_multiplier {multiplier} is supported with yarn, and without"
            " rope.scaling.attn_factor, only"
        )
    divisors = tensors.get("rope_freqs.weight") if arch == "llama" else None
    if scaled and (divisors is not None or arch == "gemma4" or arch == "gemma3" and kind == "yarn"):
        raise InputError(f"rope.scaling.type {kind} with factor {factor} is not supported for this model")
    if divisors is not None:
        factors = divisors.array().astype(float).tolist()
        return dict(rope_type="longrope", short_factor=factors, long_factor=factors, attention_factor=1.0)
    if not scaled or kind == "linear":
        return dict(rope_type="linear", factor=factor) if scaled else None
    beta = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    length = own.get("rope.scaling.original_context_length", own["context_length"])
    yarn = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=length, **beta)
    own_factor = {"attention_factor": attention * (0.1 * math.log(factor) + 1)} if attention != 1 else {}
    if multiplier:
        own_factor = dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    return yarn | own_factor | ({"truncate": False} if arch == "gpt-oss" else {})


def _check_model(own: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises InputError if a key asks for another width or scale than the model has."""
    attentions = [*filter(None, (layer.attention for layer in config.layers))]
    full = attentions[-1] if attentions else AttentionSpec()
    width = full.head_dim or config.head_dim
    scale = full.attention_multiplier or (full.query_pre_attn_scalar or width) ** -0.5
    expected = {
        "attention.head_dim": width, "attention.value_length": width,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": config.rope.rotated_width(width), "rope.dimension_count_swa": config.head_dim,
        "embedding_length_out": config.hidden_size, "attention.scale": scale,
    }  # fmt: skip
    if not config.ropes:
        del expected["rope.dimension_count"]  # files of Nemotron-H have another number
    if latent := config.layers[0].mixer_of(LatentAttentionSpec.kind):
        expected |= _widths_of_latents(own, latent)
    for key, wanted in expected.items():
        if (value := number(own, key, 0)) and not math.isclose(value, wanted, rel_tol=1e-5):
            raise InputError(f"{key} {value} is not supported: only {wanted}, as the model has, is")
    if own.get("attention.causal", True) is False:
        if any(config.layer_windows):
            raise InputError("attention.causal false is not supported with sliding windows")
        if not all(mixer.has_keys for mixer in config.cached_mixers):
            raise InputError("attention.causal false is not supported for models with states")


def _widths_of_latents(own: Mapping[str, Any], spec: LatentAttentionSpec) -> dict[str, float]:
    """Returns the values that keys must have. Files with the keys `_mla`, of heads, have the widths of a
    latent in the others.
    """
    head_width = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    latent_width = spec.kv_lora_rank + spec.qk_rope_head_dim
    return {
        "attention.key_length": latent_width if "attention.key_length_mla" in own else head_width,
        "attention.value_length": spec.kv_lora_rank
        if "attention.value_length_mla" in own
        else spec.v_head_dim,
        "attention.head_dim": head_width,
        "attention.scale": head_width**-0.5,
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults of sampling, in the form of generation_config.json."""
    keys = {name: f"general.sampling.{key}" for key, name in _SAMPLING.items()}
    given = {name: metadata[key] for name, key in keys.items() if key in metadata}
    tokens = metadata.get("tokenizer.ggml.suppress_tokens")
    found = {} if tokens is None else {"suppress_tokens": tokens}
    return found | (dict(do_sample=given.get("temperature") != 0, top_k=0) | given if given else {})


def _embedding(own: Mapping[str, Any]) -> EmbeddingModules | None:
    kind = own.get("pooling_type", 0)
    if type(kind) is not int or kind not in _POOLINGS:
        raise InputError(f"pooling_type must be from 0 to {max(_POOLINGS)}, got {format_value(kind)}")
    pooling = _POOLINGS[kind]
    return EmbeddingModules(pooling, (), True, {}, "") if pooling else None
