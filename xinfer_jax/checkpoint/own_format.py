"""Our format of quantized checkpoints: a matrix is the tensors X.weight.values, .scale, .zero and .order."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ..errors import InputError
from ..families.naming import file_specs
from ..families.reading import from_hf
from ..sharding import RULES
from ..weights.grouped_weight import GroupedWeight
from ..weights.int8_weight import Int8Weight
from ..weights.layout import partition_specs
from ..weights.params import Params, ParamSpec
from ..weights.quantized_weight import QuantizedWeight, is_quantized
from ..weights.ternary import TernaryWeight, ternary_struct
from .files import TEXT_FILES, WEIGHTS
from .tensors import QuantizedFormat, Shape, StoredTensor, Tensors, TensorSpec

VERSION = 1
VERSION_ROTATED = 2  # of rotated weights, which programs for version 1 would compute wrongly with
_FIELDS = ("values", "scale", "zero", "order")


@dataclasses.dataclass(frozen=True)
class OwnFormat(QuantizedFormat):
    method = "xinfer_jax"
    rotated: bool = False  # `ModelConfig.rotated`
    once: bool = False  # `Int8Weight.int8_activations`

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        values = f"{name}.values"
        if len(shape) == 1 or name in tensors or values not in tensors:
            return {}
        (outputs, inputs) = shape
        stored = tensors[values]
        by_output: TensorSpec = ((outputs,), {"F32"})
        if len(stored.shape) != 3:
            return {values: (shape, {"I8"}), f"{name}.scale": by_output}
        if stored.type == "I32":
            return {values: (ternary_struct(shape).values.shape, {"I32"}), f"{name}.scale": by_output}
        Y = stored.shape[1]
        packed = stored.type == "U8"
        Q = -(-inputs // max(1, Y * (2 if packed else 1)))
        specs = {values: ((Q, Y, outputs), {"U8", "I8"}), f"{name}.scale": ((Q, outputs), {"F16", "F32"})}
        optional = {f"{name}.zero": ((Q, outputs), {"U8"}), f"{name}.order": ((inputs,), {"I32"})}
        return specs | {field: spec for field, spec in optional.items() if field in tensors}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> QuantizedWeight:
        return self._make_weight(name, shape, tensors, lambda tensor: tensor.struct)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> QuantizedWeight:
        weight = self._make_weight(name, shape, tensors, StoredTensor.array)
        order = getattr(weight, "order", None)
        if order is not None and not np.array_equal(np.sort(order), np.arange(shape[1])):
            raise InputError(f"{name}: order does not name every input once: fetch the checkpoint again")
        return weight

    def _make_weight(
        self, name: str, shape: Shape, tensors: Tensors, get: Callable[[StoredTensor], Any]
    ) -> QuantizedWeight:
        arrays = {field: get(tensors[full]) for field in _FIELDS if (full := f"{name}.{field}") in tensors}
        if len(arrays["values"].shape) == 2:
            return Int8Weight(arrays["values"], arrays["scale"], self.once)
        if arrays["values"].dtype == np.int32:
            return TernaryWeight(arrays["values"], arrays["scale"], shape[1])
        return GroupedWeight(**({"zero": None, "order": None} | arrays), inputs=shape[1])


def save_checkpoint(
    path: str | Path,
    model_dir: str | Path | None,
    params: Params,
    settings: Mapping[str, Any],
    *,
    rotated: bool,
) -> None:
    """Writes a checkpoint. `load_model` loads the same bits in every leaf.

    Args:
        path: the directory, created if needed.
        model_dir: where the tokenizer and generation_config.json are copied from; None: they are not copied.
        params: the parameter tree; matrices may be quantized. Padding of a vocabulary that is sharded over a
            mesh is left out.
        settings: contents of config.json.
        rotated: the config's `rotated`.

    Raises:
        InputError: no matrix of a rotated model is quantized; `path` is `model_dir`, or cannot be written.
    """
    path = Path(path)
    specs, tree = jax.tree.flatten(file_specs(from_hf(settings)))
    tensors: dict[str, Any] = {}
    for spec, leaf in zip(specs, tree.flatten_up_to(params), strict=True):  # type: ignore[attr-defined]
        leaf = _drop_vocab_padding(spec, leaf)
        if is_quantized(leaf) and len(spec.shape) > 2:
            raise InputError(
                "quantized experts cannot be saved: load the float checkpoint with quantize, or one in MXFP4"
                " with dequantize"
            )
        if is_quantized(leaf):
            fields = {f"{spec.hf_name}.{name}": getattr(leaf, name, None) for name in _FIELDS}
            tensors |= {name: field for name, field in fields.items() if field is not None}
        else:
            tensors |= zip(spec.tensor_shapes(), leaf if len(spec.shape) == 3 else [leaf], strict=True)
    settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    if rotated and not any(map(is_quantized, leaves)):
        raise InputError("a rotated model of float weights cannot be saved: quantize its matrices first")
    if any(map(is_quantized, leaves)):
        flags = {"rotated": rotated, "once": any(getattr(leaf, "int8_activations", False) for leaf in leaves)}
        flags = {name: True for name, value in flags.items() if value}
        version = VERSION_ROTATED if flags else VERSION
        settings["quantization_config"] = {"quant_method": OwnFormat.method, "version": version} | flags
    try:
        path.mkdir(parents=True, exist_ok=True)
        if model_dir is not None:
            _copy_small_files(Path(model_dir), path)
        arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        save_file(arrays, path / WEIGHTS, {"format": "pt"})
        (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def _drop_vocab_padding(spec: ParamSpec, leaf: Any) -> Any:
    if spec.axes[0] != "vocab" or leaf.shape == spec.shape:
        return leaf

    def drop_rows(x: Any, mesh_axes: PartitionSpec) -> Any:
        return x[tuple(slice(spec.shape[0] if mesh_axis else None) for mesh_axis in mesh_axes)]

    return jax.tree.map(drop_rows, leaf, partition_specs(spec, leaf, None, RULES))


def _copy_small_files(model_dir: Path, path: Path) -> None:
    if path.samefile(model_dir):
        raise InputError(f"{path} is the checkpoint that is read: give another directory to write to")
    for file in (file for pattern in TEXT_FILES for file in model_dir.glob(pattern) if file.is_file()):
        copy = path / file.relative_to(model_dir)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
