"""Messages of process 0 to the other processes, as JSON. Only a closed set of types is sent, and each is
decoded by code named here: a received message cannot choose other code to run.

None, bools, numbers, strings, lists; {"map": pairs}, {"array": …}, {"key": …}, {"kept": number}, {"call": …},
{"options": …}
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

_SIMPLE = frozenset({type(None), bool, int, float, str})  # types that JSON has
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64",
}  # fmt: skip
_KEYS = {"threefry2x32", "rbg", "unsafe_rbg"}
_IDS = ("allowed_token_ids", "forbidden_token_ids")
_OTHERS = ("logit_bias", "bad_words_ids")
_SETTINGS = [f.name for f in dataclasses.fields(SamplingConfig) if f.name not in (*_IDS, *_OTHERS)]


class ResultReference(NamedTuple):
    """Stands for the result of the call of this number, which every process keeps on its devices."""

    number: int


def encode_message(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: a value of a type that is not listed above.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode_message(data: bytes, config: ModelConfig | None = None) -> Any:
    """The value that `encode_message` encoded; tuples become lists, and a `ValidatedCall` has no parameters.

    Args:
        data: from `encode_message`.
        config: of the model, for a `ValidatedCall`.

    Raises:
        InputError: data that `encode_message` does not return.
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
        return {"call": _call_to_json(value)}
    if isinstance(value, GenerateOptions):
        return {"options": _options_to_json(value)}
    if isinstance(value, list | tuple | range):
        return list(value) if _SIMPLE.issuperset(map(type, value)) else [_to_json(item) for item in value]
    if isinstance(value, dict):
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
        return _array(*content)
    if kind == "key":
        data = _from_json(content[1], config)
        return jax.random.wrap_key_data(data, impl=_check_known(_KEYS, content[0]))
    if kind == "options":
        return _options_from_json(content)
    _check_known({"call"}, kind)
    return _call_from_json(content, config)


def _array(dtype: str, shape: list[int], contents: str) -> np.ndarray:
    """The array whose contents in base64 these are."""
    data = base64.b64decode(contents, validate=True)
    return np.frombuffer(data, _check_known(_DTYPES, dtype)).reshape(shape).copy()


def _check_known(known: set[str], name: Any) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(sorted(known))}")
    return name


def _call_to_json(call: ValidatedCall) -> dict[str, Any]:
    """The part of a call that `Device.new_row` uses; every process has parameters and configuration."""
    return dict(prompts=call.prompts, **_common_options(call.options))


def _common_options(options: GenerateOptions) -> dict[str, Any]:
    sampling: Any = options.sampling if isinstance(options.sampling, list | tuple) else [options.sampling]
    return dict(
        max_new_tokens=options.max_new_tokens, logprobs=options.logprobs,
        eos_token_ids=_to_json(options.eos_token_ids), stop_token_ids=_to_json(options.stop_token_ids),
        sampling=[_sampling_to_json(one) for one in sampling],
    )  # fmt: skip


def _options_to_json(options: GenerateOptions) -> dict[str, Any]:
    """The options of a request to an engine; its grammar without a tokenizer, which every process has."""
    grammar: Any = options.grammar
    if grammar is not None and not isinstance(grammar, Grammar):
        raise TypeError(f"{type(grammar).__name__} cannot be sent to another process")
    parts = grammar and [grammar.kind, grammar.source, grammar.reasoning_end]
    more = dict(n=options.n, best_of=options.best_of, stop_strings=list(options.stop_strings), grammar=parts)
    return _common_options(options) | more


def _options_from_json(fields: dict[str, Any]) -> GenerateOptions:
    parts = fields["grammar"]
    return dataclasses.replace(
        _common_from_json(fields), n=int(fields["n"]), best_of=fields["best_of"],
        stop_strings=tuple(fields["stop_strings"]),
        grammar=parts and Grammar(parts[0], parts[1], None, parts[2]),
    )  # fmt: skip


def _sampling_to_json(sampling: SamplingConfig) -> dict[str, Any]:
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
    return settings | dict(logit_bias=_to_json(bias), bad_words_ids=_to_json(words))


def _call_from_json(fields: dict[str, Any], config: ModelConfig | None) -> ValidatedCall:
    if config is None:
        raise ValueError("a call needs the model's configuration")
    options = _common_from_json(fields)
    # The key is sent beside the call, and every process makes the arrays of its settings itself.
    nothing: Any = None
    return ValidatedCall({}, config, fields["prompts"], options, nothing, nothing)


def _common_from_json(fields: dict[str, Any]) -> GenerateOptions:
    sampling = [_sampling_from_json(one) for one in fields["sampling"]]
    eos = fields["eos_token_ids"]
    return GenerateOptions(
        int(fields["max_new_tokens"]), sampling, None if eos is None else tuple(eos),
        stop_token_ids=tuple(fields["stop_token_ids"]), logprobs=int(fields["logprobs"]),
    )  # fmt: skip


def _sampling_from_json(fields: dict[str, Any]) -> SamplingConfig:
    settings = {name: fields[name] for name in (*_SETTINGS, *_IDS)}
    return SamplingConfig(**settings, **{name: _from_json(fields[name], None) for name in _OTHERS})
