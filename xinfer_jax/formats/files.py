"""Finds a checkpoint by directory or hub name, and reads its small files."""

import glob
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, format_names
from .other_formats import describe_files, describe_name

BUNDLED = Path(__file__).parents[1] / "assets"  # the small trained checkpoint that comes with the library
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# Patterns of the files of text: the tokenizer, its chat templates, and defaults of sampling.
TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
# What is downloaded from a hub repository; then the shards that the index names.
_PATTERNS = [
    "modules.json", "config_sentence_transformers.json", "*_Pooling/config.json", "*_Dense/config.json",
    "*_Dense/model.safetensors", "config.json", "quantize_config.json", "quant_config.json",
    "adapter_config.json", *TEXT_FILES, WEIGHTS,
    INDEX,
]  # fmt: skip
_LFS_POINTER = b"version https://git-lfs"
_MAX_BYTES = 2**25  # of a small file: parsed JSON takes twenty times as much


def file_exists(file: Path) -> bool:
    """Returns whether the file exists.

    Raises:
        InputError: the path is a directory, a link to nothing or to itself, or a git-LFS pointer.
    """
    try:
        if file.is_file():
            with open(file, "rb") as opened:
                if opened.read(len(_LFS_POINTER)) != _LFS_POINTER:
                    return True
            raise InputError(f"{file} is a git-LFS pointer, not the file: run `git lfs pull` in its clone")
        if not os.path.lexists(file):
            return False
    except OSError as error:
        raise InputError(f"{file} cannot be opened: {error.strerror}") from error
    raise InputError(f"{file} is a directory, a broken link, or something else that is not a file: remove it")


def read_text(file: Path) -> str | None:
    """The text of a small file; None where it does not exist. Raises InputError."""
    if not file_exists(file):
        return None
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise InputError(f"{file} has {size} bytes, the limit is {_MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not readable text: {error}") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where the file does not exist. Raises InputError."""
    text = read_text(file)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def read_index(path: Path) -> dict[str, str] | None:
    """The file of each tensor, from the index of a checkpoint in shards; None: there is no index. Raises
    InputError.
    """
    index = read_json(path / INDEX)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not is_map or not weight_map:
        raise InputError(f"{path / INDEX} holds no weight_map of tensor names to file names")
    # Only the name is checked: in a hub cache the file itself is a link to elsewhere.
    names = sorted({*weight_map.values()})
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InputError(
            f"{path}: the index names shards outside the directory: {format_names(outside)};"
            " correct the index"
        )
    return weight_map


def checkpoint_path(path_or_repo_id: str | Path, noun: str = "model") -> Path:
    """Returns the GGUF file or the directory of a checkpoint, as `checkpoint_dir` finds it.

    noun: names it in errors.
    """
    path = Path(os.path.expanduser(path_or_repo_id))
    return path if is_gguf(path) else resolve_directory(path_or_repo_id, _download, noun)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def checkpoint_dir(path_or_repo_id: str | Path) -> Path:
    """The directory of a checkpoint; a name owner/name is downloaded from the Hugging Face hub. Raises
    InputError.
    """
    return resolve_directory(path_or_repo_id, _download, "model")


def resolve_directory(path_or_repo_id: str | Path, download: Callable[[str], Path], noun: str) -> Path:
    """Returns a directory, or the one that `download` makes of a hub repository's files.

    noun: "model" or "adapter", for errors.
    """
    name = str(path_or_repo_id)
    path = Path(os.path.expanduser(path_or_repo_id))
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise InputError(f"{noun} {name!r} cannot be opened: {error}") from error
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not name.endswith(".gguf")
    if os.path.lexists(path) or not is_hub_name:
        raise InputError(f"{noun} {name!r} {describe_name(name)}")
    try:
        return download(name)
    except InputError:
        raise
    except Exception as error:  # network, permission, missing repository: many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # Not chained: the traceback of the hub's package says nothing more.
        raise InputError(
            f"{noun} {name!r} does not exist here, and it could not be fetched from the hub: {reason}"
        ) from None


def download_adapter(name: str) -> Path:
    """Downloads an adapter's files from the hub, and returns their directory."""
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(name, allow_patterns="adapter_*"))


def _download(name: str) -> Path:
    """Downloads a hub repository's files that loading needs, and returns their directory."""
    import huggingface_hub  # here, since its import is slow

    path = Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    if file_exists(path / WEIGHTS):
        return path
    weight_map = read_index(path)
    if weight_map is None:
        files = huggingface_hub.list_repo_files(name, revision=path.name)
        raise InputError(f"model {name!r} {describe_files(files)}")
    # The directory of a snapshot is named after its commit: the shards are of that one too.
    shards = [glob.escape(shard) for shard in sorted({*weight_map.values()})]
    return Path(huggingface_hub.snapshot_download(name, revision=path.name, allow_patterns=shards))
