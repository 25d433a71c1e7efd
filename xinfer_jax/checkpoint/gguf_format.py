"""Matrices of GGUF files that stay quantized, number for number: in groups of 32 or 16 inputs, or in MXFP4.

A block of a file is one group, or of K-quants 256 inputs, whose groups have scales and minima of 4 to 8 bits.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import InputError
from ..host import aligned_empty, run_in_blocks
from ..weights.grouped_weight import grouped_struct, offset_struct, pack_int4
from ..weights.mxfp4 import mxfp4_struct
from ..weights.param_specs import ParamSpec
from .gguf_file import GgufTensor
from .tensors import QuantizedFormat, Shape, Tensors, TensorSpec

_NAN = 255  # as an exponent of MXFP4


class _Kind(NamedTuple):
    """A type of tensors."""

    bits: int  # of a leaf's values
    group: int  # inputs that share a scale
    struct: Callable[..., Any]  # of a leaf, from its shape, bits, group and the type of scales
    scale: Any
    # Of blocks, uint8 [..., bytes], the values [..., inputs] or their bytes, the scales, and offsets if the
    # leaf has them.
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]


def is_kept(tensor: GgufTensor, spec: ParamSpec) -> bool:
    """Whether a leaf stays quantized: also its groups must be whole in the order of the model's inputs."""
    kind = _KINDS.get(tensor.kind.name)
    if kind is None or not spec.is_quantizable:
        return False
    columns = _columns(tensor)
    if len(columns) % kind.group:
        return False
    groups = columns.reshape(-1, kind.group)
    first = groups[:, :1]
    return not (first % kind.group).any() and bool((groups == first + np.arange(kind.group)).all())


def _columns(tensor: GgufTensor) -> np.ndarray:
    """Which numbers of a row of the file it has."""
    return np.asarray(range(tensor.width) if tensor.columns is None else tensor.columns)


class GgufFormat(QuantizedFormat):
    method = "gguf"

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        stored: Any = tensors.get(name)
        return {name: (shape, {stored.type})} if getattr(stored, "kept", False) else {}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> Any:
        stored: Any = tensors[name]
        (*experts, outputs, inputs) = shape
        kind = _KINDS[stored.kind.name]
        leaf = kind.struct((outputs, inputs), kind.bits, kind.group, kind.scale)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*experts, *x.shape), x.dtype), leaf)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> Any:
        stored: Any = tensors[name]
        (*_, outputs, inputs) = shape
        kind = _KINDS[stored.kind.name]
        leaf = jax.tree.map(aligned_empty, self.struct(name, shape, tensors))
        per_block = stored.block[0] // kind.group
        group_Q = _columns(stored)[:: kind.group] // kind.group  # of a row of the file
        (blocks, block_Q) = np.unique(group_Q // per_block, return_inverse=True)
        group_Q = block_Q * per_block + group_Q % per_block  # of these blocks
        for expert in range(len(stored.rows) // outputs):
            one = jax.tree.map(lambda x, i=expert: x[i], leaf) if len(shape) > 2 else leaf

            def fill(at: slice, one=one, first=expert * outputs) -> None:
                rows = stored.blocks(slice(first + at.start, first + at.stop))[:, blocks]
                (values, *scales) = kind.decode(rows)
                by_group = values.reshape(len(rows), len(blocks) * per_block, -1)
                levels_QJO = by_group.transpose(1, 2, 0)[group_Q]
                one.values[..., at] = pack_int4(levels_QJO) if kind.bits == 4 else levels_QJO
                for field, numbers in zip(("scale", "offset"), scales, strict=False):
                    if not (numbers != _NAN if numbers.dtype == np.uint8 else np.isfinite(numbers)).all():
                        raise InputError(f"{name} holds NaN or inf: fetch the file again")
                    getattr(one, field)[:, at] = numbers.reshape(len(rows), -1).T[group_Q]
                if getattr(one, "zero", None) is not None:
                    one.zero[:, at] = 8

            run_in_blocks(fill, outputs, inputs)
        return leaf


def _halves(blocks: np.ndarray) -> np.ndarray:
    """16 bytes of 32 numbers of 4 bits: first those in the low halves."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The number at a byte of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """The numbers of Q5_0 and Q5_1: 4 bytes of high bits, then 16 of low ones."""
    high = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    return (_halves(blocks[..., 4:]) | high << 4).astype(np.int8)


def _shifted(blocks: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Numbers of so many bits in runs of `size` bytes: those in the lowest bits of a run, then the next."""
    runs = blocks.reshape(*blocks.shape[:-1], -1, 1, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8(2**bits - 1)).reshape(*blocks.shape[:-1], -1)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of Q4_K and Q5_K, [..., 8]: 12 bytes have those of 6 bits."""
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
    """A leaf's bytes have neighbours."""
    numbers = _halves(blocks[..., 1:])
    return numbers[..., ::2] | numbers[..., 1::2] << 4, blocks[..., 0]


def _mxfp4_struct(shape: Shape, *_: Any) -> Any:
    return mxfp4_struct(shape)


_KINDS = {
    "Q8_0": _Kind(8, 32, grouped_struct, np.float16, lambda x: (x[..., 2:].view(np.int8), _float16(x, 0))),
    "Q4_0": _Kind(4, 32, grouped_struct, np.float16, lambda x: (_halves(x[..., 2:]), _float16(x, 0))),
    "Q4_1": _Kind(
        4, 32, offset_struct, np.float16, lambda x: (_halves(x[..., 4:]), _float16(x, 0), _float16(x, 2))
    ),
    "Q5_0": _Kind(
        8, 32, grouped_struct, np.float16, lambda x: (_five_bits(x[..., 2:]) - np.int8(16), _float16(x, 0))
    ),
    "Q5_1": _Kind(
        8, 32, offset_struct, np.float16, lambda x: (_five_bits(x[..., 4:]), _float16(x, 0), _float16(x, 2))
    ),
    "Q4_K": _Kind(4, 32, offset_struct, np.float32, lambda x: (_shifted(x[..., 16:], 32, 4), *_k_scales(x))),
    "Q5_K": _Kind(8, 32, offset_struct, np.float32, _q5_k),
    "Q6_K": _Kind(8, 16, grouped_struct, np.float32, _q6_k),
    "MXFP4": _Kind(8, 32, _mxfp4_struct, np.uint8, _mxfp4),
}
