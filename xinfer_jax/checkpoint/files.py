"""Finds a checkpoint by directory or hub name, and reads its small files."""

import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import InputError

BUNDLED = Path(__file__).parents[1] / "assets"  # the small trained checkpoint that comes with the library
# The files that loading needs; no others are downloaded from a hub repository.
_PATTERNS = [
    "config.json", "quantize_config.json", "quant_config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "model.safetensors",
    "model-*.safetensors", "model.safetensors.index.json",
]  # fmt: skip
_MAX_BYTES = 2**25  # of a small file: parsed JSON takes twenty times as much


def file_exists(file: Path) -> bool:
    """Whether the file exists.

    Raises:
        InputError: the path is something else: a directory, or a link to nothing or to itself.
    """
    try:
        if file.is_file():
            return True
        if not os.path.lexists(file):
            return False
    except OSError as error:
        raise InputError(f"{file} cannot be opened: {error.strerror}") from error
    raise InputError(f"{file} is a directory, a broken link, or something else that is not a file: remove it")


def read_text(file: Path) -> str | None:
    """The text of a small file; None where the file does not exist.

    Raises:
        InputError: not a file, not UTF-8, or larger than 32 MiB.
    """
    if not file_exists(file):
        return None
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise InputError(f"{file} has {size} bytes, the limit is {_MAX_BYTES}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not readable text: {error}") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where the file does not exist.

    Raises:
        InputError: not JSON, or not an object.
    """
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


def checkpoint_dir(path_or_repo_id: str | Path) -> Path:
    """The directory of a checkpoint; a name owner/name is downloaded from the Hugging Face hub.

    Raises:
        InputError: neither a directory nor a hub repository that can be downloaded.
    """
    name = str(path_or_repo_id)
    path = Path(os.path.expanduser(path_or_repo_id))
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise InputError(f"model {name!r} cannot be opened: {error}") from error
    if os.path.lexists(path) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise InputError(f"model {name!r} is neither a directory nor a hub name of the form owner/name")
    import huggingface_hub  # here, since its import is slow

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # network, permission, missing repository: many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {name!r} is not a directory and could not be fetched from the hub: {reason}"
        ) from error
