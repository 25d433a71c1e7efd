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
    ("cache dtype", "int8"): ("cache.quantized_kv", "INT8"),
    ("cache dtype", "int4"): ("cache.quantized_kv", "INT4"),
    ("cache dtype", "gear"): ("cache.gear", "GEAR"),
    ("cache dtype", "float8_e4m3fn"): ("cache.float8_kv", "FLOAT8_E4M3FN"),
    ("cache form", "side by side"): ("cache.side_by_side", "SideBySideKV"),
    ("layer cache", "linear"): ("cache.recurrent", "Recurrent"),
    ("layer", "linear"): ("model.linear_attention", "linear_attention"),
}


def names(kind: str) -> list[str]:
    """What the table has of a kind, without importing it."""
    return [name for of_kind, name in TABLE if of_kind == kind]


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
