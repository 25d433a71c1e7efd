"""Adapters in the files of PEFT, adapter_config.json and adapter_model.safetensors: a pair lora_A and lora_B
for each module of transformers' model. A module may hold several matrices of the tree, as `qkv_proj` does:
they share its lora_A.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from ..checkpoint.files import download_adapter, read_json, resolve_directory
from ..checkpoint.tensor_files import on_host, write_whole
from ..checkpoint.tensors import read_tensor_file
from ..config.model_config import ModelConfig
from ..errors import InputError, format_names
from ..families.conversion import leaf_of_tensors, plan_tensors
from ..families.naming import FileSpec, file_specs
from ..families.skipped_tensors import full_name, text_name
from ..weights.params import resolve_dtype
from .adapter import Adapter, LowRank, adaptable_matrices, make_adapter
from .peft_config import read_modules

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_CONFIG = 2**20  # bytes
_ENDS = (".lora_A.weight", ".lora_B.weight")


def load_adapter(config: ModelConfig, path_or_repo_id: str | Path, *, dtype: Any = None) -> Adapter:
    """Returns a LoRA adapter as PEFT saves it.

    Args:
        config: of the model that it was trained for.
        path_or_repo_id: its directory, or a hub name owner/name.
        dtype: of the arrays; None: that of the file.

    Raises:
        InputError: a file is missing or damaged; adapter_config.json has what is not done; tensors that are
            missing, unknown, misshapen or not finite.
    """
    path = resolve_directory(path_or_repo_id, download_adapter)
    file = path / CONFIG
    if file.is_file() and file.stat().st_size > _MAX_CONFIG:
        raise InputError(f"{file} has {file.stat().st_size} bytes, the limit is {_MAX_CONFIG}")
    settings = read_json(file)
    if settings is None:
        raise InputError(f"{path} holds no {CONFIG}: give the directory of an adapter as PEFT saves it")
    stored = read_tensor_file(path / WEIGHTS)
    try:
        return _read(config, settings, stored, None if dtype is None else resolve_dtype(dtype))
    except InputError as error:
        raise InputError(f"adapter {path}: {error}") from None


def _read(config: ModelConfig, settings: Mapping[str, Any], stored: Mapping[str, Any], dtype: Any) -> Adapter:
    named = {_own_name(name): tensor for name, tensor in stored.items()}
    if len(named) < len(stored):
        twice = Counter(map(_own_name, stored)) - Counter(list(named))
        raise InputError(f"tensors are there twice, by two prefixes: {format_names(sorted(twice), 8)}")
    modules = _modules(config, {name.removesuffix(end) for name in named for end in _ENDS})
    raw = next((name.removeprefix(_PREFIX) for name in stored), "")
    by_raw = {full_name(module, raw): module for module in modules}
    wanted = {by_raw[name]: how for name, how in read_modules(settings, by_raw, by_raw).items()}
    expected: dict[str, tuple[int, ...]] = {}
    for module, (rank, _) in wanted.items():
        spec = modules[module][0]
        (shape_of_b,) = _of_rank(spec, rank).tensor_shapes({f"{module}.weight"}).values()
        shapes = (rank, spec.shape[1]), shape_of_b
        expected |= {f"{module}{end}": shape for end, shape in zip(_ENDS, shapes, strict=True)}
    _check_tensors(expected, named)
    matrices: dict[str, LowRank] = {}
    scales: dict[str, float] = {}
    for module, (rank, scale) in wanted.items():
        a, b = (np.asarray(named[f"{module}{end}"].array(), dtype) for end in _ENDS)
        if not all(np.isfinite(x.astype(np.float32)).all() for x in (a, b)):
            raise InputError(f"{module} has NaN or inf")
        for spec in modules[module]:
            path = spec.name.removesuffix(".weight")
            own_b = leaf_of_tensors(_of_rank(spec, rank), {f"{module}.weight": b})
            matrices[path] = LowRank(jnp.asarray(a), jnp.asarray(own_b))
            scales[path] = scale
    return make_adapter(matrices, scales)


def save_adapter(path: str | Path, adapter: Adapter, config: ModelConfig, *, base: str | None = None) -> None:
    """Writes an adapter as PEFT does. Matrices that a module of transformers holds together, and that have
    each their own `a`, become one pair of the sum of their ranks.

    Args:
        path: a new directory.
        adapter, config: the adapter, and the model's config.
        base: the name of the model, for PEFT.

    Raises:
        InputError: the directory exists or cannot be written; the adapter does not fit the config.
    """
    path = Path(path).expanduser()
    if path.exists():
        raise InputError(f"{path} exists: give another directory")
    if unknown := adapter.matrices.keys() - adaptable_matrices(config).keys():
        raise InputError(f"the adapter has what the model has not: {format_names(sorted(unknown), 8)}")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, specs in _modules(config, ()).items():
        if pair := _joined(adapter, module, specs):
            (a, b, scale) = pair
            ranks[module] = len(a)
            alphas[module] = scale * len(a)
            tensors |= {f"{_PREFIX}{module}{end}": x for end, x in zip(_ENDS, (a, b), strict=True)}
    if not ranks:
        raise InputError("the adapter has no matrices: give one that changes the model")
    (rank, alpha) = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    settings = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True, r=rank,
        lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=sorted(ranks),
        rank_pattern={module: own for module, own in ranks.items() if own != rank},
        alpha_pattern={module: own for module, own in alphas.items() if own != alpha},
    )  # fmt: skip

    def write(directory: Path | None) -> None:
        if directory is not None:
            (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
            safetensors.numpy.save_file(tensors, directory / WEIGHTS, dict(format="pt"))

    write_whole(path, write)


def _joined(
    adapter: Adapter, module: str, specs: list[FileSpec]
) -> tuple[np.ndarray, np.ndarray, float] | None:
    """The pair of a module of these matrices, and its scale; None: the adapter changes none of them."""
    scale_of = adapter.scale_of()
    paths = [spec.name.removesuffix(".weight") for spec in specs]
    found = [path for path in paths if path in adapter.matrices]
    if not found:
        return None
    pairs = {path: [on_host(x) for x in adapter.matrices[path]] for path in found}
    scale = next(filter(None, map(scale_of.get, found)), 0.0)  # others are told by it
    as_, bs = [[pair[i] for pair in pairs.values()] for i in (0, 1)]
    if all(np.array_equal(a, as_[0]) for a in as_) and all(scale_of[path] == scale for path in found):
        a = as_[0]
        places = [0] * len(found)
    else:
        a = np.concatenate(as_)
        places = [sum(map(len, as_[:i])) for i in range(len(as_))]
    leaves = {
        path: np.zeros((spec.shape[0], len(a)), a.dtype) for path, spec in zip(paths, specs, strict=True)
    }
    for path, at, b in zip(found, places, bs, strict=True):
        leaves[path][:, at : at + b.shape[1]] = b if scale_of[path] == scale else b * (scale_of[path] / scale)
    (tensor,) = plan_tensors([_of_rank(spec, len(a)) for spec in specs], leaves.values()).values()
    return a, np.ascontiguousarray(tensor.make(lambda leaf: leaf)), scale


def _modules(config: ModelConfig, found: Container[str]) -> dict[str, list[FileSpec]]:
    """The matrices of each module that can have an adapter, in published files or where it is found."""
    modules: dict[str, list[FileSpec]] = {}
    adaptable = adaptable_matrices(config)
    for spec in jax.tree.leaves(file_specs(config)):
        if spec.name.removesuffix(".weight") not in adaptable:
            continue
        names = [
            name.removesuffix(".weight")
            for name in (spec.published_name, spec.fused_name, spec.hf_name)
            if name
        ]
        modules.setdefault(next((name for name in names if name in found), names[0]), []).append(spec)
    return modules


def _own_name(name: str) -> str:
    """The name within the text model, of a tensor of the file."""
    own = text_name(name.removeprefix(_PREFIX))
    if own is None:
        raise InputError(f"{name} is not of the text model")
    return own


def _check_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Any]) -> None:
    """Raises one InputError for all tensors that are missing, unknown or misshapen, or are no floats."""
    faults = [f"missing {name}" for name in expected.keys() - found.keys()]
    faults += [f"unknown {name}" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        tensor = found[name]
        if tensor.shape != expected[name]:
            faults.append(
                f"{name} has shape {list(tensor.shape)}, rank and model ask for {list(expected[name])}"
            )
        elif tensor.type not in ("F32", "BF16", "F16"):
            faults.append(f"{name} has type {tensor.type}")
    if faults:
        raise InputError(f"tensors do not fit: {format_names(sorted(faults), 8)}")


def _of_rank(spec: FileSpec, rank: int) -> FileSpec:
    """The spec of a matrix as that of its `lora_B`, which is divided into matrices as the weight is."""
    return dataclasses.replace(spec, shape=(spec.shape[0], rank))
