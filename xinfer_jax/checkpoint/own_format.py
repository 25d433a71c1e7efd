"""Our own quantized checkpoints: a matrix is the tensors X.weight.values, .scale, .zero and .order."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from ..config.model_config import from_hf
from ..errors import InputError
from ..weights.layout import without_padding
from ..weights.params import Params, param_specs
from ..weights.quantized import GroupedWeight, Int8Weight, QuantizedWeight, is_quantized
from ..weights.ternary import TernaryWeight, ternary_form
from .tensors import TYPES, StoredTensor

Part = tuple[tuple[int, ...], set[str]]  # shape and types of a tensor in a file

VERSION = 1
ROTATED = 2  # the latter where programs that know only the former would give nonsense
_FIELDS = ("values", "scale", "zero", "order")
_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}


@dataclasses.dataclass(frozen=True)
class OwnFormat:
    """How the quantized matrices of such a checkpoint are stored; methods as in `FileFormat`."""

    method: ClassVar = "xinfer_jax"
    rotated: bool = False  # as the config's
    once: bool = False  # as of `Int8Weight`

    def parts(
        self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Part]:
        values = f"{name}.values"
        if len(shape) == 1 or name in tensors or values not in tensors:
            return {}
        (outputs, inputs) = shape
        stored = tensors[values]
        if len(stored.shape) != 3:
            return {values: (shape, {"I8"}), f"{name}.scale": ((outputs,), {"F32"})}
        if stored.type == "I32":
            return {
                values: (ternary_form(shape).values.shape, {"I32"}),
                f"{name}.scale": ((outputs,), {"F32"}),
            }
        Y = stored.shape[1]
        packed = stored.type == "U8"
        Q = -(-inputs // max(1, Y * (2 if packed else 1)))
        parts = {values: ((Q, Y, outputs), {"U8", "I8"}), f"{name}.scale": ((Q, outputs), {"F16", "F32"})}
        optional = {f"{name}.zero": ((Q, outputs), {"U8"}), f"{name}.order": ((inputs,), {"I32"})}
        return parts | {part: expected for part, expected in optional.items() if part in tensors}

    def form(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> QuantizedWeight:
        return self._weight(name, shape, tensors, lambda tensor: tensor.form)

    def leaf(self, name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> QuantizedWeight:
        weight = self._weight(name, shape, tensors, StoredTensor.array)
        order = getattr(weight, "order", None)
        if order is not None and not np.array_equal(np.sort(order), np.arange(shape[1])):
            raise InputError(f"{name}: order does not name every input once: fetch the checkpoint again")
        return weight

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        tensors: Mapping[str, StoredTensor],
        get: Callable[[StoredTensor], Any],
    ) -> QuantizedWeight:
        stored = {field: tensors[full] for field in _FIELDS if (full := f"{name}.{field}") in tensors}
        found = {field: get(tensor) for field, tensor in stored.items()}
        if len(found["values"].shape) == 2:
            return Int8Weight(found["values"], found["scale"], self.once)
        if found["values"].dtype == np.int32:
            return TernaryWeight(found["values"], found["scale"], shape[1])
        return GroupedWeight(**({"zero": None, "order": None} | found), inputs=shape[1])

    def spare(self, name: str, tensors: Mapping[str, StoredTensor]) -> bool:
        return False


def save_checkpoint(
    path: str | Path,
    model_dir: str | Path | None,
    params: Params,
    settings: Mapping[str, Any],
    *,
    rotated: bool,
) -> None:
    """Writes a checkpoint that `load_model` opens with the same bits in every leaf, a tensor at a time.

    Args:
        path: the directory, made if it is not there.
        model_dir: where the tokenizer and generation_config.json are copied from; None: they are not.
        params: the parameter tree, some of its matrices quantized or none. Padding of a vocabulary that lies
            over a mesh is left out.
        settings: contents of config.json.
        rotated: as the model's config has it; then matrices are quantized.

    Raises:
        InputError: no matrix of a rotated model is quantized; `path` is `model_dir`, or cannot be written.
    """
    path = Path(path)
    specs, tree = jax.tree.flatten(param_specs(from_hf(settings)))
    tensors: dict[str, Any] = {}
    for spec, leaf in zip(specs, tree.flatten_up_to(params), strict=True):  # type: ignore[attr-defined]
        leaf = without_padding(spec, leaf)
        if is_quantized(leaf):
            fields = {f"{spec.hf_name}.{name}": getattr(leaf, name, None) for name in _FIELDS}
            tensors |= {name: field for name, field in fields.items() if field is not None}
        else:
            tensors |= zip(spec.stored(), leaf if len(spec.shape) == 3 else [leaf], strict=True)
    settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    if rotated and not any(map(is_quantized, leaves)):
        raise InputError("a rotated model of float numbers cannot be kept: quantize its matrices first")
    if any(map(is_quantized, leaves)):
        about = {"rotated": rotated, "once": any(getattr(leaf, "once", False) for leaf in leaves)}
        about = {name: True for name, value in about.items() if value}
        version = ROTATED if about else VERSION
        settings["quantization_config"] = {"quant_method": OwnFormat.method, "version": version} | about
    try:
        path.mkdir(parents=True, exist_ok=True)
        if model_dir is not None and path.samefile(model_dir):
            raise InputError(f"{path} is the checkpoint that is read: give another directory to write to")
        for name in _COPIED if model_dir is not None else ():
            if (Path(model_dir) / name).is_file():
                shutil.copyfile(Path(model_dir) / name, path / name)
        _write(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def _write(file: Path, tensors: Mapping[str, jax.Array]) -> None:
    """The safetensors format: length of the header, header, data. Its own writer would hold data twice."""
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        x = tensors[name]
        start = end
        end += x.nbytes
        header[name] = dict(dtype=_NAMES[x.dtype], shape=x.shape, data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data)
