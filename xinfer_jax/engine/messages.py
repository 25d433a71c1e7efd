"""The classes whose values engines in different processes send to each other, which JSON does not have."""

import base64
import dataclasses
from typing import Any

import jax
import numpy as np

from ..errors import InputError, format_message
from ..generation.options import GenerateOptions
from ..generation.validation import ValidatedCall
from ..grammar.grammars import Grammar
from ..processes.codec import register_class
from ..sampling.sampling_config import SamplingConfig
from .engine_device import NewRow
from .request_options import RequestOptions


class DeviceResult:
    """A result that stays on the devices of all processes between two calls.

    Attributes:
        number: the number of the call that returned it. It stands for the result in a message.
        value: the result of process 0.
    """

    def __init__(self, number: int, value: Any = None):
        self.number = number
        self.value = value


def _encode_array(value: Any) -> list[Any]:
    key = ""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        key = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise TypeError("an array of objects cannot be sent to another process")
    return [key, array.dtype.name, np.shape(value), base64.b64encode(array.tobytes()).decode()]


def _decode_array(data: list[Any]) -> Any:
    (key, dtype, shape, contents) = data
    array: Any = np.frombuffer(base64.b64decode(contents, validate=True), dtype).reshape(shape).copy()
    return jax.random.wrap_key_data(array, impl=key) if key else array


def _encode_fields(value: Any) -> dict[str, Any]:
    """Returns the fields that differ from their default, without a tokenizer, which every process has."""
    defaults = vars(type(value))
    given = vars(value).items()
    return {name: x for name, x in given if x is not defaults.get(name) and name != "tokenizer"}


def _encode_call(call: ValidatedCall) -> list[Any]:
    return [call.prompts, dataclasses.replace(call.options, grammar=None), call.key]


def _decode_call(data: list[Any]) -> ValidatedCall:
    (prompts, options, key) = data
    nothing: Any = None  # every process has the rest
    return ValidatedCall({}, nothing, prompts, options, nothing, key)


register_class(np.generic, np.generic.item, lambda number: number)
register_class(np.ndarray, _encode_array, _decode_array)
register_class(jax.Array, _encode_array, _decode_array)
register_class(BaseException, lambda error: format_message(error) or type(error).__name__, InputError)
register_class(DeviceResult, lambda result: result.number, DeviceResult)
register_class(GenerateOptions, _encode_fields, lambda fields: GenerateOptions(**fields))
register_class(RequestOptions, _encode_fields, lambda fields: RequestOptions(**fields))
register_class(SamplingConfig, _encode_fields, lambda fields: SamplingConfig(**fields))
register_class(Grammar, _encode_fields, lambda fields: Grammar(**fields))
register_class(NewRow, list, lambda fields: NewRow(*fields))
register_class(ValidatedCall, _encode_call, _decode_call)
