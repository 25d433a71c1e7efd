"""Shapes of real models, as the contents of their Hugging Face config.json. No download is needed.

They are in model_shapes.json. Sizes of Gemma 4 are from the metadata of GGUF files (26B-A4B), and from
Megatron Bridge's documentation and gemma.cpp's config (E4B). Experts of gpt-oss are in MXFP4: `xinfer-jax
plan --weights=mxfp4`. The matrices of bitnet-2b are ternary: `xinfer-jax bench --quantize=ternary`.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..formats.files import read_json

_FILE = Path(__file__).with_suffix(".json")
SHAPES: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))


def hf_config(name_or_dir: str) -> dict[str, Any]:
    """Returns the config.json of a built-in shape or of a directory.

    Raises:
        InputError: it is neither. The message lists the shapes.
    """
    if name_or_dir in SHAPES:
        return dict(SHAPES[name_or_dir])
    settings = read_json(Path(name_or_dir).expanduser() / "config.json")
    if settings is None:
        raise InputError(
            f"config {name_or_dir!r} is neither a built-in shape ({', '.join(SHAPES)}) nor a directory with"
            " config.json"
        )
    return settings
