"""Matrices of GGUF files that stay quantized, number for number: in groups of 32 or 16 inputs, or in MXFP4.

A block of a file is one group, or of K-quants 256 inputs, whose groups have scales and minima of 4 to 8 bits.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..weights.grouped_weight import pack_int4
from ..weights.mxfp4 import mxfp4_struct
from .gguf_file import GgufTensor
from .kept_leaves import KeptForm, groups_struct
from .tensors import Shape

_NAN = 255  # as an exponent of MXFP4


class _Kind(NamedTuple):
    """A type of tensors."""

    bits: int  # of a leaf's values
    group: int  # inputs that share a scale
    scale: Any
    # Of blocks, uint8 [..., bytes], the values [..., inputs] or their bytes, the scales, and offsets if the
    # leaf has them.
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    has_offsets: bool = False
    is_mxfp4: bool = False


def gguf_form(
    shape: Shape, parts: Sequence[GgufTensor], devices: int = 1, asked: str | None = None
) -> KeptForm | None:
    """Returns `GgufTensor.kept`, as `kept_form`. Groups must be whole in the order of the model's inputs."""
    kind = _KINDS.get(parts[0].kind.name)
    if kind is None or any(part.kind != parts[0].kind or not part.is_plain for part in parts):
        return None
    columns = _columns(parts[0])
    if len(columns) % kind.group:
        return None
    groups = columns.reshape(-1, kind.group)
    first = groups[:, :1]
    if (first % kind.group).any() or (groups != first + np.arange(kind.group)).any():
        return None
    struct = partial(groups_struct, kind.bits, kind.group, kind.scale, False, kind.has_offsets)
    return KeptForm(mxfp4_struct if kind.is_mxfp4 else struct, partial(_fill, kind))


def _columns(tensor: GgufTensor) -> np.ndarray:
    """Returns the columns of the file's rows that the tensor has."""
    return np.asarray(range(tensor.width) if tensor.columns is None else tensor.columns)


def _fill(kind: _Kind, leaf: Any, part: GgufTensor, first: int, at: slice) -> None:
    per_block = part.block[0] // kind.group
    group_Q = _columns(part)[:: kind.group] // kind.group  # of a row of the file
    (blocks, block_Q) = np.unique(group_Q // per_block, return_inverse=True)
    group_Q = block_Q * per_block + group_Q % per_block  # of these blocks
    rows = part.blocks(at)[:, blocks]
    to = slice(first + at.start, first + at.stop)
    (values, *scales) = kind.decode(rows)
    levels_QJO = values.reshape(len(rows), len(blocks) * per_block, -1).transpose(1, 2, 0)[group_Q]
    leaf.values[..., to] = pack_int4(levels_QJO) if kind.bits == 4 else levels_QJO
    for field, numbers in zip(("scale", "offset"), scales, strict=False):
        if not (numbers != _NAN if numbers.dtype == np.uint8 else np.isfinite(numbers)).all():
            raise InputError(f"{part.name} holds NaN or inf: fetch the file again")
        getattr(leaf, field)[:, to] = numbers.reshape(len(rows), -1).T[group_Q]
    if getattr(leaf, "zero", None) is not None:
        leaf.zero[:, to] = 8


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Returns the 32 numbers of 4 bits in 16 bytes: first the numbers in the low halves."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the number at a byte of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """Returns the numbers of Q5_0 and Q5_1: 4 bytes of high bits, then 16 of low ones."""
    high = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    return (_halves(blocks[..., 4:]) | high << 4).astype(np.int8)


def _shifted(blocks: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Returns numbers of `bits` bits in runs of `size` bytes: the numbers in the lowest bits of a run, then
    the next.
    """
    runs = blocks.reshape(*blocks.shape[:-1], -1, 1, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8(2**bits - 1)).reshape(*blocks.shape[:-1], -1)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and offsets of Q4_K and Q5_K, [..., 8]: 12 bytes have numbers of 6 bits."""
    low, mins, high = np.split(blocks[..., 4:16], 3, axis=-1)
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    least = np.concatenate([mins & 63, high >> 4 | mins >> 6 << 4], axis=-1)
    (step, least_step) = (_float16(blocks, at).astype(np.float32) for at in (0, 2))
    return step * scale, -least_step * least


def _q5_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    high = _shifted(blocks[..., 16:48], 32, 1)
    return (_shifted(blocks[..., 48:], 32, 4) | high << 4).astype(np.int8), *_k_scales(blocks)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    numbers = _shifted(blocks[..., :128], 64, 4) | _shifted(blocks[..., 128:192], 32, 2) << 4
    scales = blocks[..., 192:208].view(np.int8)
    return numbers.astype(np.int8) - 32, _float16(blocks, 208).astype(np.float32) * scales


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the bytes of a leaf, which have neighbouring numbers, and the scales."""
    numbers = _halves(blocks[..., 1:])
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0]


_KINDS = {
    "Q8_0": _Kind(8, 32, np.float16, lambda x: (x[..., 2:].view(np.int8), _float16(x, 0))),
    "Q4_0": _Kind(4, 32, np.float16, lambda x: (_halves(x[..., 2:]), _float16(x, 0))),
    "Q4_1": _Kind(4, 32, np.float16, lambda x: (_halves(x[..., 4:]), _float16(x, 0), _float16(x, 2)), True),
    "Q5_0": _Kind(8, 32, np.float16, lambda x: (_five_bits(x[..., 2:]) - np.int8(16), _float16(x, 0))),
    "Q5_1": _Kind(
        8, 32, np.float16, lambda x: (_five_bits(x[..., 4:]), _float16(x, 0), _float16(x, 2)), True
    ),
    "Q4_K": _Kind(4, 32, np.float32, lambda x: (_shifted(x[..., 16:], 32, 4), *_k_scales(x)), True),
    "Q5_K": _Kind(8, 32, np.float32, _q5_k, True),
    "Q6_K": _Kind(8, 16, np.float32, _q6_k),
    "MXFP4": _Kind(8, 32, np.uint8, _mxfp4, is_mxfp4=True),
}
