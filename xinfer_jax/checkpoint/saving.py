"""`save_model`: a checkpoint directory that this library and transformers open."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..annotations import Dtype
from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_value
from ..families.conversion import TensorOfLeaves, plan_tensors, specs_and_leaves
from ..families.draft_heads import mtp_spec, write_draft_head
from ..families.naming import TIED, FileSpec, file_specs, published_name
from ..families.reading import from_hf
from ..families.skipped_tensors import text_name, unused_names
from ..families.wrappers import is_tied_without_head, text_settings
from ..families.writing import to_hf
from ..formats.files import TEXT_FILES, read_json
from ..formats.hub import checkpoint_dir
from ..formats.quantized_formats import (
    SETTINGS_FILES,
    format_to_write,
    quantization_settings,
    read_format,
)
from ..formats.scaled_tensor import MatrixFormat, quantized_shapes
from ..formats.tensor_files import (
    TensorToWrite,
    on_host,
    stored_tensor,
    tensor_of_leaves,
    write_checkpoint,
    write_whole,
)
from ..formats.tensors import DTYPES, StoredFormat, StoredTensor, open_tensors
from ..formats.text_tensors import has_head, other_tensors
from ..modes import in_default_modes
from ..old_names import check_order
from ..tokenization.tokenizer import Tokenizer
from ..weights.params import Params, activation_dtype, check_params, resolve_dtype
from ..weights.quantized_weight import is_quantized
from ..weights.resharding import with_kv_heads_once
from .config_difference import find_config_difference

_LARGE = re.compile(r"^\.|\.(safetensors|bin|pth?|gguf|h5|msgpack|onnx)$|\.index\.json$")  # not copied
_FLOATS = {np.dtype(DTYPES[name]) for name in ("F32", "F16", "BF16")}


@in_default_modes
def save_model(
    params: Params,
    config: ModelConfig,
    path: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    like: str | Path | None = None,
    max_shard_bytes: int = 5 << 30,
    dtype: Dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint directory, which `load_model` and transformers' `AutoModelForCausalLM` open.

    The directory appears only when all files are written, so a crash leaves no half checkpoint. Next to the
    parameters, one tensor at a time is on the host. If the parameters are sharded over several processes,
    call this in each of them. Process 0 writes the files.

    Quantized matrices that come from a checkpoint are written in its format: AWQ, GPTQ, BitNet, FP8, MXFP4 or
    W4A16. Matrices that this library quantized are written in this library's own format, which only this
    library reads.

    Example:
        >>> import tempfile
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     xj.save_model(model.params, model.config, f"{folder}/tuned", tokenizer=model.tokenizer)
        ...     xj.load_model(f"{folder}/tuned").config == model.config
        True

    Args:
        params: the parameter tree of the model.
        config: the config of the model, from `load_model` or `ModelConfig.from_hf`.
        path: the directory to write, or a symbolic link to it.
        tokenizer: a tokenizer whose files are written too. None writes no tokenizer.
        like: the path of a checkpoint with this config, for example the checkpoint that you fine-tuned. It
            may be a model that also takes images, and it may be `path` itself. Tensor names and config.json
            then follow `like`. Tensors and small files that this library does not read are copied from it.
            Key heads that a mesh repeated are written once. None writes the tensor names of
            the model's family, and a config.json from `config`.
        max_shard_bytes: the largest size of a file in bytes, unless a single tensor is larger.
        dtype: the dtype of written floats: float32, bfloat16 or float16. None keeps the dtype of each array.
        overwrite: True replaces a checkpoint that exists at `path`. While the new directory takes its place,
            the old one is named PATH.old.

    Raises:
        InputError: the parameters do not fit the config, or the config does not fit `like`.
        InputError: the format cannot store some matrices. The message names them.
        InputError: `path` exists or cannot be written.
    """
    check_order("save_model(params, config, path)", params, path)
    check_params(params, config)
    if not isinstance(tokenizer, Tokenizer | None):
        raise InputError(
            f"tokenizer must be a Tokenizer, as model.tokenizer is, got {format_value(tokenizer)}"
        )
    path = Path(os.path.realpath(path))
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise InputError(
            f"max_shard_bytes must be a whole number from 1 on, got {format_value(max_shard_bytes)}"
        )
    check_target(path, overwrite)
    dtype = None if dtype is None else np.dtype(resolve_dtype(dtype))
    source = None if like is None else checkpoint_dir(like)
    kept = {} if source is None else open_tensors(source)
    kept_format = None
    if source is None:
        settings = to_hf(config)
    else:
        (settings, original) = _settings_like(source, config, has_head(kept))
        if original != config:
            params = with_kv_heads_once(params, config, original)
            config = original
        kept_format = read_format(quantization_settings(text_settings(settings), source))
        if isinstance(kept_format, MatrixFormat):
            kept_format = kept_format.of_files(kept)
    (tensors, quantization) = _tensors(params, config, dtype, kept, kept_format)
    own = _specs_with_dtypes(config)
    of_model = (x.type for name, x in tensors.items() if (text_name(name) or name) not in own)
    floats = {*of_model} & {"F32", "F16", "BF16"}
    name = next((np.dtype(DTYPES[type]).name for type in ("F32", "BF16", "F16") if type in floats), None)
    _set_dtype(settings, name)
    settings |= quantization
    files = _small_files(source, tokenizer, config)
    write_whole(path, partial(write_checkpoint, tensors, settings, files, max_shard_bytes))


