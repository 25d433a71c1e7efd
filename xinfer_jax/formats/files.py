"""Reads the small files of a checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError, format_names

BUNDLED = Path(__file__).parents[1] / "assets"  # the small trained checkpoint that comes with the library
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# Patterns of the files of text: the tokenizer, its chat templates, and defaults of sampling.
TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_LFS_POINTER = b"version https://git-lfs"
_MAX_BYTES = 2**25  # of a small file: parsed JSON takes twenty times as much


def file_exists(file: Path) -> bool:
    """Returns True if the file exists.

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
    """Returns the text of a small file, or None if it does not exist. Raises InputError."""
    if not file_exists(file):
        return None
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise InputError(f"{file} has {size} bytes, the limit is {_MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not readable text: {error}") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, or None if the file does not exist. Raises InputError."""
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
    """Returns the file of each tensor, from the index of a checkpoint in shards. None: there is no index.
    Raises InputError.
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
