"""Messages of process 0 to the other processes, as JSON. Only a closed set of types is sent, and each is
decoded by code named here: a received message cannot choose other code to run.

None, bools, numbers, strings, lists; {"map": pairs}, {"array": …}, {"key": …}, {"kept": number}, {"call": …},
{class: fields}
"""

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..generation.options import GenerateOptions
from ..generation.validation import ValidatedCall
from ..grammar.grammars import Grammar
from ..sampling.sampling_config import SamplingConfig
from .request_options import RequestOptions

_SIMPLE = frozenset({type(None), bool, int, float, str})  # types that JSON has
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64",
}  # fmt: skip
_KEYS = {"threefry2x32", "rbg", "unsafe_rbg"}
_CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (GenerateOptions, RequestOptions, SamplingConfig, Grammar)
}
_OMITTED = "tokenizer"  # a field of `Grammar` that every process has


class ResultReference(NamedTuple):
    """Stands for the result of the call of this number, which every process keeps on its devices."""

    number: int


def encode_message(value: Any) -> bytes:
    """A value as bytes. Raises TypeError for a type that is not listed above."""
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode_message(data: bytes, config: ModelConfig | None = None) -> Any:
    """The value that `encode_message` encoded; tuples and sets become lists, and a `ValidatedCall` has what
    `Device.new_row` uses. Raises InputError for other data. config: of the model, for a `ValidatedCall`.
    """
    try:
        return _from_json(json.loads(data), config)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"a message of process 0 cannot be decoded: {error}") from error


def _to_json(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, ResultReference):
        return {"kept": value.number}
    if isinstance(value, ValidatedCall):
        options = dataclasses.replace(value.options, grammar=None)
        return {"call": [value.prompts, _to_json(options), _to_json(value.key)]}
    if (name := type(value).__name__) in _CLASSES:
        defaults = vars(type(value))
        given = {field: x for field, x in vars(value).items() if x is not defaults.get(field)}
        return {name: {field: _to_json(x) for field, x in given.items() if field != _OMITTED}}
    if isinstance(value, list | tuple | range | set | frozenset):
        return list(value) if _SIMPLE.issuperset(map(type, value)) else [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": [[_to_json(name), _to_json(item)] for name, item in value.items()]}
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": [str(jax.random.key_impl(value)), _to_json(np.asarray(jax.random.key_data(value)))]}
    if isinstance(value, np.ndarray | jax.Array) and np.dtype(value.dtype).name in _DTYPES:
        array = np.ascontiguousarray(value)
        contents = base64.b64encode(array.tobytes()).decode()
        return {"array": [array.dtype.name, list(np.shape(value)), contents]}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _from_json(value: Any, config: ModelConfig | None) -> Any:
    if isinstance(value, list):
        simple = _SIMPLE.issuperset(map(type, value))
        return value if simple else [_from_json(item, config) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "map":
        return {_from_json(name, config): _from_json(item, config) for name, item in content}
    if kind == "kept":
        return ResultReference(int(content))
    if kind == "array":
        dtype, shape, contents = content
        data = base64.b64decode(contents, validate=True)
        return np.frombuffer(data, _check_known(_DTYPES, dtype)).reshape(shape).copy()
    if kind == "key":
        data = _from_json(content[1], config)
        return jax.random.wrap_key_data(data, impl=_check_known(_KEYS, content[0]))
    if kind == "call":
        if config is None:
            raise ValueError("a call needs the model's configuration")
        prompts, options, key = content
        nothing: Any = None  # follows from the options
        decoded = _from_json(options, config), nothing, _from_json(key, config)
        return ValidatedCall({}, config, prompts, *decoded)
    fields = {name: _from_json(x, config) for name, x in content.items() if name != _OMITTED}
    return _CLASSES[kind](**fields)


def _check_known(known: set[str], name: Any) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(sorted(known))}")
    return name