def check_target(path: Path, overwrite: bool) -> None:
    """Raises InputError if a checkpoint cannot be written to this directory."""
    if not path.exists():
        return
    if os.path.ismount(path):  # nor can it be renamed
        raise InputError(f"{path} is where a disk is mounted: give a directory within it")
    is_empty = path.is_dir() and not any(path.iterdir())
    if not is_empty and not overwrite:
        raise InputError(f"{path} exists: give another directory, or overwrite=True")
    if not is_empty and not (path / "config.json").is_file():
        raise InputError(
            f"{path} holds no config.json, so it is no checkpoint to overwrite: give another directory"
        )
    if os.path.lexists(old := f"{path}.old"):
        raise InputError(f"{old} exists, where the directory would be meanwhile: move it away")


def _settings_like(source: Path, config: ModelConfig, is_untied: bool) -> tuple[dict[str, Any], ModelConfig]:
    """Returns config.json of another checkpoint with this config, and its own config, without repeated key
    heads. is_untied: True: it has a head.
    """
    settings = read_json(source / "config.json")
    if settings is None:
        raise InputError(f"like: {source} holds no config.json")
    other = from_hf(settings | dict(architectures=None))
    other = dataclasses.replace(other, quantization_config=config.quantization_config)
    if config.draft_head is not None:
        other = dataclasses.replace(other, draft_head=mtp_spec(other))
        text = settings.get("text_config")
        of_text = text if isinstance(text, dict) else settings
        of_text |= write_draft_head(config)
    if not is_untied or is_tied_without_head(settings):  # of no head also models of vectors alone
        other = dataclasses.replace(other, tie_word_embeddings=not is_untied)
    if difference := find_config_difference(config, other):
        (name, ours, theirs) = difference
        raise InputError(f"like: {name} is {format_value(theirs)} in {source}, and {format_value(ours)} here")
    return settings, other


def _set_dtype(settings: dict[str, Any], dtype: str | None) -> None:
    """Sets the dtype of a model and of its text part, by its newer name, and leaves out how matrices were."""
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            part.pop("quantization_config", None)
            part["dtype"] = dtype


def _small_files(
    source: Path | None, tokenizer: Tokenizer | None, config: ModelConfig
) -> dict[str, Path | bytes]:
    """Returns the files next to weights and config.json, by name: files of another checkpoint, then files of
    the tokenizer.
    """
    ends = [*(tokenizer.eos_token_ids if tokenizer else config.eos_token_ids)]
    files: dict[str, Path | bytes] = {}
    if ends:
        files["generation_config.json"] = json.dumps({"eos_token_id": ends}).encode()
    if source is not None:
        files |= {
            file.name: file for file in source.iterdir() if file.is_file() and not _LARGE.search(file.name)
        }
        for name in ("config.json", *SETTINGS_FILES):
            files.pop(name, None)
    directory = tokenizer.directory if tokenizer else source
    if directory is not None:
        found = (file for pattern in TEXT_FILES for file in directory.glob(pattern) if file.is_file())
        files |= {str(file.relative_to(directory)): file for file in found}
    elif tokenizer is not None:
        files |= {name: text.encode() for name, text in tokenizer.files().items()}
    return files


