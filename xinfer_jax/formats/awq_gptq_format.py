"""Quantized matrices of AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) checkpoints.

A matrix X.weight [O, I] is stored as X.qweight, X.qzeros and X.scales, with numbers of 4 (GPTQ also 8) bits
packed in 32-bit words. GPTQ may add X.g_idx, the group of each input.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from ..device import run_in_blocks
from ..errors import InputError, format_names
from ..families.conversion import TensorOfLeaves
from ..weights.grouped_weight import GroupedWeight, grouped_struct, unpack_int4
from .kept_leaves import whole_numbers_form
from .scaled_tensor import MatrixFormat, Read, ScaledNumbers, ScaledTensor, group_of_inputs
from .tensors import DTYPES, Shape, StoredTensor, Tensors, TensorSpec

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each of a word's 8 outputs, which 4 bits it has, from the lowest
_SCALE_TYPES = {"F16", "BF16", "F32"}
_FIELDS = ("qweight", "qzeros", "scales")


@dataclasses.dataclass(frozen=True)
class AwqGptqFormat(MatrixFormat):
    joined_are_written = False
    method: str  # awq, gptq, or auto-round, which packs as they do
    layout: str  # awq or gptq
    bits: int
    group: int  # inputs that share a scale; -1: all of them
    needs_order: bool = False  # gptq: X.g_idx must be present
    zeros_minus_one: bool = False  # gptq: the stored zeros are one less
    zeros_borrow: bool = False  # gptq: the one was subtracted from whole words, with borrows between numbers
    symmetric: bool = False  # gptq: every zero is the middle number

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _FIELDS}
        return {name: (0, 0) for name in (f"{module}.weight" for module in modules) if name not in tensors}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        module = name.removesuffix(".weight")
        (outputs, inputs) = shape
        per_word = 32 // self.bits
        Q = -(-inputs // self._group_size(inputs))
        packed_outputs = -(-outputs // per_word)
        words = (inputs, packed_outputs) if self.layout == "awq" else (-(-inputs // per_word), outputs)
        specs: dict[str, TensorSpec] = {
            "qweight": (words, {"I32"}),
            "qzeros": ((Q, packed_outputs), {"I32"}),
            "scales": ((Q, outputs), _SCALE_TYPES),
        }
        if self.needs_order or f"{module}.g_idx" in tensors:
            specs["g_idx"] = ((inputs,), {"I32", "I64"})
        return {f"{module}.{field}": spec for field, spec in specs.items()}

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        module = name.removesuffix(".weight")
        (words, zeros, scales) = (tensors[f"{module}.{field}"] for field in _FIELDS)
        J = self._group_size(shape[1])
        read_outputs = lambda rows, columns: self._signed(self._outputs(words, rows, columns).T)  # noqa: E731
        numbers = ScaledNumbers(
            name,
            (shape[0], shape[1]),
            (1, J),
            read_outputs if self.layout == "awq" else self._read_inputs(words),
            lambda rows, groups: _columns(scales, rows)[groups].T,
            lambda rows, groups: self._read_zeros(name, zeros, rows, groups),
            group_of=self._groups(name, shape[1], tensors),
            kept=whole_numbers_form,
            bits=self.bits,
            has_float16_scales=scales.type == "F16",
        )
        return ScaledTensor(numbers, shape)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            if not self._has_layout(leaf):
                raise self.misfit(name, leaf)
            module = name.removesuffix(".weight")
            known: Any = [f"{module}.qweight", *([f"{module}.g_idx"] if self.layout == "gptq" else [])]
            for stored, (shape, _) in self.tensor_specs(name, leaf.shape[-2:], known).items():
                field = stored.rpartition(".")[2]
                kind = leaf.scale.dtype if field == "scales" else np.int32
                for expert in range(leaf.shape[0]) if "{}" in name else (None,):
                    make = partial(self._pack_field, field, name, leaf, expert, shape)
                    tensors[stored.format(expert)] = TensorOfLeaves(shape, kind, make)
        return tensors

    def _has_layout(self, leaf: Any) -> bool:
        if not isinstance(leaf, GroupedWeight) or leaf.int8_activations:
            return False
        values = grouped_struct(leaf.shape[-2:], self.bits, self._group_size(leaf.inputs)).values
        same = (leaf.values.shape[-3:], leaf.values.dtype) == (values.shape, values.dtype)
        return same and (leaf.order is None or self.layout == "gptq")

    def _pack_field(
        self,
        field: str,
        name: str,
        leaf: GroupedWeight,
        expert: int | None,
        shape: Shape,
        convert: Callable[[Any], np.ndarray],
    ) -> np.ndarray:
        if expert is not None:
            leaf = jax.tree.map(lambda x: x[expert], leaf)
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
            if self.layout == "awq":
                words[:, at.start // 8 : -(-at.stop // 8)] = self._pack_rows(levels_IO)
            else:
                words[:, at] = self._pack_rows(levels_IO.T).T

        run_in_blocks(fill, *leaf.shape)
        return words

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        """Returns True for a bias of zeros, which some programs write for every quantized matrix."""
        module = name.removesuffix(".bias")
        if module == name or f"{module}.qweight" not in tensors or tensors[name].type not in DTYPES:
            return False
        return not tensors[name].array().any()

    def _group_size(self, inputs: int) -> int:
        """Returns J: inputs per group, even."""
        even = inputs + inputs % 2
        return min(self.group, even) if self.group > 0 else even

    def _groups(self, name: str, inputs: int, tensors: Tensors) -> np.ndarray | None:
        """Returns X.g_idx, the group of each input. None: neighbours share one."""
        J = self._group_size(inputs)
        field = f"{name.removesuffix('.weight')}.g_idx"
        if self.layout == "awq" or field not in tensors:
            return None
        return group_of_inputs(name, tensors[field], J)

    def _read_inputs(self, words: StoredTensor) -> Read:
        """Reads X.qweight of GPTQ, in which a word holds neighbouring inputs."""
        per_word = 32 // self.bits

        def read(rows: slice, columns: slice) -> np.ndarray:
            first = columns.start // per_word
            part = _columns(words, rows)[first : -(-columns.stop // per_word)]
            numbers_IO = np.stack(_unpack_words(part, self.bits), 1).reshape(-1, part.shape[1])
            skipped = columns.start - first * per_word
            return self._signed(numbers_IO[skipped : skipped + columns.stop - columns.start].T)

        return read

    def _outputs(self, words: StoredTensor, rows: slice, columns: slice, added: Any = 0) -> np.ndarray:
        """Returns numbers of words that hold neighbouring outputs, `added` to each word: [columns, rows]."""
        per_word = 32 // self.bits
        first = rows.start // per_word
        part = _columns(words, slice(first, -(-rows.stop // per_word)))[columns]
        numbers = _unpack_words((part.view(np.uint32) + np.uint32(added)).view(np.int32), self.bits)
        if self.layout == "awq":
            numbers = [numbers[nibble] for nibble in _AWQ_NIBBLES]
        skipped = rows.start - first * per_word
        return np.stack(numbers, -1).reshape(len(part), -1)[:, skipped : skipped + rows.stop - rows.start]

    def _signed(self, levels: np.ndarray) -> np.ndarray:
        """Returns numbers around 0, made from numbers around the middle."""
        return (levels - np.uint8(2 ** (self.bits - 1))).view(np.int8)

    def _read_zeros(self, name: str, words: StoredTensor, rows: slice, groups: slice) -> np.ndarray:
        """Returns X.qzeros, with the subtracted one added again: a stored 15 means 0. Symmetric ones are
        known: programs have written 8 under format gptq, which has 7 there, and 7 under gptq_v2.
        """
        if self.symmetric:
            middle = 2 ** (self.bits - 1)
            stored_QO = self._outputs(words, rows, groups)
            if not any((stored_QO == zero).all() for zero in (middle - 1, middle)):
                raise InputError(
                    f"{name}: qzeros of a symmetric matrix must all be {middle - 1} or all {middle}, got"
                    f" {format_names(np.unique(stored_QO))}: correct sym in quantization_config"
                )
            return np.zeros(stored_QO.T.shape, np.int8)
        added = np.uint8(self.zeros_minus_one and not self.zeros_borrow)
        zero_QO = (
            self._outputs(words, rows, groups, self._ones if self.zeros_borrow else 0) + added
        ) & np.uint8(2**self.bits - 1)
        return self._signed(zero_QO.T)

    def _pack_zeros(self, name: str, zero_QO: np.ndarray) -> np.ndarray:
        """Returns X.qzeros, from which `_read_zeros` makes these numbers."""
        if self.symmetric and (zero_QO != 2 ** (self.bits - 1)).any():
            raise self.misfit(name, None)
        subtracted = np.uint8(self.zeros_minus_one and not self.zeros_borrow)
        words = self._pack_rows((zero_QO - subtracted) & np.uint8(2**self.bits - 1))
        return (words.view(np.uint32) - self._ones).view(np.int32) if self.zeros_borrow else words

    @property
    def _ones(self) -> np.uint32:
        """A word of ones."""
        return np.uint32(sum(1 << bit for bit in range(0, 32, self.bits)))

    def _pack_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns words of neighbouring numbers of each row, from which `_outputs` makes them."""
        size = 32 // self.bits
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % size)))
        columns = [padded[:, i::size] for i in range(size)]
        if self.layout == "awq":
            columns = [columns[i] for i in np.argsort(_AWQ_NIBBLES)]
        if self.bits == 4:
            columns = [low | high << 4 for low, high in zip(columns[::2], columns[1::2], strict=True)]
        return np.stack(columns, -1).view("<i4")[..., 0]


def _columns(stored: StoredTensor, at: slice) -> np.ndarray:
    """Returns columns of a matrix."""
    return stored.slice_axis(1, at.start, at.stop - at.start)[:]


def _unpack_words(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """Returns the numbers in each int32, lowest bits first: a list of uint8 arrays with the shape of
    `words`.
    """
    by_byte = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
    columns = [by_byte[..., i] for i in range(4)]
    return columns if bits == 8 else [number for byte in columns for number in (byte & 15, byte >> 4)]
