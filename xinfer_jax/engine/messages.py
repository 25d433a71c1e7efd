"""What process 0 tells the other processes, as JSON: a closed set of values, each decoded by a constructor
that is named here. Nothing that is received chooses code to run.

None, bools, numbers, texts, lists; {"map": pairs}, {"array": …}, {"key": …}, {"kept": number}, {"call": …}
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
from ..generation.options import Call, GenerateOptions
from ..sampling.settings import SamplingConfig

_SIMPLE = frozenset({type(None), bool, int, float, str})  # that JSON has
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64",
}  # fmt: skip
_KEYS = {"threefry2x32", "rbg", "unsafe_rbg"}
_IDS = ("allowed_token_ids", "forbidden_token_ids")
_OTHERS = ("logit_bias", "bad_words_ids")
_SETTINGS = [f.name for f in dataclasses.fields(SamplingConfig) if f.name not in (*_IDS, *_OTHERS)]


class Kept(NamedTuple):
    """What the call of this number gave, which every process keeps on its devices."""

    number: int


def encode(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: it is of another type than those above.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes, config: ModelConfig | None = None) -> Any:
    """What `encode` was given; tuples are lists, and a `Call` has no parameters.

    Args:
        data: from `encode`.
        config: of the model, for calls.

    Raises:
        InputError: it is nothing that `encode` gives.
    """
    try:
        return _value(json.loads(data), config)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"a message of process 0 cannot be understood: {error}") from error


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Kept):
        return {"kept": value.number}
    if isinstance(value, Call):
        return {"call": _plain_call(value)}
    if isinstance(value, list | tuple | range):
        return list(value) if _SIMPLE.issuperset(map(type, value)) else [_plain(one) for one in value]
    if isinstance(value, dict):
        return {"map": [[_plain(name), _plain(one)] for name, one in value.items()]}
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": [str(jax.random.key_impl(value)), _plain(np.asarray(jax.random.key_data(value)))]}
    if isinstance(value, np.ndarray | jax.Array) and np.dtype(value.dtype).name in _DTYPES:
        array = np.ascontiguousarray(value)
        numbers = base64.b64encode(array.tobytes()).decode()
        return {"array": [array.dtype.name, list(np.shape(value)), numbers]}
    raise TypeError(f"{type(value).__name__} cannot be told to another process")


def _value(said: Any, config: ModelConfig | None) -> Any:
    """What `_plain` was given."""
    if isinstance(said, list):
        return said if _SIMPLE.issuperset(map(type, said)) else [_value(one, config) for one in said]
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    if kind == "map":
        return {_value(name, config): _value(one, config) for name, one in content}
    if kind == "kept":
        return Kept(int(content))
    if kind == "array":
        return _array(*content)
    if kind == "key":
        return jax.random.wrap_key_data(_value(content[1], config), impl=_one_of(_KEYS, content[0]))
    _one_of({"call"}, kind)
    return _call(content, config)


def _array(dtype: str, shape: list[int], numbers: str) -> np.ndarray:
    data = base64.b64decode(numbers, validate=True)
    return np.frombuffer(data, _one_of(_DTYPES, dtype)).reshape(shape).copy()


def _one_of(known: set[str], name: Any) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(sorted(known))}")
    return name


def _plain_call(call: Call) -> dict[str, Any]:
    """What `Device.row` takes of a call; the model's parameters and configuration are everywhere."""
    options = call.options
    given: Any = options.sampling if isinstance(options.sampling, list | tuple) else [options.sampling]
    return dict(
        prompts=call.prompts, max_new_tokens=options.max_new_tokens, logprobs=options.logprobs,
        eos_token_ids=_plain(options.eos_token_ids), stop_token_ids=_plain(options.stop_token_ids),
        sampling=[_plain_sampling(one) for one in given],
    )  # fmt: skip


def _plain_sampling(sampling: SamplingConfig) -> dict[str, Any]:
    numbers = {name: getattr(sampling, name) for name in _SETTINGS}
    settings = {name: None if x is None else np.asarray(x).item() for name, x in numbers.items()}
    for name in _IDS:
        ids = getattr(sampling, name)
        settings[name] = None if ids is None else [int(i) for i in ids]
    bias = sampling.logit_bias
    if isinstance(bias, Mapping):
        bias = {int(i): float(x) for i, x in bias.items()}
    elif bias is not None:
        bias = np.asarray(bias, np.float32)
    words = sampling.bad_words_ids
    if words is not None and not isinstance(words, np.ndarray | jax.Array):
        words = [[int(i) for i in word] for word in words]
    return settings | dict(logit_bias=_plain(bias), bad_words_ids=_plain(words))


def _call(said: dict[str, Any], config: ModelConfig | None) -> Call:
    if config is None:
        raise ValueError("a call needs the model's configuration")
    sampling = [_sampling(one) for one in said["sampling"]]
    eos = said["eos_token_ids"]
    options = GenerateOptions(
        int(said["max_new_tokens"]), sampling, None if eos is None else tuple(eos),
        stop_token_ids=tuple(said["stop_token_ids"]), logprobs=int(said["logprobs"]),
    )  # fmt: skip
    nothing: Any = None  # the key stands beside it, and of its sampling every process makes arrays
    return Call({}, config, said["prompts"], options, nothing, nothing)


def _sampling(said: dict[str, Any]) -> SamplingConfig:
    settings = {name: said[name] for name in (*_SETTINGS, *_IDS)}
    return SamplingConfig(**settings, **{name: _value(said[name], None) for name in _OTHERS})
