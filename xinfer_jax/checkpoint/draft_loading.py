"""`load_draft` and `save_draft`: a draft head with files of its own."""

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..annotations import Dtype
from ..draft_heads.draft import Draft
from ..errors import InputError, format_value
from ..families.conversion import check_shapes, plan_tensors
from ..families.draft_files import DraftFiles
from ..families.naming import FileSpec
from ..formats.files import read_json
from ..formats.hub import HubOptions, checkpoint_path, is_gguf
from ..formats.tensor_files import tensor_of_leaves, write_checkpoint, write_whole
from ..formats.tensors import TensorSpec, open_tensors
from ..modes import in_default_modes
from ..ops.operation import without_mesh_context
from ..plugins import load, names
from ..weights.param_specs import leaf_name
from ..weights.params import check_weights, resolve_dtype
from .leaf_loader import LeafLoader
from .loading import FLOATS, check_tensors
from .saving import check_target

_INTEGERS = {"I32", "I64"}
_SHARD_BYTES = 5 << 30


@without_mesh_context
def load_draft(
    path_or_repo_id: str | Path,
    dtype: Dtype | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    local_files_only: bool = False,
) -> Draft:
    """Loads a draft head that has files of its own, for speculative decoding, and returns it as a `Draft`.

    Args:
        path_or_repo_id: a directory with config.json and safetensors files, or a name on the hub such as
            ``"owner/name"`` or ``"owner/name@revision"``.
        dtype: the dtype of floats: float32, bfloat16 or float16. Choose the dtype of the model. None chooses
            float32 on a CPU and bfloat16 on other devices.
        revision: a branch, a tag or a commit of a repository on the hub. None takes the default branch.
        token: an access token of the hub, as in `load_model`.
        subfolder: the folder of the repository, or of the directory, that has the files. "" is its root.
        local_files_only: True takes only files that were downloaded before, and does not ask the hub.

    Returns:
        A `Draft`. It fits one model, or several models with equal sizes and vocabulary. The function that
        gets it checks that.

    Raises:
        InputError: the files are not of a draft head, are unreadable or do not fit their config.
    """
    dtype = resolve_dtype(dtype)
    path = _directory(path_or_repo_id, HubOptions(revision, token, subfolder, local_files_only))
    settings = _settings(path)
    files = _files_of(settings)
    if files is None:
        raise InputError(
            f"{path} holds no draft head: architectures is {format_value(settings.get('architectures'))}:"
            f" use one of {', '.join(sorted(names('draft files')))}"
        )
    if settings.get("quantization_config"):
        raise InputError(f"{path} is a quantized draft head, which is not supported: use one with floats")
    tensors = {files.rename(name): tensor for name, tensor in open_tensors(path).items()}
    head = files.read(settings, tensors)
    specs, tree = jax.tree.flatten(files.specs(head))
    expected: dict[str, TensorSpec] = {}
    for spec in specs:
        types = _INTEGERS if _is_integer(spec) else FLOATS
        expected |= {name: (shape, types) for name, shape in spec.tensor_shapes(tensors).items()}
    skipped = {name for name in tensors.keys() - expected.keys() if name.startswith(files.skipped)}
    check_tensors(path, tensors, expected, skipped)
    check_weights(sum(math.prod(spec.shape) for spec in specs) * jnp.dtype(dtype).itemsize)
    loader = LeafLoader(tensors, dtype, None, None, False, None, None, False)
    leaves = [loader.load(spec, {}, loader.struct(spec, {})) for spec in specs]
    params = jax.tree.unflatten(tree, leaves)
    if "d2t" in params:
        d2t_V = np.asarray(params["d2t"])
        _check_ids(path, "d2t", np.arange(len(d2t_V)) + d2t_V, head.config.vocab_size)
    if "token_ordering" in params:
        _check_ids(path, "token_ordering", np.asarray(params["token_ordering"]), head.config.vocab_size)
    return Draft(params, head)


