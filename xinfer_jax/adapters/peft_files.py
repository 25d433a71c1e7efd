"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from ..annotations import Dtype
from ..config.model_config import ModelConfig, check_config
from ..errors import InputError, format_names, format_value
from ..families.naming import module_name
from ..families.skipped_tensors import find_prefix, full_name, text_name
from ..formats.files import file_exists, read_json
from ..formats.hub import HubOptions, download_adapter, resolve_directory
from ..formats.tensor_files import on_host, write_whole
from ..formats.tensors import read_tensor_file
from ..modes import in_default_modes
from ..old_names import check_order
from ..weights.params import resolve_dtype
from .adapter import Adapter, LowRank, adaptable_matrices, make_adapter
from .peft_config import read_modules, read_norms
from .peft_modules import (
    EMBED,
    HEAD,
    PeftModule,
    norm_modules,
    of_all_experts,
    peft_modules,
    with_tied_head,
    with_wrappers,
)

_LOGGER = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_CONFIG = 2**20  # bytes
_MAX_HEADER = 2**18  # bytes, and more for each tensor that an adapter of the model can have:
_HEADER_PER_TENSOR = 256
_BASE = ".base_layer.weight"  # PEFT also saves the matrices of embedding and head themselves


@in_default_modes
def load_adapter(  # noqa: PLR0913  a public function
    config: ModelConfig,
    path_or_repo_id: str | Path,
    *,
    dtype: Dtype | None = None,
    base: str | None = None,
    max_rank: int | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
) -> Adapter:
    """Loads a LoRA adapter that PEFT or `save_adapter` saved.

    Args:
        config: the config of the model for which the adapter was trained.
        path_or_repo_id: the adapter's directory, or a name on the hub such as ``owner/name`` or
            ``owner/name@revision``.
        dtype: the dtype of the arrays. None keeps the dtype of the file.
        base: the name or path of your model. If the adapter names another model, the log has a warning. None
            does not compare.
        max_rank: the largest allowed rank of a matrix. None allows any rank.
        revision: a branch, a tag or a commit of a repository on the hub. None takes the default branch.
        token: an access token of the hub (see `load_model`).
        subfolder: the folder of the repository, or of the directory, that has the files. "" is its root.
        local_files_only: True takes only files that were downloaded before, and does not ask the hub.

    Returns:
        An `Adapter`, for `with_adapter` or `Engine.add_adapter`.

    Raises:
        InputError: a file is missing or damaged.
        InputError: adapter_config.json has an unsupported setting.
        InputError: tensors are missing, unknown, misshapen or not finite.
        InputError: a rank exceeds `max_rank`. This is checked before any tensor is read.
    """
    hub = HubOptions(revision, token, subfolder, local_files_only)
    path = resolve_directory(path_or_repo_id, download_adapter, "adapter", hub)
    file = path / CONFIG
    if file.is_file() and file.stat().st_size > _MAX_CONFIG:
        raise InputError(f"{file} has {file.stat().st_size} bytes, the limit is {_MAX_CONFIG}")
    settings = read_json(file)
    if settings is None:
        raise InputError(f"{path} holds no {CONFIG}: give the directory of an adapter as PEFT saves it")
    trained = settings.get("base_model_name_or_path")
    if base and trained and isinstance(trained, str) and Path(base).name != Path(trained).name:
        names = format_value(trained), format_value(base)
        _LOGGER.warning("%s is an adapter of %s, the model is %s", path, *names)
    if not file_exists(path / WEIGHTS):
        raise InputError(f"{path} holds no {WEIGHTS}: save the adapter as safetensors")
    matrices = adaptable_matrices(config).values()
    pairs = sum(spec.shape[0] if len(spec.shape) > 2 else 1 for spec in matrices)  # one for each expert
    stored = read_tensor_file(path / WEIGHTS, _MAX_HEADER + 2 * pairs * _HEADER_PER_TENSOR)
    try:
        return _read(config, settings, stored, None if dtype is None else resolve_dtype(dtype), max_rank)
    except InputError as error:
        raise InputError(f"adapter {path}: {error}") from None


