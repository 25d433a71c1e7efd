"""The registries (families, mixers, feed-forwards, routers, cache dtypes, RoPE types, forms of tool calls and
of operations), and the hooks of a platform.

The core asks `plugin(kind, name)` (`registry.py`), which imports a module of this table when it is
first used. Operations, dtypes and limits do without if there is no entry; what a config or an option asks for
(linear attention, scaled RoPE) needs one. `register` adds to a registry from outside the package. Features
that only some calls need are imports inside functions, marked as optional.
"""

import functools
from importlib import import_module
from typing import Any

from .errors import InputError, format_value

# (kind, name): module and attribute, or a module.
TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("compiler", "options"): ("backends.cpu.cpu_features", "compiler_options"),
    ("compiler", "ahead"): ("layerwise.precompile", "precompile_once"),
    ("device", "chunk of all rows"): ("device", "chunk_of_all_rows"),
    ("device", "dtype"): ("device", "default_dtype"),
    ("device", "memory"): ("device", "check_memory"),
    ("device", "peak bytes"): ("device", "peak_memory_bytes"),
    ("executor", "choice"): ("layerwise.layerwise_executor", "layerwise_executor"),
    ("processor", "dry"): ("sampling.xtc_dry", "dry"),
    ("processor", "xtc"): ("sampling.xtc_dry", "xtc"),
    ("cache dtype", "int8"): ("cache.quantized_kv", "INT8"),
    ("cache dtype", "int4"): ("cache.quantized_kv", "INT4"),
    ("cache dtype", "gear"): ("cache.gear", "GEAR"),
    ("cache dtype", "float8_e4m3fn"): ("cache.float8_kv", "FLOAT8_E4M3FN"),
    ("cache form", "side by side"): ("cache.side_by_side", "SideBySideKV"),
    # What layers are made of, by the kinds of their specs.
    ("mixer", "attention"): ("mixers.softmax_attention", "SoftmaxAttention"),
    ("mixer", "attention_and_mlp"): ("feed_forward.attention_and_mlp", "AttentionAndMlp"),
    ("mixer", "delta"): ("mixers.gated_delta", "GatedDelta"),
    ("mixer", "head_gated_attention"): ("mixers.head_gated_attention", "HeadGatedAttention"),
    ("mixer", "latent_attention"): ("mixers.latent_attention", "LatentAttention"),
    ("mixer", "mamba2"): ("mixers.mamba2", "Mamba2"),
    ("mixer", "scaled_attention"): ("mixers.scaled_attention", "ScaledAttention"),
    ("mixer", "short_conv"): ("mixers.short_conv", "ShortConv"),
    ("feed_forward", "mlp"): ("feed_forward.mlp", "Mlp"),
    ("feed_forward", "experts"): ("feed_forward.mixture", "Mixture"),
    ("feed_forward", "scaled_mlp"): ("feed_forward.scaled_mlp", "ScaledMlp"),
    ("feed_forward", "ungated_experts"): ("feed_forward.ungated_experts", "UngatedMixture"),
    ("feed_forward", "xielu_mlp"): ("feed_forward.xielu_mlp", "XieluMlp"),
    ("feed_forward", "mlp_and_experts"): ("feed_forward.mlp_and_mixture", "MlpAndMixture"),
    ("router", "grouped_topk"): ("feed_forward.grouped_topk", "GroupedTopkRouter"),
    ("router", "softmax"): ("feed_forward.routers", "SoftmaxRouter"),
    ("draft head", "dflash"): ("draft_heads.dflash", "DFlash"),
    ("draft head", "eagle3"): ("draft_heads.eagle3", "Eagle3"),
    ("draft head", "gemma4_assistant"): ("draft_heads.gemma4_assistant", "Gemma4Assistant"),
    ("draft head", "mtp"): ("draft_heads.mtp", "Mtp"),
    # Files of draft heads, by the kind of head and by `architectures` or `model_type`.
    ("draft files", "dflash"): ("families.dflash_files", "DFLASH_FILES"),
    ("draft files", "DFlashDraftModel"): ("families.dflash_files", "DFLASH_FILES"),
    ("draft files", "DSparkDraftModel"): ("families.dflash_files", "DFLASH_FILES"),
    ("draft files", "Qwen3DSparkModel"): ("families.dflash_files", "DFLASH_FILES"),
    ("draft files", "eagle3"): ("families.eagle3_files", "EAGLE3_FILES"),
    ("draft files", "Eagle3DraftModel"): ("families.eagle3_files", "EAGLE3_FILES"),
    ("draft files", "Eagle3LlamaForCausalLM"): ("families.eagle3_files", "EAGLE3_FILES"),
    ("draft files", "Eagle3Speculator"): ("families.eagle3_files", "EAGLE3_FILES"),
    ("draft files", "LlamaForCausalLMEagle3"): ("families.eagle3_files", "EAGLE3_FILES"),
    ("draft files", "gemma4_assistant"): ("families.gemma4_assistant_files", "ASSISTANT_FILES"),
    ("draft files", "gemma4_unified_assistant"): ("families.gemma4_assistant_files", "ASSISTANT_FILES"),
    # RoPE by `rope_type`, other than "default".
    ("rope", "dynamic"): ("mixers.rope_scaling", "dynamic_rope"),
    ("rope", "linear"): ("mixers.rope_scaling", "linear_rope"),
    ("rope", "llama3"): ("mixers.rope_scaling", "llama3_rope"),
    ("rope", "longrope"): ("mixers.rope_scaling", "longrope"),
    ("rope", "proportional"): ("mixers.rope_scaling", "proportional_rope"),
    ("rope", "yarn"): ("mixers.rope_scaling", "yarn_rope"),
    # Over a mesh of devices; operations have more forms for it below.
    ("mesh", "auto params"): ("sharding", "on_auto_mesh"),
    ("mesh", "explicit axes"): ("backends.auto_axes", "on_auto_axes"),
    ("mesh", "of params"): ("sharding", "mesh_of_params"),
    # How operations get their forms; then the forms of each: for "any" platform, by a "kernel" or by several
    # "kernels", and for a platform.
    ("operation", "choose"): ("ops.forms", "choose"),
    ("operation", "check"): ("ops.forms", "check_available"),
    ("kernel selector", "decode_attention"): ("backends.kernels.attention_kernels", "select_attention"),
    ("kernel selector", "prefill_attention"): ("backends.kernels.attention_kernels", "select_attention"),
    ("kernel selector", "delta_drafts"): ("backends.kernels.delta_kernels", "select_delta"),
    ("kernel selector", "delta_prefill"): ("backends.kernels.delta_kernels", "select_delta"),
    ("kernel selector", "delta_step"): ("backends.kernels.delta_kernels", "select_delta"),
    ("kernel selector", "mamba_prefill"): ("backends.kernels.mamba_kernels", "select_mamba"),
    ("kernel selector", "mamba_step"): ("backends.kernels.mamba_kernels", "select_mamba"),
    ("argmax", "cpu"): ("backends.cpu.cpu_sampler", "argmax_form"),
    ("argmax", "kernel"): ("backends.kernels.head", "ARGMAX"),
    ("after_recording", "cuda"): ("backends.gpu.verify", "recording_form"),
    ("apart", "tpu"): ("backends.tpu.tpu_products", "apart_form"),
    ("attention", "cpu"): ("backends.cpu.layer_forms", "attention_form"),
    ("attention", "kernel"): ("backends.kernels.attention_kernels", "ATTENTION"),
    ("causal_attention", "cuda"): ("backends.gpu.cudnn_attention", "cudnn_form"),
    ("products", "kernels"): ("backends.kernels.product_kernels", "products_form"),
    ("float_product", "cpu"): ("backends.cpu.cpu_products", "float_form"),
    ("float_product", "tpu"): ("backends.tpu.tpu_products", "row_form"),
    ("fp8_product", "cpu"): ("backends.cpu.cpu_products", "fp8_form"),
    ("fp8_product", "tpu"): ("backends.tpu.tpu_products", "row_form"),
    ("grouped_product", "cpu"): ("backends.cpu.grouped_products", "cpu_grouped_form"),
    ("grouped_product", "tpu"): ("backends.tpu.tpu_products", "tpu_grouped_form"),
    ("int8_product", "cpu"): ("backends.cpu.cpu_products", "int8_form"),
    ("int8_product", "tpu"): ("backends.tpu.tpu_products", "row_form"),
    ("mxfp4_product", "cpu"): ("backends.cpu.mxfp4_products", "mxfp4_form"),
    ("mxfp4_product", "tpu"): ("backends.tpu.tpu_products", "row_form"),
    ("ternary_sums", "cpu"): ("backends.cpu.ternary_products", "ternary_form"),
    ("delta_step", "kernels"): ("backends.kernels.delta_kernels", "delta_form"),
    ("mamba_step", "kernels"): ("backends.kernels.mamba_kernels", "mamba_form"),
    ("recurrent_step", "cpu"): ("backends.cpu.layer_forms", "STEP"),
    ("rope_append", "kernels"): ("backends.kernels.append_kernels", "append_form"),
    ("decoder_layer", "any"): ("backends.mesh", "mesh_layer_form"),
    ("embed_tokens", "any"): ("backends.mesh", "mesh_embedding_form"),
    ("embedding", "cpu"): ("backends.cpu.cpu_products", "embedding_form"),
    ("embedding", "tpu"): ("backends.tpu.tpu_embedding", "tpu_embedding_form"),
    ("expert_at", "any"): ("backends.cpu.layer_forms", "expert_at_form"),
    ("experts", "gradient"): ("backends.expert_tiles", "with_tiled_gradient"),
    ("experts", "cpu"): ("backends.cpu.layer_forms", "experts_form"),
    ("experts", "kernel"): ("backends.kernels.expert_kernels", "EXPERTS"),
    ("choose_tokens", "cpu"): ("backends.cpu.cpu_sampler", "grouped_choice_form"),
    ("choose_tokens", "cuda"): ("backends.gpu.gpu_sampler", "choice_form"),
    ("known_logsumexp", "cuda"): ("backends.gpu.gpu_sampler", "known_form"),
    ("logsumexp", "cuda"): ("backends.gpu.gpu_sampler", "logsumexp_form"),
    ("route", "kernel"): ("backends.kernels.expert_kernels", "ROUTE"),
    ("sample_from_hidden", "kernels"): ("backends.kernels.head", "sampling_form"),
    ("sample_rows", "any"): ("backends.mesh", "mesh_sampling_form"),
    ("sampled_from", "cuda"): ("backends.gpu.gpu_sampler", "sampled_from_form"),
    ("threshold", "cuda"): ("backends.gpu.reductions", "threshold_form"),
    ("top_k", "cuda"): ("backends.gpu.top_k", "gpu_top_k_form"),
    ("top_k", "any"): ("backends.mesh", "mesh_top_k_form"),
    ("unembed", "any"): ("backends.mesh", "mesh_unembed_form"),
    ("verify", "cuda"): ("backends.gpu.verify", "verify_form"),
    # Forms in which models write calls of tools.
    ("tool calls", "hermes"): ("tool_calls.hermes_call", "HERMES"),
    ("tool calls", "llama3_json"): ("tool_calls.llama_call", "LLAMA3_JSON"),
    ("tool calls", "qwen3_coder"): ("tool_calls.qwen3_coder_call", "QWEN3_CODER"),
    ("tool calls", "gemma4"): ("tool_calls.gemma_call", "GEMMA4"),
    ("tool calls", "harmony"): ("tool_calls.harmony", "HARMONY"),
    ("tool calls", "glm45"): ("tool_calls.glm_call", "GLM45"),
    # Families by model_type.
    ("family", "apertus"): ("families.apertus", "FAMILY"),
    ("family", "arcee"): ("families.llama", "ARCEE"),
    ("family", "bamba"): ("families.bamba", "FAMILY"),
    ("family", "bitnet"): ("families.bitnet", "FAMILY"),
    ("family", "cohere2"): ("families.cohere2", "FAMILY"),
    ("family", "deepseek_v2"): ("families.deepseek", "DEEPSEEK_V2"),
    ("family", "deepseek_v3"): ("families.deepseek", "DEEPSEEK_V3"),
    ("family", "dots1"): ("families.dots1", "FAMILY"),
    ("family", "ernie4_5"): ("families.ernie4_5", "ERNIE4_5"),
    ("family", "ernie4_5_moe"): ("families.ernie4_5", "MOE"),
    ("family", "exaone4"): ("families.exaone4", "FAMILY"),
    ("family", "falcon_h1"): ("families.falcon_h1", "FAMILY"),
    ("family", "gemma"): ("families.gemma", "GEMMA"),
    ("family", "gemma2"): ("families.gemma", "GEMMA2"),
    ("family", "gemma3_text"): ("families.gemma", "GEMMA3"),
    ("family", "gemma4_text"): ("families.gemma4", "FAMILY"),
    ("family", "gemma4_unified_text"): ("families.gemma4", "UNIFIED"),
    ("family", "glm"): ("families.glm", "GLM"),
    ("family", "glm4"): ("families.glm", "GLM4"),
    ("family", "glm4_moe"): ("families.glm4_moe", "FAMILY"),
    ("family", "glm4_moe_lite"): ("families.glm4_moe_lite", "FAMILY"),
    ("family", "gpt_oss"): ("families.gpt_oss", "FAMILY"),
    ("family", "granite"): ("families.granite", "FAMILY"),
    ("family", "granitemoehybrid"): ("families.granite_hybrid", "FAMILY"),
    ("family", "granitemoe"): ("families.granite_moe", "MOE"),
    ("family", "granitemoeshared"): ("families.granite_moe", "SHARED"),
    ("family", "hunyuan_v1_dense"): ("families.hunyuan", "DENSE"),
    ("family", "hunyuan_v1_moe"): ("families.hunyuan", "MOE"),
    ("family", "lfm2"): ("families.lfm2", "FAMILY"),
    ("family", "lfm2_moe"): ("families.lfm2_moe", "FAMILY"),
    ("family", "lfm3"): ("families.lfm3", "FAMILY"),
    ("family", "llama"): ("families.llama", "LLAMA"),
    ("family", "mamba2"): ("families.mamba", "FAMILY"),
    ("family", "minimax_m2"): ("families.minimax_m2", "FAMILY"),
    ("family", "minicpm3"): ("families.minicpm3", "FAMILY"),
    ("family", "ministral3"): ("families.llama", "MINISTRAL3"),
    ("family", "mistral"): ("families.llama", "MISTRAL"),
    ("family", "mistral4"): ("families.mistral4", "FAMILY"),
    ("family", "mixtral"): ("families.mixtral", "FAMILY"),
    ("family", "nemotron_h"): ("families.nemotron_h", "FAMILY"),
    ("family", "olmo2"): ("families.olmo", "OLMO2"),
    ("family", "olmo3"): ("families.olmo", "OLMO3"),
    ("family", "olmoe"): ("families.olmo", "OLMOE"),
    ("family", "phi3"): ("families.phi3", "FAMILY"),
    ("family", "qwen2"): ("families.qwen", "QWEN2"),
    ("family", "qwen2_moe"): ("families.qwen", "QWEN2_MOE"),
    ("family", "qwen3"): ("families.qwen", "QWEN3"),
    ("family", "qwen3_5_moe_text"): ("families.hybrids", "QWEN3_5_MOE"),
    ("family", "qwen3_5_text"): ("families.hybrids", "QWEN3_5"),
    ("family", "qwen3_moe"): ("families.qwen", "QWEN3_MOE"),
    ("family", "qwen3_next"): ("families.hybrids", "QWEN3_NEXT"),
    ("family", "seed_oss"): ("families.llama", "SEED_OSS"),
    ("family", "smollm3"): ("families.llama", "SMOLLM3"),
    ("family", "youtu"): ("families.deepseek", "YOUTU"),
}


