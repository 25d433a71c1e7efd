"""Quantized checkpoints as others write them: AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) and BitNet
b1.58 (Ma et al. 2024).

The first two store a matrix X.weight [O, I] as X.qweight, X.qzeros and X.scales, numbers of 4 (GPTQ also 8)
bits in words of 32; GPTQ may add X.g_idx, the group of each input. BitNet has X.weight, four outputs in a
byte or float numbers, and X.weight_scale.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, shown
from ..host import aligned, by_blocks
from ..weights.quantized import GroupedWeight, grouped_form, pack
from ..weights.ternary import TernaryWeight, packed, ternary_form, ternary_leaf
from .files import read_json
from .own_format import ROTATED, VERSION, OwnFormat, Part
from .tensors import TYPES, StoredTensor

_REMEDY = (
    "awq (version gemm, 4 bits), gptq (4 or 8 bits) and bitnet are read: use such a checkpoint, or the"
    " unquantized one with quantize="
)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which 4 bits of a word, from the lowest, each of its 8 outputs has
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}
_SCALES = {"F16", "BF16", "F32"}
_EACH = 4  # outputs in a byte of BitNet's: o, o + O/4, ... from the lowest bits on


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """How the quantized matrices of a checkpoint are stored."""

    method: str  # awq or gptq
    bits: int
    group: int  # inputs that share a scale; -1: all
    ordered: bool = False  # gptq: X.g_idx must be there
    zero_less_one: bool = False  # gptq: zeros are stored less one,
    borrowed: bool = False  # and that was subtracted from whole words, with borrows between their numbers

    def parts(
        self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Part]:
        """Tensors that a quantized matrix is stored as, by name; empty if it is not quantized.

        Args:
            name, shape: of the matrix, X.weight [O, I].
            tensors: by name, files that hold them.
        """
        if len(shape) == 1 or name in tensors:
            return {}
        module = name.removesuffix(".weight")
        if not any(f"{module}.{part}" in tensors for part in ("qweight", "qzeros", "scales")):
            return {}
        (outputs, inputs) = shape
        each = 32 // self.bits
        Q = -(-inputs // self._inputs(inputs))
        packed = (inputs, -(-outputs // each)) if self.method == "awq" else (-(-inputs // each), outputs)
        parts: dict[str, Part] = {
            "qweight": (packed, {"I32"}),
            "qzeros": ((Q, -(-outputs // each)), {"I32"}),
            "scales": ((Q, outputs), _SCALES),
        }
        if self.ordered or f"{module}.g_idx" in tensors:
            parts["g_idx"] = ((inputs,), {"I32", "I64"})
        return {f"{module}.{part}": stored for part, stored in parts.items()}

    def form(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> GroupedWeight:
        """Shapes and types of `leaf`. Only X.g_idx is read: it may name the inputs in their own order."""
        J = self._inputs(shape[1])
        module = name.removesuffix(".weight")
        scale = np.float16 if tensors[f"{module}.scales"].type == "F16" else np.float32
        return grouped_form(shape, self.bits, J, scale, self._order(name, shape[1], tensors) is not None)

    def leaf(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> GroupedWeight:
        """The matrix whose `parts` have been checked; NumPy arrays in the leaf.

        Raises:
            InputError: numbers that do not fit.
        """

        def get(part: str) -> Any:
            return tensors[f"{name.removesuffix('.weight')}.{part}"].array()

        (outputs, inputs) = shape
        J = self._inputs(shape[1])
        order = self._order(name, inputs, tensors)
        zero_QO = self._zeros(get("qzeros"))[:, :outputs]
        scale_QO = get("scales")
        if self.bits == 8 and (zero_QO != 128).any():
            raise InputError(
                f"{name}: gptq with 8 bits is only read if symmetric, all zeros 128, got"
                f" {int(zero_QO[zero_QO != 128][0])}"
            )
        words = get("qweight")
        values_QYO = aligned(grouped_form(shape, self.bits, J).values)

        def fill(at: slice) -> None:
            levels_IO = self._levels(words, at)[:inputs]
            if order is not None:
                levels_IO = levels_IO[order]
            levels_QJO = np.pad(levels_IO, ((0, -inputs % J), (0, 0))).reshape(-1, J, levels_IO.shape[1])
            values_QYO[..., at] = (
                pack(levels_QJO) if self.bits == 4 else (levels_QJO ^ 128).view(np.int8)
            )  # q - 128

        by_blocks(fill, outputs, inputs)
        scale_QO = scale_QO if scale_QO.dtype == np.float16 else scale_QO.astype(np.float32)
        return GroupedWeight(
            values_QYO, scale_QO, np.ascontiguousarray(zero_QO) if self.bits == 4 else None, order, inputs
        )

    def spare(self, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
        """Whether a tensor says nothing: some writers give every quantized matrix a bias, of zeros."""
        module = name.removesuffix(".bias")
        if module == name or f"{module}.qweight" not in tensors or tensors[name].type not in TYPES:
            return False
        return not tensors[name].array().any()

    def _inputs(self, inputs: int) -> int:
        """J: inputs of a group, even."""
        even = inputs + inputs % 2
        return min(self.group, even) if self.group > 0 else even

    def _order(self, name: str, inputs: int, tensors: Mapping[str, StoredTensor]) -> np.ndarray | None:
        """Inputs group by group, from the group of each in X.g_idx; None if that is their own order."""
        J = self._inputs(inputs)
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

    def _levels(self, words: np.ndarray, at: slice) -> np.ndarray:
        """Some outputs of X.qweight, from a multiple of 8 on, as uint8 [I, O]: AWQ's words hold neighbouring
        outputs, GPTQ's neighbouring inputs.
        """
        if self.method == "awq":
            return self._row(words[:, at.start // 8 : -(-at.stop // 8)])[:, : at.stop - at.start]
        numbers = np.stack(_numbers(words[:, at], self.bits), 1)
        return numbers.reshape(-1, numbers.shape[-1])

    def _zeros(self, words: np.ndarray) -> np.ndarray:
        """X.qzeros as uint8 [Q, O], with the one that was taken off put back: a stored 15 was 0."""
        if self.borrowed:
            words = words.view(np.uint32) + np.uint32(sum(1 << at for at in range(0, 32, self.bits)))
        less_one = np.uint8(self.zero_less_one and not self.borrowed)
        return (self._row(words) + less_one) & np.uint8(2**self.bits - 1)

    def _row(self, words: np.ndarray) -> np.ndarray:
        """Numbers in the order of the outputs, which neighbour in words: [..., O]."""
        numbers = _numbers(words, self.bits)
        if self.method == "awq":
            numbers = [numbers[at] for at in _AWQ_PLACES]
        return np.stack(numbers, -1).reshape(len(words), -1)


@dataclasses.dataclass(frozen=True)
class BitNetFormat:
    """How ternary matrices are stored, by linear_class and quantization_mode; methods as in `FileFormat`."""

    divides: bool  # bitlinear: by X.weight_scale; autobitlinear multiplies by it
    online: bool  # X.weight is float numbers, to be rounded by their mean magnitude; there is no scale
    left_out: tuple[str, ...]  # modules_to_not_convert
    method = "bitnet"

    def parts(
        self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Part]:
        module, _, kind = name.rpartition(".")
        if not module.endswith("_proj") and module != "lm_head" or self._is_left_out(module):
            return {}
        if kind == "bias":
            if not self.divides and not self.online:  # scaled together with the sums
                raise InputError(f"{name}: biases with linear_class 'autobitlinear' are not supported")
            return {}
        if self.online:
            return {name: (shape, _SCALES)}
        scale: dict[str, Part] = {f"{name}_scale": ((1,), _SCALES)}
        if not self.divides and name in tensors and tensors[name].type != "U8":
            return {name: (shape, _SCALES)} | scale
        if shape[0] % _EACH:
            raise InputError(f"{name} has {shape[0]} outputs, and bitnet packs them by {_EACH}")
        return {name: ((shape[0] // _EACH, shape[1]), {"U8"})} | scale

    def _is_left_out(self, module: str) -> bool:
        """As transformers: by whole parts from the start, or by any end."""
        return any(f"{module}.".startswith(f"{name}.") or module.endswith(name) for name in self.left_out)

    def form(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> TernaryWeight:
        return ternary_form(shape)

    def leaf(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> TernaryWeight:
        stored = tensors[name]
        (outputs, inputs) = shape
        if self.online:
            return ternary_leaf(stored, name)
        (scale,) = tensors[f"{name}_scale"].array().astype(np.float32)
        if not np.isfinite(scale) or scale == 0 and self.divides:
            raise InputError(f"{name}_scale is {scale}, no scale of a matrix: fetch the checkpoint again")
        scale = 1 / scale if self.divides else scale
        if stored.type == "U8":
            return packed(lambda at: _fields(stored, at, name), (outputs, stored.shape[1]), scale)
        largest: list[np.floating] = []
        by_blocks(lambda at: largest.append(np.abs(stored[at].astype(np.float32)).max()), outputs, 4 * inputs)
        most = np.float32(max(largest))
        return packed(lambda at: _levels(stored[at], most, name), shape, scale * most)

    def spare(self, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
        return False


Stored = FileFormat | BitNetFormat | OwnFormat


def _fields(stored: StoredTensor, outputs: slice, name: str) -> np.ndarray:
    """Some outputs of a packed matrix: int8 [outputs, I], -1, 0 and 1."""
    rows = stored.shape[0]
    found = []
    first = outputs.start
    while first < outputs.stop:  # those that stand in the same bits
        place, row = divmod(first, rows)
        end = min(outputs.stop, (place + 1) * rows)
        found.append(stored[row : row + end - first] >> 2 * place & 3)
        first = end
    fields = np.concatenate(found)
    if (fields == 3).any():
        raise InputError(f"{name} holds a number that is not -1, 0 or 1: fetch the checkpoint again")
    return fields.astype(np.int8) - 1


def _levels(block_OI: np.ndarray, most: np.float32, name: str) -> np.ndarray:
    """Numbers -most, 0 and most as -1, 0 and 1."""
    block_OI = block_OI.astype(np.float32)
    if not np.isin(block_OI, (-most, 0, most)).all():
        raise InputError(
            f"{name} holds other numbers than -{most}, 0 and {most}, and quantization_mode 'offline' says"
            " that it is quantized: say 'online' if these are to be rounded"
        )
    return np.sign(block_OI)


def read_format(settings: Mapping[str, Any], path: Path) -> Stored | None:
    """How the matrices of a checkpoint are stored; None: as float numbers.

    Args:
        settings: contents of config.json.
        path: the directory: older programs (AutoGPTQ, AutoAWQ) wrote a file of their own.

    Raises:
        InputError: a method, or a setting of one, that is not read.
    """
    given = settings.get("quantization_config") or _old_settings(path)
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method not in ("awq", "gptq", BitNetFormat.method, OwnFormat.method) or not isinstance(given, Mapping):
        raise InputError(f"quantization_config with quant_method {shown(method)} is not supported: {_REMEDY}")

    def refuse_unless(fits: bool, name: str) -> None:
        if not fits:
            what = f"{method} with {name} {shown(given.get(name))}"
            raise InputError(f"quantization_config: {what} is not supported: {_REMEDY}")

    if method == OwnFormat.method:
        refuse_unless(given.get("version") in (VERSION, ROTATED), "version")
        return OwnFormat(given.get("rotated") is True, given.get("once") is True)
    if method == BitNetFormat.method:
        return _bitnet_format(given, refuse_unless)
    bits = given.get("bits")
    group = given.get("group_size")
    refuse_unless(type(bits) is int and bits in ((4,) if method == "awq" else (4, 8)), "bits")
    refuse_unless(type(group) is int and (group == -1 or group > 0 and group % 2 == 0), "group_size")
    refuse_unless(given.get("pack_dtype", "int32") == "int32", "pack_dtype")
    # Settings of their own for some modules; "-:": not quantized, which the tensors say too.
    dynamic = given.get("dynamic") or {}
    refuse_unless(isinstance(dynamic, Mapping) and all(rule.startswith("-:") for rule in dynamic), "dynamic")
    refuse_unless(str(given.get("backend")) != "llm-awq", "backend")
    refuse_unless(given.get("desc_act") in (None, True, False), "desc_act")
    layouts = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    found = layouts[0]
    for name in ("version", "format", "checkpoint_format"):
        if given.get(name) is not None and not (method == "gptq" and name == "version"):
            found = str(given[name]).lower()
            refuse_unless(found in layouts, name)
    if method == "awq":
        refuse_unless(given.get("zero_point", True) is True, "zero_point")
        return FileFormat(method, bits, group)
    refuse_unless(not given.get("is_marlin_format"), "is_marlin_format")
    refuse_unless(not given.get("adapter"), "adapter")
    less_one = found == "gptq"
    borrowed = "gptqmodel" in str(given.get("meta"))
    return FileFormat(method, bits, group, bool(given.get("desc_act")), less_one, less_one and borrowed)


def _bitnet_format(given: Mapping[str, Any], refuse_unless: Callable[[bool, str], None]) -> BitNetFormat:
    linear = given.get("linear_class", "bitlinear")
    mode = given.get("quantization_mode", "offline")
    refuse_unless(linear in ("bitlinear", "autobitlinear"), "linear_class")
    refuse_unless(mode in ("offline", "online"), "quantization_mode")
    refuse_unless(not given.get("use_rms_norm"), "use_rms_norm")
    left_out = given.get("modules_to_not_convert")
    left_out = ["lm_head"] if left_out is None else left_out
    names = isinstance(left_out, list | tuple) and all(
        re.fullmatch(r"[\w.]+", str(name)) for name in left_out
    )
    refuse_unless(names, "modules_to_not_convert")  # patterns could be anything
    divides = linear == "bitlinear"  # always packed
    return BitNetFormat(divides, not divides and mode == "online", tuple(left_out))


def _old_settings(path: Path) -> Mapping[str, Any] | None:
    for file, method in _OLD_FILES.items():
        given = {_OLD_NAMES.get(name, name): value for name, value in (read_json(path / file) or {}).items()}
        if "bits" in given:  # files of other programs have these names too
            return {"quant_method": method} | given
    return None


def _numbers(words: np.ndarray, bits: int) -> list[np.ndarray]:
    """The numbers in each int32, lowest first, each uint8 and shaped as words."""
    by_byte = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)
    parts = [by_byte[..., i] for i in range(4)]
    return parts if bits == 8 else [number for byte in parts for number in (byte & 15, byte >> 4)]