def _read(
    config: ModelConfig,
    settings: Mapping[str, Any],
    stored: Mapping[str, Any],
    dtype: Any,
    max_rank: int | None,
) -> Adapter:
    named = {_own_name(name): tensor for name, tensor in stored.items()}
    if len(named) < len(stored):
        twice = Counter(map(_own_name, stored)) - Counter(list(named))
        raise InputError(f"tensors are there twice, by two prefixes: {format_names(sorted(twice), 8)}")
    modules = peft_modules(config, {name.rpartition(".lora_")[0] for name in named})
    _check_vocabulary(modules.values(), named)
    raw = next(filter(find_prefix, (name.removeprefix(_PREFIX) for name in stored)), "")
    by_raw = {full_name(name, raw): module for name, module in modules.items()}
    wanted = _wanted(settings, by_raw, named)
    rank = max(rank for _, rank, _ in wanted)
    if max_rank is not None and rank > max_rank:
        raise InputError(f"it has rank {rank}, and max_rank is {max_rank}: make the engine with a larger one")
    if config.tie_word_embeddings and settings.get("ensure_weight_tying"):
        head = next(module for module in modules.values() if module.paths == [HEAD])
        wanted += [(head, rank, scale) for module, rank, scale in wanted if module.paths == [EMBED]]
    wanted = [(module.as_stored(named), rank, scale) for module, rank, scale in wanted]
    expected: dict[str, tuple[int, ...]] = {}
    for module, rank, _ in wanted:
        expected |= module.shapes(rank)
        if module.name + _BASE in named and "vocab" in module.specs[0].axes:
            expected[module.name + _BASE] = module.specs[0].shape
    norms = {full_name(name, raw): spec for name, spec in norm_modules(config).items()}
    own_norms = [norms[name] for name in read_norms(settings, norms, by_raw)]
    _check_tensors(expected | {spec.hf_name: spec.shape for spec in own_norms}, named)
    matrices: dict[str, LowRank] = {}
    scales: dict[str, float] = {}
    of_experts: dict[str, dict[int, tuple[LowRank, float]]] = {}
    for module, _, scale in wanted:
        a, b = (_read_array(named, name, dtype) for name in module.tensors)
        for path, pair in module.matrices(a, b).items():
            if module.expert is None:
                matrices[path] = pair
                scales[path] = scale
            else:
                of_experts.setdefault(path, {})[module.expert] = pair, scale
    for path, pairs in of_experts.items():
        matrices[path], scales[path] = of_all_experts(path, pairs, config.num_experts)
    new_norms = {spec.name: _read_array(named, spec.hf_name, dtype) for spec in own_norms}
    return jax.tree.map(jnp.asarray, with_tied_head(config, make_adapter(matrices, scales, new_norms)))


def _read_array(stored: Mapping[str, Any], name: str, dtype: Any) -> np.ndarray:
    x = np.asarray(stored[name].array(), dtype)
    if not np.isfinite(x.astype(np.float32)).all():
        raise InputError(f"{name} has NaN or inf")
    return x


def _wanted(
    settings: Mapping[str, Any], found: Mapping[str, PeftModule], named: Mapping[str, Any]
) -> list[tuple[PeftModule, int, float]]:
    """Returns the modules that an adapter changes, their ranks and factors. found: the tensors by their names
    in the file.
    """
    modules = {name: module for name, module in found.items() if not module.num_experts}
    parameters = {
        name if module.num_experts else f"{name}.weight": module
        for name, module in found.items()
        if not module.is_embedding and module.expert is None
    }
    stored = {name.rpartition(".lora_")[0] for name in named}
    linear = [name for name, module in modules.items() if module.is_linear(module.name in stored)]
    hows = read_modules(settings, modules, linear, parameters)
    wanted = with_wrappers([(parameters | modules)[name] for name in hows])
    return [(module, *how) for module, how in zip(wanted, hows.values(), strict=True)]