@in_default_modes
def save_draft(
    draft: Draft, path: str | Path, *, dtype: Dtype | None = None, overwrite: bool = False
) -> None:
    """Writes a directory with a draft head, which `load_draft` opens.

    The directory appears only when all files are written. Tensors and settings have the names of published
    files.

    Args:
        draft: the draft head, from `load_draft`.
        path: the directory to write.
        dtype: the dtype of written floats: float32, bfloat16 or float16. None keeps the dtype of each array.
        overwrite: True replaces a checkpoint that exists at `path`.

    Raises:
        InputError: the draft is no `Draft`, or its parameters do not fit its head.
        InputError: `path` exists or cannot be written.
    """
    if not isinstance(draft, Draft):
        raise InputError(f"draft must be a Draft, as load_draft returns, got {format_value(draft)}")
    path = Path(os.path.realpath(path))
    check_target(path, overwrite)
    files: DraftFiles = load("draft files", draft.head.kind)
    specs: dict[str, FileSpec] = {spec.name: spec for spec in jax.tree.leaves(files.specs(draft.head))}
    found = jax.tree_util.tree_leaves_with_path(draft.params)
    leaves = {leaf_name(keys): leaf for keys, leaf in found}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    check_shapes("draft.params", {name: spec.shape for name, spec in specs.items()}, shapes)
    of_floats = None if dtype is None else np.dtype(resolve_dtype(dtype))
    tensors = {}
    for name, tensor in plan_tensors(specs.values(), [leaves[name] for name in specs]).items():
        kept = of_floats is None or not jnp.issubdtype(tensor.dtype, jnp.floating)
        tensors[name] = tensor_of_leaves(tensor.shape, tensor.dtype if kept else of_floats, tensor.make)
    settings = files.write(draft.head) | dict(
        dtype=np.dtype(of_floats or draft.params["final_norm"].dtype).name
    )
    write_whole(path, partial(write_checkpoint, tensors, settings, {}, _SHARD_BYTES))


def is_draft(path_or_repo_id: str | Path, hub: HubOptions | None = None) -> bool:
    """Returns True if a directory, or a repository on the hub, has a draft head. Raises InputError if it does
    not exist.
    """
    path = checkpoint_path(path_or_repo_id, "draft", hub or HubOptions())
    return not is_gguf(path) and _files_of(read_json(path / "config.json") or {}) is not None


def _directory(path_or_repo_id: Any, hub: HubOptions) -> Path:
    if path_or_repo_id is None:
        raise InputError("a draft head must be a directory or a hub name, got None: give one of them")
    path = checkpoint_path(path_or_repo_id, "draft head", hub)
    if is_gguf(path):
        raise InputError(f"{path} is a GGUF file: give a draft head with config.json and safetensors files")
    return path


def _settings(path: Path) -> Mapping[str, Any]:
    settings = read_json(path / "config.json")
    if settings is None:
        raise InputError(f"{path} holds no config.json: give the directory of a draft head")
    return settings


def _files_of(settings: Mapping[str, Any]) -> DraftFiles | None:
    """Returns the description of a draft head's files. None: they are not of a draft head."""
    architectures = settings.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    candidates = [name for name in (first, settings.get("model_type")) if isinstance(name, str)]
    return next(filter(None, (load("draft files", name) for name in candidates)), None)


def _is_integer(spec: FileSpec) -> bool:
    return spec.dtype is not None and jnp.issubdtype(spec.dtype, jnp.integer)


def _check_ids(path: Path, leaf: str, id_V: np.ndarray, vocab_size: int) -> None:
    """Raises InputError if a leaf names a token outside the vocabulary, or one token twice."""
    if id_V.min() < 0 or id_V.max() >= vocab_size or len(np.unique(id_V)) < len(id_V):
        raise InputError(
            f"{path}: {leaf} names ids from {id_V.min()} to {id_V.max()}, or one twice, in a vocabulary of"
            f" {vocab_size}: fetch the draft head again"
        )
