"""What plugs into the core, by name: the only table, from which a module is imported when it is first used.

The core asks `plugin(kind, name)` (`xinfer_jax/__init__.py`). Operations, dtypes and limits do without where
there is no answer; what a config or an option asks for (linear attention, scaled RoPE, drafts, …) needs one.
"""

import functools
from importlib import import_module
from typing import Any

# (kind, name): module and attribute, or a module.
TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("compiler", "options"): ("ops.cpu.cpu_features", "compiler_options"),
    ("compiler", "ahead"): ("layerwise.precompile", "precompile_once"),
    ("device", "chunk of all rows"): ("device_defaults", "chunk_of_all_rows"),
    ("device", "dtype"): ("device_defaults", "default_dtype"),
    ("device", "memory"): ("memory", "check_memory"),
    ("device", "peak bytes"): ("memory", "peak_memory_bytes"),
    ("executor", "choice"): ("layerwise.layerwise_executor", "layerwise_executor"),
    ("callers", "of a call"): ("sampling.caller_processors", "callers_of_call"),
    ("callers", "guard"): ("sampling.caller_processors", "guarded"),
    ("callers", "start"): ("sampling.caller_processors", "start_rows"),
    ("callers", "stop"): ("sampling.caller_processors", "end_rows"),
    ("processor", "dry"): ("sampling.xtc_dry", "dry"),
    ("processor", "xtc"): ("sampling.xtc_dry", "xtc"),
    ("grammar", "automata"): ("grammar.automaton", "automata_of_call"),
    ("decoding", "draft"): ("generation.drafting", "Drafting"),
    ("cache", "prefix"): ("cache.prefix", "make_prefix"),
    ("cache dtype", "int8"): ("cache.quantized_kv", "INT8"),
    ("cache dtype", "int4"): ("cache.quantized_kv", "INT4"),
    ("cache dtype", "gear"): ("cache.gear", "GEAR"),
    ("cache dtype", "float8_e4m3fn"): ("cache.float8_kv", "FLOAT8_E4M3FN"),
    ("cache form", "side by side"): ("cache.side_by_side", "SideBySideKV"),
    ("layer cache", "linear"): ("cache.recurrent", "Recurrent"),
    ("layers", "free routes"): ("model.routes", "free_routes"),
    ("layers", "packed"): ("model.packing", "packed_positions"),
    ("layers", "routes"): ("model.routes", "routes_of_layers"),
    ("layers", "routes used"): ("model.routes", "routes_used"),
    ("layers", "stacked"): ("model.stacked_layers", "run_stacked_layers"),
    ("layers", "edits"): ("model.taps", "check_edits"),
    ("layers", "tapped"): ("model.taps", "TappedLayers"),
    ("layer", "linear"): ("model.linear_attention", "linear_attention"),
    ("layer params", "linear"): ("weights.linear_attention_specs", "linear_attention_specs"),
    ("layer", "key bias"): ("model.key_bias", "split_key_bias"),
    # RoPE by `rope_type`, other than "default".
    ("rope", "dynamic"): ("model.rope_scaling", "dynamic_rope"),
    ("rope", "linear"): ("model.rope_scaling", "linear_rope"),
    ("rope", "llama3"): ("model.rope_scaling", "llama3_rope"),
    ("rope", "longrope"): ("model.rope_scaling", "longrope"),
    ("rope", "proportional"): ("model.rope_scaling", "proportional_rope"),
    ("rope", "yarn"): ("model.rope_scaling", "yarn_rope"),
    # Over a mesh of devices; operations have more forms for it below.
    ("mesh", "experts"): ("ops.mesh", "mesh_experts"),
    ("mesh", "auto params"): ("sharding", "on_auto_mesh"),
    ("mesh", "explicit axes"): ("ops.auto_axes", "on_auto_axes"),
    ("mesh", "linear"): ("ops.mesh", "summed_linear"),
    ("mesh", "means of squares"): ("ops.mesh", "means_of_squares"),
    ("mesh", "of cache"): ("sharding", "cache_mesh"),
    ("mesh", "of params"): ("sharding", "mesh_of_params"),
    ("mesh", "shard heads"): ("sharding", "constrain_heads"),
    # What quantizes leaves.
    ("leaf", "quantizer"): ("weights.quantization", "quantizer"),
    # How operations get their forms; then the forms of each: for "any" platform, by a "kernel" or by several
    # "kernels", and for a platform.
    ("operation", "choose"): ("ops.forms", "choose"),
    ("operation", "check"): ("ops.forms", "check_available"),
    ("argmax", "cpu"): ("ops.cpu.cpu_sampler", "argmax_form"),
    ("argmax", "kernel"): ("ops.kernels.head", "ARGMAX"),
    ("after_recording", "cuda"): ("ops.gpu.verify", "recording_form"),
    ("apart", "tpu"): ("ops.tpu.tpu_products", "apart_form"),
    ("attention", "cpu"): ("ops.cpu.layer_forms", "attention_form"),
    ("attention", "kernel"): ("ops.kernels.attention_kernels", "ATTENTION"),
    ("causal_attention", "cuda"): ("ops.gpu.cudnn_attention", "cudnn_form"),
    ("products", "kernels"): ("ops.kernels.product_kernels", "products_form"),
    ("float_product", "cpu"): ("ops.cpu.cpu_products", "cpu_float_form"),
    ("float_product", "tpu"): ("ops.tpu.tpu_products", "tpu_float_form"),
    ("delta_step", "kernels"): ("ops.kernels.delta_kernels", "delta_form"),
    ("recurrent_step", "cpu"): ("ops.cpu.layer_forms", "step_form"),
    ("rope_append", "kernels"): ("ops.kernels.append_kernels", "append_form"),
    ("decoder_layer", "any"): ("ops.mesh", "mesh_layer_form"),
    ("embed_tokens", "any"): ("ops.mesh", "mesh_embedding_form"),
    ("embedding", "cpu"): ("ops.cpu.cpu_products", "embedding_form"),
    ("embedding", "tpu"): ("ops.tpu.tpu_embedding", "tpu_embedding_form"),
    ("expert_at", "any"): ("ops.cpu.layer_forms", "expert_at_form"),
    ("experts", "gradient"): ("ops.expert_tiles", "with_tiled_gradient"),
    ("experts", "cpu"): ("ops.cpu.layer_forms", "experts_form"),
    ("experts", "kernel"): ("ops.kernels.expert_kernels", "EXPERTS"),
    ("choose_tokens", "cpu"): ("ops.cpu.cpu_sampler", "grouped_choice_form"),
    ("choose_tokens", "cuda"): ("ops.gpu.gpu_sampler", "choice_form"),
    ("known_logsumexp", "cuda"): ("ops.gpu.gpu_sampler", "known_form"),
    ("logsumexp", "cuda"): ("ops.gpu.gpu_sampler", "logsumexp_form"),
    ("route", "kernel"): ("ops.kernels.expert_kernels", "ROUTE"),
    ("sample_from_hidden", "kernels"): ("ops.kernels.head", "sampling_form"),
    ("sample_rows", "any"): ("ops.mesh", "mesh_sampling_form"),
    ("sampled_from", "cuda"): ("ops.gpu.gpu_sampler", "sampled_from_form"),
    ("threshold", "cuda"): ("ops.gpu.reductions", "threshold_form"),
    ("top_k", "cuda"): ("ops.gpu.top_k", "gpu_top_k_form"),
    ("top_k", "any"): ("ops.mesh", "mesh_top_k_form"),
    ("unembed", "any"): ("ops.mesh", "mesh_unembed_form"),
    ("verify", "cuda"): ("ops.gpu.verify", "verify_form"),
    # Families by model_type.
    ("family", "arcee"): ("families.llama", "ARCEE"),
    ("family", "bitnet"): ("families.bitnet", "FAMILY"),
    ("family", "exaone4"): ("families.exaone4", "FAMILY"),
    ("family", "gemma"): ("families.gemma", "GEMMA"),
    ("family", "gemma2"): ("families.gemma", "GEMMA2"),
    ("family", "gemma3_text"): ("families.gemma", "GEMMA3"),
    ("family", "gemma4_text"): ("families.gemma4", "FAMILY"),
    ("family", "gemma4_unified_text"): ("families.gemma4", "UNIFIED"),
    ("family", "gpt_oss"): ("families.gpt_oss", "FAMILY"),
    ("family", "granite"): ("families.granite", "FAMILY"),
    ("family", "llama"): ("families.llama", "LLAMA"),
    ("family", "ministral3"): ("families.llama", "MINISTRAL3"),
    ("family", "mistral"): ("families.llama", "MISTRAL"),
    ("family", "mixtral"): ("families.mixtral", "FAMILY"),
    ("family", "olmo2"): ("families.olmo", "OLMO2"),
    ("family", "olmo3"): ("families.olmo", "OLMO3"),
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
}


def names(kind: str) -> list[str]:
    """What the table has of a kind, without importing it."""
    return [name for of_kind, name in TABLE if of_kind == kind]


@functools.cache
def load(kind: str, name: str) -> Any:
    """The attribute that the table names; None where it names none, or its module or package is not there."""
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