@in_default_modes
def save_adapter(adapter: Adapter, config: ModelConfig, path: str | Path, *, base: str | None = None) -> None:
    """Writes a LoRA adapter as PEFT does.

    If transformers joins several matrices in one module, and each has its own `a`, they become one pair of
    matrices. Its rank is the sum of their ranks.

    Args:
        adapter: the adapter.
        config: the config of the model.
        path: a new directory.
        base: the name of the model, which PEFT reads. None writes no name.

    Raises:
        InputError: the directory exists or cannot be written, or the adapter does not fit the config.
    """
    check_order("save_adapter(adapter, config, path)", adapter, path)
    if not isinstance(adapter, Adapter):
        raise InputError(f"adapter must be an Adapter, as init_adapter returns, got {format_value(adapter)}")
    check_config(config)
    path = Path(path).expanduser()
    if path.exists():
        raise InputError(f"{path} exists: give another directory")
    norms = {spec.name: module_name(config, name) for name, spec in norm_modules(config).items()}
    if unknown := {*adapter.matrices, *adapter.norms} - {*adaptable_matrices(config), *norms}:
        raise InputError(f"the adapter has what the model has not: {format_names(sorted(unknown), 8)}")
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    ties_head = config.tie_word_embeddings and EMBED in adapter.matrices and HEAD not in adapter.matrices
    if ties_head:
        matrices = adapter.matrices | {HEAD: adapter.matrices[EMBED]}
        scales = adapter.scale_of() | {HEAD: adapter.scale_of()[EMBED]}
        adapter = make_adapter(matrices, scales, adapter.norms)
    targets: dict[str, list[str]] = dict(target_modules=[], target_parameters=[])
    modules = [m for m in peft_modules(config).values() if any(path in adapter.matrices for path in m.paths)]
    for module in with_wrappers(modules):
        if pair := module.as_in(adapter).pair(adapter):
            (own, size, scale) = pair
            # transformers' model has no module of experts, and PEFT takes an MLP beside them for them.
            is_mlp = config.experts and module.paths[0].endswith((".gate", ".up", ".down"))
            as_parameter = module.num_experts or module.is_router or is_mlp
            name = module_name(config, module.parameter if as_parameter else module.name)
            targets["target_parameters" if as_parameter else "target_modules"].append(name)
            ranks[name] = size
            alphas[name] = scale * size
            tensors |= {f"{_PREFIX}{module_name(config, tensor)}": x for tensor, x in own.items()}
    tensors |= {f"{_PREFIX}{norms[path]}.weight": on_host(x) for path, x in adapter.norms.items()}
    if not ranks:
        raise InputError("the adapter has no matrices: give one that changes the model")
    (rank, alpha) = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    settings = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True, r=rank,
        lora_alpha=alpha, lora_dropout=0.0, bias="none", **targets,
        rank_pattern={module: own for module, own in ranks.items() if own != rank},
        alpha_pattern={module: own for module, own in alphas.items() if own != alpha},
        modules_to_save=[norms[path] for path in adapter.norms] or None, ensure_weight_tying=ties_head,
    )  # fmt: skip

    def write(directory: Path | None) -> None:
        if directory is not None:
            (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
            safetensors.numpy.save_file(tensors, directory / WEIGHTS, dict(format="pt"))

    write_whole(path, write)


def _own_name(name: str) -> str:
    """Returns the name within the text model, of a tensor of the file."""
    own = text_name(name.removeprefix(_PREFIX))
    if own is None:
        raise InputError(f"{name} is not of the text model")
    return own


def _check_vocabulary(modules: Iterable[PeftModule], found: Mapping[str, Any]) -> None:
    """Raises InputError if an embedding or a head is there as a whole, or its number of rows differs from the
    model's.
    """
    for module in modules:
        spec = module.specs[0]
        if "vocab" not in spec.axes:
            continue
        whole = f"{module.name}.weight"
        pair = module.tensors[0 if module.is_embedding else 1]
        for name in (whole, module.name + _BASE, pair):
            shape = found[name].shape if name in found else ()
            axis = -1 if name == pair and module.is_embedding else 0
            if len(shape) == 2 and (rows := shape[axis]) != spec.shape[0]:
                raise InputError(
                    f"its {module.name} has {rows} rows, the model's {spec.shape[0]}: in transformers call"
                    f" resize_token_embeddings({rows}) on the model, load the adapter with PEFT, call"
                    " merge_and_unload(), and save the model for here"
                )
        if whole in found:
            raise InputError(f"it has the whole {whole}: merge it with PEFT, by merge_and_unload()")


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
