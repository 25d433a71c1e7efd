"""Lists the keys of GGUF metadata, and says for each whether it is read, has no effect, or is an error.

A key may change the result. So each key of the architecture, of the tokenizer and of `general` is in one of
the tables, and a key that is in no table is an error. Keys of other namespaces are their writers' own.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the loader of llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "deepseek2",
    "glm4moe",
    "granite",
    "granitemoe",
    "mamba2",
    "falcon-h1",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "lfm2",
    "lfm2moe",
)
_HYBRID = ("qwen35", "qwen35moe")
_GRANITE = ("granite", "granitemoe", "granitehybrid")
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_MAMBA = ("mamba2", "falcon-h1", "granitehybrid", *_NEMOTRON)
_CONVOLUTIONS = ("lfm2", "lfm2moe")
_LATENT = ("deepseek2",)
_GROUPED = ("deepseek2", "glm4moe")  # experts that a router chooses in groups
_EXPERTS = ("qwen3moe", "qwen35moe", "gemma4", "gpt-oss", "nemotron_h_moe", "lfm2moe", *_GROUPED)
_WINDOWS = ("gemma3", "gemma4", "gpt-oss")
# Keys of the architecture that are read, without its name, and the architectures that read them.
_READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "context_length", "embedding_length", "block_count", "feed_forward_length", "pooling_type",
            "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.causal",
            "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
            "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
            "rope.scaling.original_context_length", "rope.scaling.attn_factor",
            "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "attention.value_length",
            "embedding_length_out", "attention.scale", "classifier.output_labels", "nextn_predict_layers",
            "attention.head_dim",  # as ollama's converter writes it
        ),
        ARCHITECTURES,
    ),
    **dict.fromkeys(("expert_count", "expert_used_count"), (*_EXPERTS, "granitemoe", "granitehybrid")),
    "expert_feed_forward_length": _EXPERTS,
    "expert_shared_feed_forward_length": ("qwen35moe", "granitemoe", "granitehybrid", "nemotron_h_moe"),
    **dict.fromkeys(
        (
            "expert_shared_count", "expert_group_count", "expert_group_used_count", "expert_weights_norm",
        ),
        (*_GROUPED, "nemotron_h_moe"),
    ),
    "leading_dense_block_count": (*_GROUPED, "lfm2moe"),
    "expert_gating_func": _GROUPED,
    "expert_weights_scale": (*_GROUPED, "nemotron_h_moe", "lfm2moe"),
    "moe_latent_size": ("nemotron_h_moe",),
    "shortconv.l_cache": _CONVOLUTIONS,
    **dict.fromkeys(
        ("embedding_scale", "residual_scale", "logit_scale", "rope.scaling.finetuned"), _GRANITE
    ),
    **dict.fromkeys(
        (
            "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla",
            "attention.value_length_mla", "rope.scaling.yarn_log_multiplier",
        ),
        _LATENT,
    ),
    **dict.fromkeys(
        (
            "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
        ),
        (*_HYBRID, *_MAMBA),
    ),
    **dict.fromkeys(("full_attention_interval", "attention.recurrent_layers"), _HYBRID),
    **dict.fromkeys(
        ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"), _WINDOWS
    ),
    "final_logit_softcapping": ("gemma3", "gemma4"),
    "rope.local.freq_base": ("gemma3",),  # ollama's name of rope.freq_base_swa
    **dict.fromkeys(
        (
            "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
            "attention.shared_kv_layers", "embedding_length_per_layer_input",
        ),
        ("gemma4",),
    ),
}  # fmt: skip
_REQUIRED: dict[str, tuple[str, ...]] = {  # their defaults would be those of another model
    **dict.fromkeys(
        (
            "context_length", "embedding_length", "block_count", "attention.layer_norm_rms_epsilon",
        ),
        ARCHITECTURES,
    ),
    "attention.head_count": tuple(arch for arch in ARCHITECTURES if arch != "mamba2"),
    "feed_forward_length": ("llama", "qwen2", "qwen3", "qwen35", "gemma3", "gemma4", *_GROUPED, *_NEMOTRON,
        *_CONVOLUTIONS, "falcon-h1", *_GRANITE),
    "attention.head_count_kv": (*_NEMOTRON, *_CONVOLUTIONS, "granitehybrid"),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"),
        ("qwen3moe", "qwen35moe", "gpt-oss", "glm4moe", "nemotron_h_moe", "lfm2moe")),
    "shortconv.l_cache": _CONVOLUTIONS,
    "expert_shared_feed_forward_length": ("nemotron_h_moe",),
    **dict.fromkeys(("attention.kv_lora_rank", "attention.key_length", "attention.value_length"), _LATENT),
    **dict.fromkeys((key for key in _READ if key.startswith("ssm.")), (*_HYBRID, *_MAMBA)),
    "rope.dimension_count": (*_HYBRID, *_GROUPED),
    "attention.sliding_window": ("gemma4", "gpt-oss"),
    **dict.fromkeys(
        ("attention.sliding_window_pattern", "attention.key_length", "attention.key_length_swa",
        "embedding_length_per_layer_input"), ("gemma4",)),
}  # fmt: skip
# Keys of the architecture that are not read: they do nothing in these architectures.
_WITHOUT_EFFECT = (
    "vocab_size",  # the embedding has so many rows
    "tensor_data_layout",  # llama.cpp does not read it
    "attention.layer_norm_epsilon", "attention.group_norm_epsilon", "attention.group_norm_groups",
    "rope.dimension_sections", "rope.mrope_section",  # a token of text has the same position in each
    "rope.scaling.finetuned", "expert_shared_count",
)  # fmt: skip
# The values at which other keys do nothing; (): the key is always an error.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "leading_dense_block_count", "n_deepstack_layers", "attn_logit_softcapping",
            "router_logit_softcapping", "final_logit_softcapping", "attention.max_alibi_bias",
            "attention.clamp_kqv", "attention.temperature_length", "attention.temperature_scale",
            "attention.shared_kv_layers", "attention.sliding_window", "expert_count", "expert_used_count",
            "expert_group_scale", "moe_latent_size", "use_parallel_residual",
            "embedding_length_per_layer_input", "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha",
            "ssm.dt_b_c_rms", "expert_shared_feed_forward_length",
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            "logit_scale", "residual_scale", "embedding_scale", "attention.output_scale",
            "expert_weights_scale", "expert_group_count", "expert_group_used_count", "moe_every_n_layers",
            "interleave_moe_layer_step",
        ),
        (0, 1),
    ),
    **dict.fromkeys(("expert_weights_norm", "norm_top_k_prob"), (True,)),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_attn_factor": (1, -1),
    **dict.fromkeys(
        (
            "features_length", "expert_feed_forward_length", "expert_chunk_feed_forward_length",
            "experts_per_group", "decoder_start_token_id", "decoder_block_count", "swin_norm",
            "rescale_every_n_layers", "time_mix_extra_dim", "time_decay_extra_dim", "token_shift_count",
            "activation_sparsity_scale", "altup.active_idx", "altup.num_inputs", "swiglu_clamp_exp",
            "swiglu_clamp_shexp", "dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in",
            "dense_3_feat_out", "full_attention_interval", "attention.recurrent_layers",
            "attention.sliding_window_pattern", "attention.key_length_swa", "attention.value_length_swa",
            "rope.dimension_count_swa", "rope.freq_base_swa", "attention.q_lora_rank",
            "attention.kv_lora_rank", "attention.decay_lora_rank", "attention.iclr_lora_rank",
            "attention.value_residual_mix_lora_rank", "attention.gate_lora_rank",
            "attention.relative_buckets_count", "attention.key_length_mla", "attention.value_length_mla",
            "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
            "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
            "kda.head_dim", "wkv.head_size", "posnet.embedding_length", "posnet.block_count",
            "convnext.embedding_length", "convnext.block_count", "shortconv.l_cache",
        ),
        (),
    ),
}  # fmt: skip
# 2: sigmoid; 3: softmax of the chosen experts' scores; in other architectures 1: softmax of all scores.
_GATING = {"gpt-oss": (3,), "nemotron_h_moe": (2,), "lfm2moe": (2,)}
# Keys of parts that all models of an architecture lack.
_OF_ABSENT_PARTS = {
    # Files of Granite 4 without Mamba-2 have its numbers too.
    "granite": re.compile(r"ssm\.(?!dt_b_c_rms).*|expert_(shared_feed_forward_length|used_count)"),
    "granitemoe": re.compile(r"ssm\.(?!dt_b_c_rms).*"),
    "mamba2": re.compile(r"rope\..*|feed_forward_length|attention\.(head|key|value|scale).*"),
    "granitehybrid": re.compile(r"rope\.(?!scaling\.finetuned).*"),
    **dict.fromkeys(_NEMOTRON, re.compile(r"rope\..*")),
}
# Keys with another first part.
_GENERAL = (
    "general.architecture", "general.alignment", "general.sampling.temp", "general.sampling.top_k",
    "general.sampling.top_p", "general.sampling.min_p", "general.sampling.penalty_repeat", "split.no",
    "split.count", "split.tensors.count",
)  # fmt: skip
_TOKENIZER = tuple(
    f"tokenizer.ggml.{name}"
    for name in (
        "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
        "eos_token_ids", "eot_token_id", "eom_token_id", "unknown_token_id", "seperator_token_id",
        "padding_token_id", "mask_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
        "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "suppress_tokens",
    )
) + ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")  # fmt: skip
# Names, licences and origins; defaults of samplers that are not ours; ids that no template and no loop uses;
# what llama.cpp reads for other tokenizers; the same tokenizer in another form.
_OTHERS_WITHOUT_EFFECT = re.compile(
    r"general\.(file_type|name|author|version|organization|finetune|basename|description|quantized_by"
    r"|parameter_count|size_label|license|url|doi|uuid|repo_url|source|base_model|dataset|datasets|tags|languages)(\..*)?"
    r"|general\.sampling\.(sequence|xtc_probability|xtc_threshold|penalty_last_n|mirostat|mirostat_tau"
    r"|mirostat_eta)"
    r"|tokenizer\.ggml\.(token_type_count|remove_extra_whitespaces|cls_token_id|image_token_id"
    r"|audio_token_id|(fim_pre|fim_suf|fim_mid|prefix|suffix|middle)_token_id"
    r"|add_(unknown|padding|cls|mask)_token)"
    r"|tokenizer\.huggingface\.json|tokenizer\.chat_templates|tokenizer\.chat_template\..*"
)
_OTHERS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (0, 2),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.precompiled_charsmap": (),
    "tokenizer.rwkv.world": (),
}
_NAMESPACES = ("general", "tokenizer", "split")
_OTHER_KINDS = ("adapter", "imatrix", "clip", "diffusion", "xielu")  # of files, or of models


def key_role(arch: str, key: str) -> str | tuple[Any, ...] | None:
    """Returns "read", "without effect", the values at which the key does nothing (others are errors), or None
    if the key is unknown, which is an error.
    """
    (namespace, _, own) = key.partition(".")
    if namespace == arch:
        if arch in _OF_ABSENT_PARTS and _OF_ABSENT_PARTS[arch].fullmatch(own):
            return "without effect"
        if arch in _READ.get(own, ()):
            return "read"
        if own == "expert_gating_func":
            return _GATING.get(arch, (1,))
        return "without effect" if own in _WITHOUT_EFFECT else _NEUTRAL.get(own)
    if namespace in _OTHER_KINDS:
        return ()
    if key in _GENERAL or key in _TOKENIZER:
        return "read"
    if _OTHERS_WITHOUT_EFFECT.fullmatch(key) or namespace not in _NAMESPACES:
        return "without effect"
    return _OTHERS_NEUTRAL.get(key)


def check_keys(arch: str, metadata: Mapping[str, Any]) -> None:
    """Raises InputError if a key changes the result and is not read, or if a required key is absent."""
    for key, value in metadata.items():
        role = key_role(arch, key)
        if isinstance(role, str) or role and value in role:
            continue
        only = f", only {' and '.join(map(str, role))}" if role else ""
        raise InputError(
            f"{key} {format_value(value)} is not supported{only}: load this model's Hugging Face checkpoint"
        )
    for key, needed_by in _REQUIRED.items():
        if arch in needed_by and f"{arch}.{key}" not in metadata:
            raise InputError(f"{arch}.{key} is absent, and the model needs it: make the file again")
