"""`enable_export`: lets `jax.export` write programs whose arguments or results are trees of this library.

jax writes the structure of these trees into the file, and asks for a function for each type that it does not
know. The functions here make JSON, so a file that is read can name no code to run.
"""

import dataclasses
import json
from functools import cache
from importlib import import_module
from typing import Any

from jax import export

from .config.model_config import ModelConfig, flatten_config
from .errors import InputError, format_value

# The types of nodes by their modules: all that `jax.tree_util` knows, and the tuples among results.
DATACLASSES = {
    "adapters.adapter": ("Adapter",),
    "cache.contiguous": ("Contiguous",),
    "cache.draft_prefix": ("FeatureRows",),
    "cache.float8_kv": ("Float8KV",),
    "cache.gear": ("GearKV",),
    "cache.latent_kv": ("LatentKV",),
    "cache.kv_cache": ("KVCache",),
    "cache.paged": ("FeaturePages", "Paged", "RoutePages"),
    "cache.quantized_kv": ("QuantizedKV",),
    "cache.ring": ("Ring",),
    "cache.side_by_side": ("SideBySideKV",),
    "draft_heads.draft": ("Draft",),
    "generation.beam_steps": ("BeamState",),
    "generation.draft_state": ("DraftState",),
    "generation.functional": ("Decoded",),
    "generation.scores": ("Scores",),
    "generation.speculation": ("SpeculationState",),
    "generation.state": ("DecodeState",),
    "grammar.automaton": ("Dfa", "Automata"),
    "mixers.recurrent": ("Recurrent",),
    "mixers.short_conv": ("ShortConvCache",),
    "model.taps": ("Tap",),
    "sampling.caller_processors": ("Callers",),
    "sampling.context": ("Context",),
    "sampling.logprobs": ("Alternatives",),
    "sampling.sampling_config": ("SamplingConfig",),
    "weights.adapted_weight": ("AdaptedWeight", "UntiedWeight"),
    "weights.fp8_weight": ("Fp8Weight",),
    "weights.grouped_weight": ("GroupedWeight",),
    "weights.int8_weight": ("Int8Weight",),
    "weights.layers": ("Norm",),
    "weights.mxfp4": ("Mxfp4Weight",),
    "weights.padded_weight": ("PaddedWeight",),
    "weights.ternary": ("TernaryWeight",),
}
NAMED_TUPLES = {
    "adapters.adapter": ("LowRank",),
    "generation.draft_state": ("PrefilledDraft",),
    "generation.rollouts": ("PackedRollout",),
    "generation.state": ("UnreadFeatures",),
    "model.decoder": ("ModelOutput",),
    "sampling.caller_processors": ("SamplingContext",),
    "weights.adapted_weight": ("RowAdapters",),
}
_PACKAGE = __name__.rpartition(".")[0]


@cache
def enable_export() -> None:
    """Lets `jax.export` write and read programs with the pytrees of this library.

    The arguments or results of such a program are parameters, adapters, caches, configs or results. Call the
    function once in the process that calls `Exported.serialize`, and once in the process that calls
    `jax.export.deserialize`. A second call does nothing. For example::

        xj.enable_export()
        blob = jax.export.export(jax.jit(xj.prefill))(*arguments).serialize()

    `serialize` of jax needs the package flatbuffers (`pip install flatbuffers`). It raises `InputError` if an
    argument has a function that you wrote, for example `Tap.edit`. In this case let the exported function
    close over it.
    """
    for module, names in DATACLASSES.items():
        for name in names:
            _register(getattr(import_module(f".{module}", _PACKAGE), name), _encode, _decode)
    for module, names in NAMED_TUPLES.items():
        for name in names:
            kind = getattr(import_module(f".{module}", _PACKAGE), name)
            export.register_namedtuple_serialization(kind, serialized_name=f"{_PACKAGE}.{name}")
    _register(ModelConfig, lambda aux: _encode(aux[0]), lambda data: flatten_config(_decode(data))[1])


def _register(kind: type, encode: Any, decode: Any) -> None:
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"{_PACKAGE}.{kind.__name__}",
        serialize_auxdata=lambda aux: json.dumps(encode(aux)).encode(),
        deserialize_auxdata=lambda data: decode(json.loads(data)),
    )


def _encode(value: Any) -> Any:
    """Returns the static part of a node as JSON: a tuple becomes a list, and other values objects with one
    key.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [*map(_encode, value)]
    if isinstance(value, list):
        return {"list": [*map(_encode, value)]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key), _encode(entry)] for key, entry in value.items()]}
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(f"{_PACKAGE}."):
        fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"dataclass": [f"{kind.__module__}.{kind.__qualname__}", fields]}
    raise InputError(
        f"{format_value(value)} cannot be written by jax.export: let the exported function close over it"
    )


def _decode(data: Any) -> Any:
    """Returns the value that `_encode` encoded."""
    if isinstance(data, list):
        return tuple(map(_decode, data))
    if not isinstance(data, dict):
        return data
    ((tag, content),) = data.items()
    if tag == "list":
        return [*map(_decode, content)]
    if tag == "dict":
        return {_decode(key): _decode(entry) for key, entry in content}
    return _decode_dataclass(*content)


def _decode_dataclass(path: str, fields: dict[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name, None) if module.startswith(f"{_PACKAGE}.") else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InputError(f"this version has no {format_value(path)} of an exported program: export it again")
    return kind(**{key: _decode(entry) for key, entry in fields.items()})
