"""Quantized matrices of AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) checkpoints.

A matrix X.weight [O, I] is stored as X.qweight, X.qzeros and X.scales, with numbers of 4 (GPTQ also 8) bits
packed in 32-bit words. GPTQ may add X.g_idx, the group of each input.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError, format_names
from ..families.conversion import TensorOfLeaves
from ..host import aligned_empty, run_in_blocks
from ..weights.grouped_weight import GroupedWeight, grouped_struct, pack_int4, unpack_int4
from .tensors import DTYPES, QuantizedFormat, Shape, Tensors, TensorSpec

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of a word's 8 outputs, which 4 bits it has, from the lowest
_SCALE_TYPES = {"F16", "BF16", "F32"}


@dataclasses.dataclass(frozen=True)
class AwqGptqFormat(QuantizedFormat):
    method: str  # awq or gptq
    bits: int
    group: int  # inputs that share a scale; -1: all of them
    needs_order: bool = False  # gptq: X.g_idx must be present
    zeros_minus_one: bool = False  # gptq: the stored zeros are one less
    zeros_borrow: bool = False  # gptq: the one was subtracted from whole words, with borrows between numbers
    symmetric: bool = False  # gptq: every zero is the middle number

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        if len(shape) == 1 or name in tensors:
            return {}
        module = name.removesuffix(".weight")
        if not any(f"{module}.{field}" in tensors for field in ("qweight", "qzeros", "scales")):
            return {}
        (outputs, inputs) = shape
        per_word = 32 // self.bits
        Q = -(-inputs // self._group_size(inputs))
        packed_outputs = -(-outputs // per_word)
        words = (inputs, packed_outputs) if self.method == "awq" else (-(-inputs // per_word), outputs)
        specs: dict[str, TensorSpec] = {
            "qweight": (words, {"I32"}),
            "qzeros": ((Q, packed_outputs), {"I32"}),
            "scales": ((Q, outputs), _SCALE_TYPES),
        }
        if self.needs_order or f"{module}.g_idx" in tensors:
            specs["g_idx"] = ((inputs,), {"I32", "I64"})
        return {f"{module}.{field}": spec for field, spec in specs.items()}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> GroupedWeight:
        J = self._group_size(shape[1])
        module = name.removesuffix(".weight")
        scale = np.float16 if tensors[f"{module}.scales"].type == "F16" else np.float32
        return grouped_struct(shape, self.bits, J, scale, self._order(name, shape[1], tensors) is not None)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> GroupedWeight:
        def get(field: str) -> Any:
            return tensors[f"{name.removesuffix('.weight')}.{field}"].array()

        (outputs, inputs) = shape
        J = self._group_size(shape[1])
        order = self._order(name, inputs, tensors)
        zero_QO = self._unpack_zeros(name, get("qzeros"), outputs)
        scale_QO = get("scales")
        if self.bits == 8 and (zero_QO != 128).any():
            raise InputError(
                f"{name}: gptq with 8 bits is only supported if symmetric, with all zeros 128, got"
                f" {int(zero_QO[zero_QO != 128][0])}"
            )
        words = get("qweight")
        values_QYO = aligned_empty(grouped_struct(shape, self.bits, J).values)

        def fill(at: slice) -> None:
            levels_IO = self._unpack_levels(words, at)[:inputs]
            if order is not None:
                levels_IO = levels_IO[order]
            levels_QJO = np.pad(levels_IO, ((0, -inputs % J), (0, 0))).reshape(-1, J, levels_IO.shape[1])
            if self.bits == 4:
                values_QYO[..., at] = pack_int4(levels_QJO)
            else:
                values_QYO[..., at] = (levels_QJO ^ 128).view(np.int8)  # level - 128

        run_in_blocks(fill, outputs, inputs)
        scale_QO = scale_QO if scale_QO.dtype == np.float16 else scale_QO.astype(np.float32)
        zero = np.ascontiguousarray(zero_QO) if self.bits == 4 else None
        return GroupedWeight(values_QYO, scale_QO, zero, order, inputs)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            if not self._has_layout(leaf):
                raise self.misfit(name)
            module = name.removesuffix(".weight")
            known: Any = [f"{module}.qweight", *([f"{module}.g_idx"] if self.method == "gptq" else [])]
            for stored, (shape, _) in self.tensor_specs(name, leaf.shape, known).items():
                field = stored.rpartition(".")[2]
                kind = leaf.scale.dtype if field == "scales" else np.int32
                make = partial(self._pack_field, field, name, leaf, shape)
                tensors[stored] = TensorOfLeaves(shape, kind, make)
        return tensors

    def _has_layout(self, leaf: Any) -> bool:
        if not isinstance(leaf, GroupedWeight) or len(leaf.shape) > 2:
            return False
        values = grouped_struct(leaf.shape, self.bits, self._group_size(leaf.inputs)).values
        same = (leaf.values.shape, leaf.values.dtype) == (values.shape, values.dtype)
        return same and (leaf.order is None or self.method == "gptq")

    def _pack_field(
        self, field: str, name: str, leaf: GroupedWeight, shape: Shape, convert: Callable[[Any], np.ndarray]
    ) -> np.ndarray:
        if field == "scales":
            return convert(leaf.scale)
        if field == "qzeros":
            has_zeros = leaf.zero is not None
            zero_QO = convert(leaf.zero) if has_zeros else np.full(leaf.scale.shape, 128, np.uint8)
            return self._pack_zeros(name, zero_QO)
        order = slice(None) if leaf.order is None else convert(leaf.order)
        if field == "g_idx":
            group_I = np.empty(shape, np.int32)
            group_I[order] = np.arange(leaf.inputs) // leaf.group
            return group_I
        values_QYO = convert(leaf.values)
        words = np.empty(shape, np.int32)

        def fill(at: slice) -> None:
            part = values_QYO[..., at]
            levels_QJO = unpack_int4(part) if self.bits == 4 else part.view(np.uint8) ^ 128
            levels_IO = np.empty((leaf.inputs, part.shape[-1]), np.uint8)
            levels_IO[order] = levels_QJO.reshape(-1, part.shape[-1])[: leaf.inputs]
            if self.method == "awq":
                words[:, at.start // 8 : -(-at.stop // 8)] = self._pack_rows(levels_IO)
            else:
                words[:, at] = self._pack_rows(levels_IO.T).T

        run_in_blocks(fill, *leaf.shape)
        return words

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        """Some programs write a bias of zeros for every quantized matrix."""
        module = name.removesuffix(".bias")
        if module == name or f"{module}.qweight" not in tensors or tensors[name].type not in DTYPES:
            return False
        return not tensors[name].array().any()

    def _group_size(self, inputs: int) -> int:
        """J: inputs per group, even."""
        even = inputs + inputs % 2
        return min(self.group, even) if self.group > 0 else even

    def _order(self, name: str, inputs: int, tensors: Tensors) -> np.ndarray | None:
        """The inputs sorted by their group in X.g_idx; None if that is the natural order."""
        J = self._group_size(inputs)
        module = name.removesuffix(".weight")
        if self.method == "awq" or f"{module}.g_idx" not in tensors:
            return None
        natural_I = np.arange(inputs) // J
        group_I = tensors[f"{module}.g_idx"].array()
        if np.array_equal(group_I, natural_I):
            return None
        order_I = np.argsort(group_I, kind="stable")
        if not np.array_equal(group_I[order_I], natural_I):
            raise InputError(
                f"{name}: g_idx does not give every group its {J} inputs: fetch the checkpoint again"
            )
        return order_I.astype(np.int32)

    def _unpack_levels(self, words: np.ndarray, at: slice) -> np.ndarray:
        """Some outputs of X.qweight, from a multiple of 8 on, as uint8 [I, O]. A word of AWQ holds
        neighbouring outputs, one of GPTQ neighbouring inputs.
        """
        if self.method == "awq":
            return self._unpack_outputs(words[:, at.start // 8 : -(-at.stop // 8)])[:, : at.stop - at.start]
        numbers = np.stack(_unpack_words(words[:, at], self.bits), 1)
        return numbers.reshape(-1, numbers.shape[-1])

    def _unpack_zeros(self, name: str, words: np.ndarray, outputs: int) -> np.ndarray:
        """X.qzeros as uint8 [Q, O], with the subtracted one added again: a stored 15 means 0. Symmetric ones
        are known: programs have written 8 under format gptq, which has 7 there, and 7 under gptq_v2.
        """
        if self.symmetric:
            middle = 2 ** (self.bits - 1)
            stored_QO = self._unpack_outputs(words)[:, :outputs]
            if not any((stored_QO == zero).all() for zero in (middle - 1, middle)):
                raise InputError(
                    f"{name}: qzeros of a symmetric matrix must all be {middle - 1} or all {middle}, got"
                    f" {format_names(np.unique(stored_QO))}: correct sym in quantization_config"
                )
            return np.full_like(stored_QO, middle)
        if self.zeros_borrow:
            words = words.view(np.uint32) + self._ones
        added = np.uint8(self.zeros_minus_one and not self.zeros_borrow)
        return ((self._unpack_outputs(words) + added) & np.uint8(2**self.bits - 1))[:, :outputs]

    def _pack_zeros(self, name: str, zero_QO: np.ndarray) -> np.ndarray:
        """X.qzeros, from which `_unpack_zeros` makes these numbers."""
        if self.symmetric and (zero_QO != 2 ** (self.bits - 1)).any():
            raise self.misfit(name)
        subtracted = np.uint8(self.zeros_minus_one and not self.zeros_borrow)
        words = self._pack_rows((zero_QO - subtracted) & np.uint8(2**self.bits - 1))
        return (words.view(np.uint32) - self._ones).view(np.int32) if self.zeros_borrow else words

    @property
    def _ones(self) -> np.uint32:
        """A word of ones."""
        return np.uint32(sum(1 << bit for bit in range(0, 32, self.bits)))

    def _unpack_outputs(self, words: np.ndarray) -> np.ndarray:
        """Numbers of words that hold neighbouring outputs, in their order: [..., O]."""
        numbers = _unpack_words(words, self.bits)
        if self.method == "awq":
            numbers = [numbers[nibble] for nibble in _AWQ_NIBBLES]
        return np.stack(numbers, -1).reshape(len(words), -1)

    def _pack_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Words of neighbouring numbers of each row, from which `_unpack_outputs` makes them."""
        size = 32 // self.bits
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)))
        columns = [padded[:, i::size] for i in range(size)]
        if self.method == "awq":
            columns = [columns[i] for i in np.argsort(_AWQ_NIBBLES)]
        if self.bits == 4:
            columns = [low | high << 4 for low, high in zip(columns[::2], columns[1::2], strict=True)]
        return np.stack(columns, -1).view("<i4")[..., 0]


def _unpack_words(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """The numbers in each int32, lowest bits first: a list of uint8 arrays with the shape of `words`."""
    by_byte = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
    columns = [by_byte[..., i] for i in range(4)]
    return columns if bits == 8 else [number for byte in columns for number in (byte & 15, byte >> 4)]
