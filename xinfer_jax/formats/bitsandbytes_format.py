"""Matrices of bitsandbytes: NF4 and FP4 (QLoRA, Dettmers et al. 2023), and int8 (LLM.int8(), 2022).

In 4 bits X.weight has two numbers in a byte, the first in its upper half, row after row: indices of
X.weight.quant_map. X.weight.absmax scales blocks of 64 neighbours, also across rows. If it is quantized too
(nested), it is an index of X.weight.nested_quant_map, scaled by X.weight.nested_absmax, plus an offset.
X.weight.quant_state.bitsandbytes__nf4 is JSON with the rest. In int8 X.SCB has 127 times the scale of each
output.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, format_value
from .kept_leaves import whole_numbers_form
from .scaled_tensor import MatrixFormat, Read, ScaledNumbers, ScaledTensor, read_bytes
from .tensors import DTYPES, Require, Shape, StoredTensor, Tensors, TensorSpec

_KINDS = ("nf4", "fp4")
_LOAD_IN = ("load_in_4bit", "load_in_8bit")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_ROUNDED = dict(float32="F32", float16="F16", bfloat16="BF16")  # types of floats, by torch's names
_STORAGE = {"U8", "I8", "F16", "BF16", "F32"}  # types in which bytes are stored: `bnb_4bit_quant_storage`
_FLOATS = {"F32", "F16", "BF16"}
_INT8 = np.arange(256).astype(np.uint8).view(np.int8)[:, None]
_LONGEST = 1 << 12  # bytes of JSON


class _State(NamedTuple):
    """The content of the JSON of a matrix."""

    block: int  # numbers that share a scale
    dtype: Any  # to which dequantized numbers are rounded
    nested_block: int  # scales that share a scale; 0: they are not quantized
    offset: np.float32  # of quantized scales


@dataclasses.dataclass(frozen=True)
class BitsAndBytesFormat(MatrixFormat):
    method = "bitsandbytes"
    methods = (method,)
    stays_quantized: bool = False  # those in int8 can

    @classmethod
    def find_settings(cls, settings: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        config = settings.get("quantization_config") or {}  # as older versions wrote it
        is_own = isinstance(config, Mapping) and config.keys() & {*_LOAD_IN}
        return {**config, "quant_method": cls.method} if is_own else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "BitsAndBytesFormat":
        """Returns the format. The tensors show the other settings."""
        for name in _LOAD_IN:
            require(config.get(name) in (None, True, False), name)
        return cls(stays_quantized=config.get("load_in_8bit") is True)

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        by_block = (name.removesuffix(".absmax") for name in tensors if name.endswith(".weight.absmax"))
        by_output = (f"{name.removesuffix('SCB')}weight" for name in tensors if name.endswith(".SCB"))
        return dict.fromkeys((*by_block, *by_output), (0, 0))

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        if (scale := _int8_scale(name)) in tensors:
            return {name: (shape, {"I8"}), scale: (shape[:1], _FLOATS)}
        blob = _state_name(name, tensors)
        state = _read_state(name, shape, tensors)
        stored = tensors.get(name)
        size = stored.struct.dtype.itemsize if stored and stored.type in _STORAGE else 1
        blocks = -(-math.prod(shape) // state.block)
        specs: dict[str, TensorSpec] = {
            name: ((-(-math.prod(shape) // (2 * size)), 1), _STORAGE),
            blob: (tensors[blob].shape, {"U8"}),
            f"{name}.quant_map": ((16,), {"F32"}),
            f"{name}.absmax": ((blocks,), {"U8" if state.nested_block else "F32"}),
        }
        if state.nested_block:
            specs[f"{name}.nested_absmax"] = ((-(-blocks // state.nested_block),), {"F32"})
            specs[f"{name}.nested_quant_map"] = ((256,), {"F32"})
        return specs

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        matrix = (shape[0], shape[1])
        is_int8 = _int8_scale(name) in tensors
        return ScaledTensor((_int8_numbers if is_int8 else _numbers_of_4_bits)(name, matrix, tensors), shape)

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        """Returns True for the layout of an int8 matrix. Only layout by rows is known."""
        if not name.endswith(".weight_format") or tensors[name].type != "U8":
            return False
        if tensors[name].array().any():
            raise InputError(
                f"{name} is another layout than rows (0): load the checkpoint with a recent version of"
                " bitsandbytes, and save it again"
            )
        return True


def _int8_scale(name: str) -> str:
    return f"{name.removesuffix('weight')}SCB"


def _state_name(name: str, tensors: Tensors) -> str:
    names = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
    return next((x for x in names if x in tensors), names[0])


def _read_state(name: str, shape: Shape, tensors: Tensors) -> _State:
    """Returns the JSON of a matrix. Raises InputError."""
    blob = _state_name(name, tensors)
    if blob not in tensors:
        raise InputError(f"{blob} is missing: fetch the checkpoint again")
    stored = tensors[blob]
    try:
        if stored.type != "U8" or stored.shape != (min(stored.shape[0], _LONGEST),):
            raise ValueError(f"{stored.type} {list(stored.shape)}")
        found = json.loads(stored.array().tobytes())
        is_nested = f"{name}.nested_absmax" in tensors
        state = _State(
            found["blocksize"], np.dtype(DTYPES[_ROUNDED[found["dtype"]]]),
            found["nested_blocksize"] if is_nested else 0,
            np.float32(found["nested_offset"] if is_nested else 0),
        )  # fmt: skip
        if state.block not in _BLOCKS or is_nested and state.nested_block not in _BLOCKS:
            raise ValueError(f"blocksize {state.block}")
        if list(found["shape"]) != list(shape):
            raise ValueError(f"shape {format_value(found['shape'])} and not {list(shape)}")
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise InputError(f"{blob} does not describe the matrix: {type(error).__name__}: {error}") from error
    return state


def _int8_numbers(name: str, shape: tuple[int, int], tensors: Tensors) -> ScaledNumbers:
    stored = tensors[_int8_scale(name)]

    def scales(rows: slice, _: slice) -> np.ndarray:
        return (stored[rows].astype(np.float32) * np.float32(1 / 127))[:, None]

    read = read_bytes(tensors[name], _INT8)
    return ScaledNumbers(name, shape, (1, shape[1]), read, scales, kept=whole_numbers_form, bits=8)


def _numbers_of_4_bits(name: str, shape: tuple[int, int], tensors: Tensors) -> ScaledNumbers:
    state = _read_state(name, shape, tensors)
    quant_map = tensors[f"{name}.quant_map"].array()
    if not np.isfinite(quant_map).all():
        raise InputError(f"{name}.quant_map holds NaN or inf: fetch the checkpoint again")
    (outputs, inputs) = shape
    J = math.gcd(inputs, state.block)

    def scales(rows: slice, groups: slice) -> np.ndarray:
        first_R = np.arange(rows.start, rows.stop)[:, None] * inputs
        block_RQ = (first_R + np.arange(groups.start, groups.stop) * J) // state.block
        first = block_RQ[0, 0]
        return _scales(name, state, tensors, slice(first, block_RQ[-1, -1] + 1))[block_RQ - first]

    read = _read_pairs(tensors[name], quant_map, inputs, outputs * inputs)
    return ScaledNumbers(name, shape, (1, J), read, scales, rounded_to=state.dtype)


def _scales(name: str, state: _State, tensors: Tensors, blocks: slice) -> np.ndarray:
    """Returns the scales of these blocks, float32."""
    absmax = tensors[f"{name}.absmax"][blocks]
    if not state.nested_block:
        return absmax
    outer = tensors[f"{name}.nested_absmax"].array()[
        np.arange(blocks.start, blocks.stop) // state.nested_block
    ]
    return tensors[f"{name}.nested_quant_map"].array()[absmax] * outer + state.offset


def _read_pairs(stored: StoredTensor, quant_map: np.ndarray, inputs: int, count: int) -> Read:
    """Returns a reader of numbers of 4 bits that lie row after row, also if a row begins within a byte."""
    pairs = quant_map[np.arange(256)[:, None] >> np.array([4, 0]) & 15]
    raw = dataclasses.replace(stored, type="U8", shape=(-(-count // 2),))

    def read(rows: slice, columns: slice) -> np.ndarray:
        first = rows.start * inputs
        end = rows.stop * inputs
        numbers = np.take(pairs, raw[first // 2 : -(-end // 2)], axis=0).reshape(-1)[first % 2 :]
        return numbers[: end - first].reshape(-1, inputs)[:, columns]

    return read
