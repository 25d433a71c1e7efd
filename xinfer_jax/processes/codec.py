"""Messages between processes as JSON. Every class that is sent has a function that makes its values, so a
received message cannot choose other code to run.

None, bools, numbers, texts and lists have their form of JSON. A dict is {"map": [[key, value], …]}, and
another value is {class: data}.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError

_SIMPLE = frozenset({type(None), bool, int, float, str})  # types that JSON has
_LISTS = frozenset({list, tuple, range, set, frozenset})  # types that become lists
_encoders = dict[type, Callable[[Any], Any]]()
_decoders: dict[str, Callable[[Any], Any]] = {"map": dict}


def register_class(cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Lets values of a class be sent. encode: makes data of a value. decode: makes the value of data."""
    _encoders[cls] = encode
    _decoders[cls.__name__] = decode


def encode_message(value: Any) -> bytes:
    """Returns a value as bytes. Raises TypeError for a type that cannot be sent."""
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode_message(data: bytes) -> Any:
    """Returns the value that `encode_message` encoded. Tuples and sets become lists. Raises InputError for
    other data.
    """
    try:
        return json.loads(data, object_hook=_untagged)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"a message of another process cannot be decoded: {error}") from error


def _tagged(value: Any) -> Any:
    if type(value) in _SIMPLE:
        return value
    if type(value) in _LISTS:
        return list(value) if _SIMPLE.issuperset(map(type, value)) else [_tagged(item) for item in value]
    for cls, encode in _encoders.items():
        if isinstance(value, cls):
            return {cls.__name__: _tagged(encode(value))}
    if isinstance(value, tuple):
        return _tagged(list(value))
    if isinstance(value, Mapping):
        return {"map": [[_tagged(name), _tagged(item)] for name, item in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _untagged(tagged: dict[str, Any]) -> Any:
    ((name, data),) = tagged.items()
    return _decoders[name](data)