def _tensors(
    params: Params,
    config: ModelConfig,
    dtype: Any,
    kept: Mapping[str, StoredTensor],
    kept_format: StoredFormat | None,
) -> tuple[dict[str, TensorToWrite], dict[str, Any]]:
    """Returns the tensors to write, by name, and the settings of the quantized ones for config.json.

    kept, kept_format: the tensors of the checkpoint that they are named after, and its format.
    """
    original = {text_name(name) or name: name for name in kept}
    stored = {text_name(name) or name: tensor for name, tensor in kept.items()}
    specs, leaves = specs_and_leaves(params, config)
    (quant_format, quantization) = format_to_write(config, specs, leaves)
    if isinstance(quant_format, MatrixFormat) and kept:  # its settings may have names of the whole model
        quant_format = quant_format.of_files(kept)
    is_float = [not is_quantized(leaf) for leaf in leaves]
    matrices = kept_format.with_matrices(stored) if isinstance(kept_format, MatrixFormat) else stored
    floats = plan_tensors(compress(specs, is_float), compress(leaves, is_float), matrices or None)
    if dtype is None and (others := [name for name, x in floats.items() if x.dtype not in _FLOATS]):
        raise InputError(f"{others[0]} is {floats[others[0]].dtype}: give a dtype, as dtype='float32'")
    of_model = dtype or activation_dtype(params)
    own = {
        name: _exact_dtype(floats[name], spec, stored.get(name), of_model)
        for name, spec in _specs_with_dtypes(config).items()
        if name in floats
    }
    to_write = {name: x._replace(dtype=own.get(name) or dtype or x.dtype) for name, x in floats.items()}
    if quant_format is not None:
        found = zip(specs, leaves, strict=True)
        quantized = {spec.hf_name: leaf for spec, leaf in found if is_quantized(leaf)}
        to_write |= quant_format.pack(quantized, of_model)
    tensors = {name: tensor_of_leaves(*tensor) for name, tensor in to_write.items()}
    replaced = {*tensors, *(name for spec in specs for name in spec.tensor_shapes(stored))}
    if kept_format is not None:
        replaced |= {name for name in stored if kept_format.is_unused(name, stored)}
        for spec in specs:
            shapes = {spec.hf_name: spec.shape}
            if isinstance(kept_format, MatrixFormat):
                shapes = quantized_shapes(spec.tensor_shapes(matrices), matrices)
            replaced.update(*(kept_format.tensor_specs(*of, stored) for of in shapes.items()))
    (embed, head) = TIED
    if config.tie_word_embeddings and head in original:  # under that name alone, or under both
        tied = {name: tensor for name, tensor in tensors.items() if name.startswith(embed)}
        tensors = {name: x for name, x in tensors.items() if embed in original or name not in tied}
        tensors |= {head + name.removeprefix(embed): tensor for name, tensor in tied.items()}
        replaced.add(head)
    copied = {name: tensor for name, tensor in kept.items() if (text_name(name) or name) not in replaced}
    lost = {text for name in copied if (text := text_name(name))} - unused_names(config, original)
    if lost := lost - other_tensors(lost):
        raise InputError(f"like: it has tensors that the model lacks: {format_names(sorted(lost))}")
    norm = file_specs(config)["final_norm"].hf_name
    if kept:
        named = {_name_like(original, name, norm): tensor for name, tensor in tensors.items()}
    else:
        named = {published_name(config, name): tensor for name, tensor in tensors.items()}
    return named | {name: stored_tensor(tensor) for name, tensor in copied.items()}, quantization


def _specs_with_dtypes(config: ModelConfig) -> dict[str, FileSpec]:
    """Returns the specs of leaves that have their own dtype in every model, by the names of their tensors."""
    specs = [spec for spec in jax.tree.leaves(file_specs(config)) if spec.dtype]
    return {name: spec for spec in specs for name in (spec.hf_name, spec.fused_name) if name}


def _exact_dtype(tensor: TensorOfLeaves, spec: FileSpec, stored: StoredTensor | None, of_model: Any) -> Any:
    """Returns the dtype to write of a tensor that is float32 in every tree: the dtype of the stored tensor,
    or of the model, and float32 if a number would change. Files of bfloat16 models often have a router in
    bfloat16. A new bias, all zeros, is float32.
    """
    x = np.asarray(tensor.make(on_host))
    narrower = of_model if spec.name.endswith("weight") or x.any() else x.dtype
    if stored is not None and stored.struct.dtype in _FLOATS:
        narrower = stored.struct.dtype
    return narrower if np.array_equal(x.astype(narrower).astype(x.dtype), x) else x.dtype


def _name_like(original: Mapping[str, str], name: str, norm: str) -> str:
    """Returns the name that a text model's tensor has in a checkpoint. original: its names by the names of
    the text model. norm: the name of the final norm, which every checkpoint has.
    """
    within = "model." if name.startswith("model.") else ""
    known = norm if within else TIED[1]
    prefix = original.get(known, known).removesuffix(known.removeprefix(within))
    return original.get(name) or prefix + name.removeprefix(within)
