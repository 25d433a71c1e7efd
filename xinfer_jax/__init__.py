"""xinfer_jax: LLM inference as pure functions over a parameter pytree, for JAX.

Names are imported when first used: commands reject flags before they import jax. Types: `__init__.pyi`.
"""

from importlib import import_module

_EXPORTS = {
    "adapters.adapted_params": ("merge_adapter", "split_adapter", "with_adapter", "with_adapters"),
    "adapters.adapter": ("Adapter", "LowRank", "init_adapter"),
    "adapters.peft_files": ("load_adapter", "save_adapter"),
    "generation.beams": ("BeamOutput", "beam_search"),
    "cache.kv_cache": ("KVCache", "init_cache"),
    "config.model_config": ("ModelConfig",),
    "generation.functional": ("Decoded", "decode_loop", "decode_step", "prefill"),
    "errors": ("InputError",),
    "families.reading": ("from_hf",),
    "families.conversion": ("ParamName", "param_names", "params_from_tensors", "params_to_tensors"),
    "generation.rollouts": ("PackedRollout", "continue_rows", "pack_rollout", "repeat_rows"),
    "backends.kernel_report": ("kernels_used",),
    "generation.state": ("DecodeState",),
    "generation.entrypoints": ("generate",),
    "generation.streaming": ("Stream", "stream"),
    "checkpoint.loading": ("LoadStats", "Model", "load_model"),
    "checkpoint.saving": ("save_model",),
    "sampling.logprobs": ("TokenLogprobs",),
    "embedding": ("embed_texts",),
    "reranking": ("rerank",),
    "grammar.grammars": ("Grammar", "choice", "json_object", "json_schema", "lark", "regex"),
    "model.taps": ("Tap",),
    "model.attention_maps": ("attention_weights",),
    "model.decoder": ("ModelOutput", "forward", "run_model", "unembed"),
    "model.forward_parts": ("embed_tokens", "final_norm", "hidden_states"),
    "generation.options": ("GenerateOptions", "GenerateOutput"),
    "plugins": ("register",),
    "weights.initialization": ("init_params",),
    "weights.dequantization": ("dequantize",),
    "weights.layout": ("shardings",),
    "weights.resharding": ("reshard",),
    "weights.stacking": ("stack_layers", "unstack_layers"),
    "cache.prefix": ("Prefix",),
    "cache.prefix_files": ("load_prefix", "save_prefix"),
    "cache.truncation": ("truncate",),
    "config.rope": ("RopeConfig",),
    "grammar.automaton": ("Dfa", "dfa"),
    "sampling.sampling_config": ("SamplingConfig",),
    "sampling.caller_processors": ("Processor", "SamplingContext"),
    "generation.scoring": ("Scores", "map_logits", "score", "score_completions"),
    "stats": ("GenerateStats",),
    "engine.async_sampling": ("SampleOutput",),
    "engine.engine": ("Engine",),
    "engine.engine_options": ("EngineOptions",),
    "engine.engines": ("Engines",),
    "engine.answers": ("Answer",),
    "engine.request_options": ("RequestOptions",),
    "engine.requests": ("Request",),
    "engine.statistics": ("EngineStats",),
    "batch.dataset": ("DatasetGenerator",),
    "batch.run_batch": ("generate_file",),
    "text": ("TextStream", "alternatives_text", "encode_prompt", "generate_text", "stream_text"),
    "tool_calls.answer_parser": (
        "AnswerDelta",
        "AnswerParser",
        "ParsedAnswer",
        "ToolCall",
        "parse_tool_calls",
    ),
    "tool_calls.tool_call_parser": ("ToolCallDelta",),
    "tokenization.tokenizer": ("Tokenizer",),
    "tokenization.tool_choice": ("tool_grammar",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name == "__version__":
        value = _version()
    elif name in _MODULE_OF:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name == "testing":
        value = import_module(".testing", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later uses find it directly
    return value


def plugin(kind, name):  # without annotations: what it returns may be anything
    """What `plugins.TABLE` has of this kind and name; None: nothing is plugged in."""
    return import_module(".plugins", __name__).load(kind, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing", "__version__"})


def _version() -> str:
    """Returns the installed version, or that of pyproject.toml in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    try:
        return version("xinfer-jax")
    except PackageNotFoundError:
        import tomllib

        file = Path(__file__).parents[1] / "pyproject.toml"
        settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        project = settings.get("project", {})
        return project["version"] if project.get("name") == "xinfer-jax" else "0+unknown"
