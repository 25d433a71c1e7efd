"""The files that `save_model` and `save_adapter` write, and the parameters that `load_model` reads."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xinfer_jax as xj
from behaviour.recording import Records, attempt, shapes

FORMATS: dict[str, dict[str, Any]] = {  # arguments of `load_model` for a float checkpoint
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "int8": dict(dtype="float32", quantize="int8"),
    "int4": dict(dtype="float32", quantize="int4"),
    "int8-a8": dict(dtype="float32", quantize="int8", activations="int8"),
    "int4-a8": dict(dtype="float32", quantize="int4", activations="int8"),
}
STORED_FORMATS: dict[str, dict[str, Any]] = {  # for a quantized one
    "as stored": {},
    "dequantized": dict(dtype="float32", dequantize=True),
    "fp8": dict(quantize="fp8"),
}


def tensors_of(file: Path) -> Records:
    """Returns type, shape and SHA-256 of each tensor of a safetensors file, and its metadata."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, tensor in json.loads(data[8:start]).items():
        if name == "__metadata__":
            found[name] = tensor
            continue
        first, last = tensor["data_offsets"]
        digest = hashlib.sha256(data[start + first : start + last]).hexdigest()
        found[name] = f"{tensor['dtype']}{tensor['shape']} {digest}"
    return found


def files_of(folder: Path) -> Records:
    """Returns the content of each file of a checkpoint."""
    found: Records = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = tensors_of(file)
        elif file.suffix == ".json":
            found[name] = json.loads(file.read_text(encoding="utf-8"))
        elif file.is_file():
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def saved(write: Callable[[Path], None]) -> Records:
    """Returns the files that a function writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "saved")
        return files_of(Path(folder) / "saved")


def saved_model(model: xj.Model, like: Path | None) -> Records:
    return saved(lambda path: xj.save_model(model.params, model.config, path, like=like))


def file_records(folder: Path, formats: dict[str, Records]) -> Records:
    """Returns parameters and saved files of a checkpoint, loaded in each of these formats."""
    records = {}
    for name, how in formats.items():
        model = attempt(lambda how=how: xj.load_model(folder, **how))
        if isinstance(model, str):
            records[f"load {name}"] = model
            continue
        records[f"params {name}"] = shapes(model.params)
        for suffix, like in (("", None), (" like it", folder)):
            records[f"save {name}{suffix}"] = attempt(lambda of=(model, like): saved_model(*of))
    return records


def adapter_files(model: xj.Model) -> Records:
    """Returns the files of an adapter of rank 2, whose numbers are the numbers of its shapes."""
    struct = jax.eval_shape(lambda: xj.lora.init_adapter(model.config, jax.random.key(0), 2))
    adapter = jax.tree.map(lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape), struct)
    return saved(lambda path: xj.lora.save_adapter(adapter, model.config, path))
