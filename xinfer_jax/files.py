"""Reading a checkpoint's small files, and finding a checkpoint by directory or hub name."""

import json
import os
import re
from pathlib import Path
from typing import Any

from .errors import InputError

# What a checkpoint is loaded from; the rest of a hub repository is not fetched.
_PATTERNS = [
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
]


def read_json(file: Path) -> dict[str, Any] | None:
    """The object that a JSON file holds; None where there is no such file.

    Raises:
        InputError: not JSON, or not an object.
    """
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def checkpoint_dir(path_or_repo_id: str | Path) -> Path:
    """The directory of a checkpoint; a name of the form owner/name that is none is fetched from the Hugging
    Face hub.

    Raises:
        InputError: neither a directory nor a hub repository that can be had.
    """
    name, path = str(path_or_repo_id), Path(os.path.expanduser(path_or_repo_id))
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise InputError(f"model {name!r} cannot be opened: {error}") from error
    if os.path.lexists(path) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise InputError(f"model {name!r} is neither a directory nor a hub name of the form owner/name")
    import huggingface_hub  # only here: it takes a while to import

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # network, permission, missing repository: many types, one remedy
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {name!r} is no directory and could not be fetched from the hub: {reason}"
        ) from error
