"""Files of compressed-tensors (llm-compressor): config.json says which modules are quantized in which way.

X.weight is stored as X.weight_packed, or under its own name in a narrower type. X.weight_scale is its scale.
There may also be X.weight_zero_point, X.weight_g_idx, X.weight_global_scale and X.weight_shape.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import chain
from typing import Any, Self

import numpy as np

from ..errors import InputError, format_value
from ..families.conversion import TensorOfLeaves
from ..families.skipped_tensors import text_name
from ..weights.grouped_weight import GroupedWeight
from ..weights.padded_weight import stored_weight
from .compressed_tensors_packing import packed_tensors
from .fp8_format import (
    FLOAT8,
    SCALE_TYPES,
    float8_tensor,
    is_of_activations,
    scale_layout,
    scaled_numbers,
)
from .kept_leaves import whole_numbers_form
from .mxfp4_format import mxfp4_tensor
from .nvfp4_format import number_spec, nvfp4_specs, nvfp4_tensor
from .scaled_tensor import (
    MatrixFormat,
    Read,
    ScaledTensor,
    check_groups,
    group_of_inputs,
    is_quick_pattern,
    read_bytes,
)
from .tensors import Require, Shape, StoredTensor, Tensors, TensorSpec

_BYTES = np.arange(256)[:, None]
# The whole numbers of a byte: packed ones by their bits, around the middle, and int8.
_PACKED = {4: ((_BYTES >> np.array([0, 4]) & 15) - 8).astype(np.int8), 8: (_BYTES - 128).astype(np.int8)}
_INT8 = _BYTES.astype(np.uint8).view(np.int8)
_PACKED_INT = "pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_MXFP4 = "mxfp4-pack-quantized"
_INTEGERS = (("int", 4), ("int", 8))
_FORMATS: dict[str, tuple] = {  # with the types and bits of their numbers
    _PACKED_INT: _INTEGERS, _NVFP4: (("float", 4),), _MXFP4: (("float", 4),), "int-quantized": _INTEGERS,
    "float-quantized": (("float", 8),), "naive-quantized": (*_INTEGERS, ("float", 8)),
}  # fmt: skip
_GROUPS = {_NVFP4: 16, _MXFP4: 32}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The settings by which the modules of a group are stored."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: those of an output, or all
    is_symmetric: bool

    @property
    def stays_quantized(self) -> bool:
        return not self.is_float or self.format == _MXFP4


@dataclasses.dataclass(frozen=True)
class CompressedTensorsFormat(MatrixFormat):
    method = "compressed-tensors"
    methods = (method,)
    floats_field = "ignore"
    joined_are_written = False
    schemes: tuple[Scheme, ...]
    of_module: Mapping[str, Scheme] = dataclasses.field(default_factory=dict)  # by its name in the text model

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "CompressedTensorsFormat":
        """Returns the format. There may be groups of activations and of the KV cache alone."""
        groups: Any = config.get("config_groups") or {}
        ignore = config.get("ignore") or []
        sparsity = config.get("sparsity_config") or {}
        is_dense = isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"
        require(isinstance(ignore, list | tuple) and all(isinstance(x, str) for x in ignore), "ignore")
        require(is_dense, "sparsity_config")
        require(not config.get("transform_config"), "transform_config")
        are_groups = isinstance(groups, Mapping) and all(isinstance(x, Mapping) for x in groups.values())
        require(are_groups, "config_groups")
        used = [group for group in groups.values() if group.get("weights") is not None]
        schemes = tuple(_read_scheme(group, group.get("format") or config.get("format")) for group in used)
        targets = [target for scheme in schemes for target in scheme.targets]
        if twice := sorted({target for target in targets if targets.count(target) > 1}):
            raise InputError(
                f"quantization_config: several config_groups have the target {format_value(twice[0])}:"
                " correct config.json"
            )
        return cls(schemes)

    @classmethod
    def with_floats(cls, settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
        """Leaves out modules that a regular expression names."""
        listed = [name[3:] for name in settings.get("ignore") or [] if name.startswith("re:")]
        patterns = [re.compile(pattern) for pattern in listed if is_quick_pattern(pattern)]
        new = [module for module in floats if not any(pattern.match(module) for pattern in patterns)]
        return super().with_floats(settings, new)

    @property
    def stays_quantized(self) -> bool:  # type: ignore[override]
        return any(scheme.stays_quantized for scheme in self.schemes)

    def of_files(self, tensors: Tensors) -> Self:
        found: dict[str, Scheme] = {}
        for name, tensor in tensors.items():
            is_plain = name.endswith(".weight") and tensor.type in FLOAT8 | {"I8"}
            if (is_plain or name.endswith(".weight_packed")) and (own := text_name(name, True)):
                own = own.rpartition(".")[0]
                found[own] = self._scheme(name.rpartition(".")[0], own)
        return dataclasses.replace(self, of_module=found)

    @cached_property
    def _by_target(self) -> dict[str, Scheme]:
        return {target: scheme for scheme in self.schemes for target in scheme.targets}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern, str]]:
        targets = sorted(target for target in self._by_target if target.startswith("re:"))
        return [(re.compile(target[3:]), target) for target in targets]

    def _scheme(self, *names: str) -> Scheme:
        """Returns the scheme of a module with these names. It is the scheme of the target that is its name,
        or else of the first regular expression for it, or of its class. Raises InputError.
        """
        matching = (target for pattern, target in self._patterns if any(map(pattern.match, names)))
        classes = ("Embedding", "Linear") if names[0].endswith("embed_tokens") else ("Linear",)
        for target in chain(names, matching, classes):
            if target in self._by_target:
                return self._by_target[target]
        raise InputError(
            f"quantization_config: {names[0]} is quantized, but no target of config_groups is its name or"
            " class: correct config.json"
        )

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        return {f"{module}.weight": (0, 0) for module in self.of_module}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        scheme = self.of_module[name.removesuffix(".weight")]
        (outputs, inputs) = shape
        if scheme.format == _NVFP4:
            number = number_spec(f"{name}_global_scale", tensors)
            return nvfp4_specs(name, shape, f"{name}_packed") | number
        if scheme.format == _MXFP4:
            check_groups(name, inputs, _GROUPS[_MXFP4])
            scales: TensorSpec = ((outputs, inputs // _GROUPS[_MXFP4]), {"U8"})
            return {f"{name}_packed": ((outputs, inputs // 2), {"U8"}), f"{name}_scale": scales}
        scale = tensors.get(f"{name}_scale")
        (wanted, _, (_, groups)) = scale_layout(scale.shape if scale else (), shape, scheme.block)
        specs: dict[str, TensorSpec] = {f"{name}_scale": (wanted, SCALE_TYPES)}
        words = lambda count: -(-count * scheme.bits // 32)  # noqa: E731
        if scheme.format == _PACKED_INT:
            specs[f"{name}_packed"] = ((outputs, words(inputs)), {"I32"})
            specs[f"{name}_shape"] = ((2,), {"I64", "I32"})
            zeros: TensorSpec = ((words(outputs), groups), {"I32"})
        else:
            specs[name] = (shape, FLOAT8 if scheme.is_float else {"I8"})
            zeros = (wanted, {"I8"})
        if not scheme.is_symmetric:
            specs[f"{name}_zero_point"] = zeros
        if f"{name}_g_idx" in tensors:
            specs[f"{name}_g_idx"] = ((inputs,), {"I32", "I64"})
        return specs

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        scheme = self.of_module[name.removesuffix(".weight")]
        scale = tensors[f"{name}_scale"]
        if scheme.format == _NVFP4:
            divisor = tensors[f"{name}_global_scale"]
            return nvfp4_tensor(name, shape, tensors[f"{name}_packed"], scale, partial(_divide, divisor))
        if scheme.format == _MXFP4:
            return mxfp4_tensor(name, shape, tensors[f"{name}_packed"], scale)
        layout = scale_layout(scale.shape, shape, scheme.block)
        if scheme.is_float:
            return float8_tensor(name, shape, tensors[name], scale, layout)
        is_packed = scheme.format == _PACKED_INT
        table = _PACKED[scheme.bits] if is_packed else _INT8
        read = read_bytes(tensors[f"{name}_packed" if is_packed else name], table)
        zeros = tensors.get(f"{name}_zero_point")
        order = tensors.get(f"{name}_g_idx")
        numbers = scaled_numbers(
            name,
            shape,
            read,
            scale,
            layout,
            zeros=None
            if scheme.is_symmetric
            else _read_zeros(zeros, layout[2], table if is_packed else None),
            group_of=None if order is None else group_of_inputs(name, order, layout[1][1]),
            kept=whole_numbers_form,
            bits=scheme.bits if scheme.is_symmetric or scheme.bits == 4 else 0,
            has_float16_scales=scale.type == "F16",
        )
        return ScaledTensor(numbers, shape)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors: dict[str, TensorOfLeaves] = {}
        for name, leaf in leaves.items():
            module = name.removesuffix(".weight").format(0)
            scheme = self.of_module.get(module) or self._scheme(module)
            even = leaf.shape[-1] + leaf.shape[-1] % 2
            J = min(scheme.block[1], even) if scheme.block else even
            stored: Any = stored_weight(leaf)
            is_int4 = isinstance(stored, GroupedWeight) and stored.zero is not None and stored.group == J
            if not is_int4 or stored.int8_activations or scheme.format != _PACKED_INT or scheme.bits != 4:
                raise self.misfit(name, leaf)
            check = partial(self._check_symmetric, name) if scheme.is_symmetric else None
            kind = np.float32 if np.dtype(dtype) == np.float32 else stored.scale.dtype
            experts = range(leaf.shape[0]) if "{}" in name else (None,)
            for expert in experts:
                tensors |= packed_tensors(name.format(expert), leaf, expert, kind, check)
        return tensors

    def _check_symmetric(self, name: str, zeros: np.ndarray) -> None:
        if (zeros != 8).any():
            raise self.misfit(name, None)

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        """Returns True also for zero points of symmetric matrices, which are 0."""
        module, _, field = name.rpartition(".")
        if field == "weight_zero_point" and module in self.of_module:
            return not tensors[name].array().any()
        return is_of_activations(name)


def _divide(divisor: StoredTensor, scales: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return scales / divisor.array()


def _read_zeros(stored: Any, shape: tuple[int, int], packed: np.ndarray | None) -> Read:
    """Returns a reader of zero points. packed: the number of zero points in a byte, if words hold the zero
    points of neighbouring outputs. None: they are int8.
    """
    if packed is None:
        return lambda rows, columns: dataclasses.replace(stored, shape=shape)[rows][:, columns]
    per_word = 4 * packed.shape[1]

    def read(rows: slice, columns: slice) -> np.ndarray:
        first = rows.start // per_word
        words = np.ascontiguousarray(stored[first : -(-rows.stop // per_word)][:, columns])
        numbers_WQB = packed[words.view(np.uint8).reshape(*words.shape, 4)].reshape(*words.shape, per_word)
        numbers_OQ = numbers_WQB.swapaxes(1, 2).reshape(-1, words.shape[1])
        return numbers_OQ[rows.start - first * per_word :][: rows.stop - rows.start]

    return read


def _read_scheme(group: Mapping[str, Any], format: Any) -> Scheme:
    def check(is_supported: bool, name: str, value: Any) -> None:
        if not is_supported:
            raise InputError(
                f"quantization_config: compressed-tensors with {name} {format_value(value)} is not supported:"
                f" only the formats {', '.join(_FORMATS)} in their usual settings are"
            )

    targets: Any = group.get("targets")
    weights = group["weights"]
    check(isinstance(format, str) and format in _FORMATS, "format", format)
    check(isinstance(targets, list | tuple) and all(map(_is_target, targets)), "targets", targets)
    check(isinstance(weights, Mapping), "weights", weights)
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    size = weights.get("group_size")
    check(
        type(bits) is int and (kind, bits) in _FORMATS[format], "numbers of type and num_bits", (kind, bits)
    )
    strategy = weights.get("strategy") or ("group" if size and size != -1 else "channel")
    check(strategy in ("tensor", "channel", "group", "block", "tensor_group"), "strategy", strategy)
    block = None
    if "group" in strategy:
        check(type(size) is int and 0 < size == _GROUPS.get(format, size), "group_size", size)
        block = (1, size)
    elif strategy == "block":
        structure = weights.get("block_structure")
        is_pair = isinstance(structure, list | tuple) and len(structure) == 2
        check(is_pair and all(type(x) is int and x > 0 for x in structure), "block_structure", structure)
        block = (structure[0], structure[1])
    symmetric = weights.get("symmetric", True)
    check(symmetric is True or symmetric is False and kind == "int", "symmetric", symmetric)
    return Scheme(tuple(targets), format, bits, kind == "float", block, symmetric)


def _is_target(x: Any) -> bool:
    """Returns True if a value is a name, a class or a regular expression that takes little time."""
    return isinstance(x, str) and (not x.startswith("re:") or is_quick_pattern(x[3:]))
