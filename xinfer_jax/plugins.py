"""What plugs into the core, by name: the only table, from which a module is imported when it is first used.

The core asks `plugin(kind, name)` (`xinfer_jax/__init__.py`) and does without where there is no answer.
"""

import functools
from importlib import import_module
from typing import Any

# (kind, name): module and attribute.
TABLE = {
    ("compiler", "options"): ("weights.cpu_features", "compiler_options"),
    ("compiler", "ahead"): ("layerwise.precompile", "precompile_once"),
    ("compiler", "dry run"): ("layerwise.precompile", "Precompiler"),
    ("runner", "choice"): ("layerwise.runner", "layerwise_runner"),
    ("decoding", "draft"): ("generation.drafting", "Drafting"),
    ("cache", "prefix"): ("cache.prefix", "make_prefix"),
    ("family", "bitnet"): ("families.bitnet", "FAMILY"),
    ("family", "gemma2"): ("families.gemma2", "FAMILY"),
    ("family", "gemma3_text"): ("families.gemma3", "FAMILY"),
    ("family", "gemma4_text"): ("families.gemma4", "FAMILY"),
    ("family", "gpt_oss"): ("families.gpt_oss", "FAMILY"),
    ("family", "llama"): ("families.llama", "FAMILY"),
    ("family", "mistral"): ("families.mistral", "FAMILY"),
    ("family", "olmo2"): ("families.olmo2", "FAMILY"),
    ("family", "olmo3"): ("families.olmo3", "FAMILY"),
    ("family", "phi3"): ("families.phi3", "FAMILY"),
    ("family", "qwen2"): ("families.qwen2", "FAMILY"),
    ("family", "qwen3"): ("families.qwen3", "FAMILY"),
    ("family", "qwen3_5_moe_text"): ("families.qwen3_5", "MOE"),
    ("family", "qwen3_5_text"): ("families.qwen3_5", "DENSE"),
    ("family", "qwen3_moe"): ("families.qwen3_moe", "FAMILY"),
    ("family", "qwen3_next"): ("families.qwen3_next", "FAMILY"),
    ("family", "smollm3"): ("families.smollm3", "FAMILY"),
}


@functools.cache
def load(kind: str, name: str) -> Any:
    """The attribute that the table names; None where it names none, or its module is not installed."""
    if (kind, name) not in TABLE:
        return None
    module, attribute = TABLE[kind, name]
    full = f"{__package__}.{module}"
    try:
        return getattr(import_module(full), attribute)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        return None