_HOOKS = {"compiler", "device", "executor", "mesh", "operation"}  # of a platform: kinds that are no registry
_REGISTERED: dict[tuple[str, str], Any] = {}


def names(kind: str) -> list[str]:
    """Returns the names in a registry, without importing their modules."""
    return [name for of_kind, name in (*TABLE, *_REGISTERED) if of_kind == kind]


def register(kind: str, name: str, entry: object) -> None:
    """Adds an entry to a registry, for example a model family or a cache dtype that you wrote.

    So you do not need a fork of this package. `scripts/examples/own_family.py` is an example.

    Args:
        kind: the registry, for example "family", "cache dtype" or "rope". The names of registries are the
            first strings of the keys of `plugins.TABLE`, except the hooks of a platform.
        name: the name of the entry, by which it is found: the `model_type` of a family, or the `rope_type` of
            a RoPE scaling.
        entry: an object like the other entries of that registry.

    Raises:
        InputError: there is no such registry, or it has an entry of this name.
    """
    kinds = sorted({of_kind for of_kind, _ in TABLE} - _HOOKS)
    if kind not in kinds:
        raise InputError(f"there is no registry {format_value(kind)}: use one of {', '.join(kinds)}")
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of an entry must be a text, got {format_value(name)}")
    if name in names(kind):
        raise InputError(f"the registry {kind!r} has {name!r} already: choose another name")
    _REGISTERED[kind, name] = entry
    load.cache_clear()


@functools.cache
def load(kind: str, name: str) -> Any:
    """Returns the entry of that name, or None if there is none, or its module or package is not there."""
    if (kind, name) in _REGISTERED:
        return _REGISTERED[kind, name]
    if (kind, name) not in TABLE:
        return None
    module, *attribute = TABLE[kind, name]
    full = f"{__package__}.{module}"
    try:
        found = import_module(full)
        return getattr(found, attribute[0]) if attribute else found
    except ModuleNotFoundError as error:
        if not f"{full}.".startswith(f"{error.name}."):
            raise
        return None
