"""xinfer_jax: LLM inference as pure functions over a parameter pytree, for JAX.

Names are imported when they are first used: importing the package costs nothing, and a command line can
reject its flags before it imports jax.
"""

from importlib import import_module

TYPE_CHECKING = False  # true for type checkers; importing typing would take most of this import's time
if TYPE_CHECKING:
    from .batch.dataset import DatasetGenerator as DatasetGenerator
    from .batch.run_batch import generate_file as generate_file
    from .cache.kv_cache import KVCache as KVCache, init_cache as init_cache, truncate as truncate
    from .cache.prefix import Prefix as Prefix
    from .cache.prefix_files import load_prefix as load_prefix, save_prefix as save_prefix
    from .checkpoint.loading import Model as Model, load_model as load_model
    from .checkpoint.tokenizer import Tokenizer as Tokenizer
    from .checkpoint.tool_choice import tool_grammar as tool_grammar
    from .config.model_config import ModelConfig as ModelConfig
    from .config.rope import RopeConfig as RopeConfig
    from .embedding import embed_texts as embed_texts
    from .engine.engine import Engine as Engine
    from .engine.engines import Engines as Engines
    from .engine.requests import Answer as Answer, Request as Request
    from .engine.statistics import EngineStats as EngineStats
    from .errors import InputError as InputError
    from .families.reading import from_hf as from_hf
    from .generation.beams import BeamOutput as BeamOutput, beam_search as beam_search
    from .generation.entrypoints import Stream as Stream, generate as generate, stream as stream
    from .generation.functional import (
        Decoded as Decoded,
        decode_loop as decode_loop,
        decode_step as decode_step,
        prefill as prefill,
    )
    from .generation.kernels import kernels_used as kernels_used
    from .generation.options import GenerateOptions as GenerateOptions, GenerateOutput as GenerateOutput
    from .generation.scoring import score as score, score_completions as score_completions
    from .generation.state import DecodeState as DecodeState
    from .grammar.automaton import Dfa as Dfa, dfa as dfa
    from .grammar.grammars import (
        Grammar as Grammar,
        choice as choice,
        json_object as json_object,
        json_schema as json_schema,
        lark as lark,
        regex as regex,
    )
    from .model.decoder import (
        embed_tokens as embed_tokens,
        forward as forward,
        hidden_states as hidden_states,
        unembed as unembed,
    )
    from .sampling.logprobs import TokenLogprobs as TokenLogprobs
    from .sampling.sampling_config import SamplingConfig as SamplingConfig
    from .stats import GenerateStats as GenerateStats, LoadStats as LoadStats
    from .text import (
        TextStream as TextStream,
        alternatives_text as alternatives_text,
        encode_prompt as encode_prompt,
        generate_text as generate_text,
        stream_text as stream_text,
    )
    from .tool_calls.answer_parser import (
        AnswerDelta as AnswerDelta,
        AnswerParser as AnswerParser,
        ParsedAnswer as ParsedAnswer,
        ToolCall as ToolCall,
        parse_tool_calls as parse_tool_calls,
    )
    from .tool_calls.tool_call_parser import ToolCallDelta as ToolCallDelta
    from .weights.layout import shardings as shardings
    from .weights.params import init_params as init_params

__version__: str

_EXPORTS = {
    "generation.beams": ("BeamOutput", "beam_search"),
    "cache.kv_cache": ("KVCache", "init_cache", "truncate"),
    "config.model_config": ("ModelConfig",),
    "generation.functional": ("Decoded", "decode_loop", "decode_step", "prefill"),
    "errors": ("InputError",),
    "families.reading": ("from_hf",),
    "generation.kernels": ("kernels_used",),
    "generation.state": ("DecodeState",),
    "generation.entrypoints": ("Stream", "generate", "stream"),
    "checkpoint.loading": ("Model", "load_model"),
    "sampling.logprobs": ("TokenLogprobs",),
    "embedding": ("embed_texts",),
    "grammar.grammars": ("Grammar", "choice", "json_object", "json_schema", "lark", "regex"),
    "model.decoder": ("embed_tokens", "forward", "hidden_states", "unembed"),
    "generation.options": ("GenerateOptions", "GenerateOutput"),
    "weights.params": ("init_params",),
    "weights.layout": ("shardings",),
    "cache.prefix": ("Prefix",),
    "cache.prefix_files": ("load_prefix", "save_prefix"),
    "config.rope": ("RopeConfig",),
    "grammar.automaton": ("Dfa", "dfa"),
    "sampling.sampling_config": ("SamplingConfig",),
    "generation.scoring": ("score", "score_completions"),
    "stats": ("GenerateStats", "LoadStats"),
    "engine.engine": ("Engine",),
    "engine.engines": ("Engines",),
    "engine.requests": ("Answer", "Request"),
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
    "checkpoint.tokenizer": ("Tokenizer",),
    "checkpoint.tool_choice": ("tool_grammar",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = _version()
        elif name in _MODULE_OF:
            value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # later uses find it directly
        return value


def plugin(kind, name):  # without annotations: what it returns may be anything
    """What `plugins.TABLE` has of this kind and name; None: nothing is plugged in."""
    return import_module(".plugins", __name__).load(kind, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


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
