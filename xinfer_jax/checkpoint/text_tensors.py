"""The tensors of the text model in a checkpoint that has others too: a vision model, draft layers."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from ..errors import format_names
from .tensors import StoredTensor

# Prefixes of names, and what the text model alone would have in their place; None: the tensor is not read.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.": "",
    "model.visual.": None,
    "visual.": None,
    "mtp.": None,
    **dict.fromkeys(f"model.{part}_tower." for part in ("vision", "audio")),
    **dict.fromkeys(f"model.embed_{part}." for part in ("vision", "audio")),
}


def text_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by the names that the text model alone would have. One warning names those that are
    not read: images and sound are not served, and the layers for multi-token prediction (`mtp`) do not draft.
    """
    found: dict[str, StoredTensor] = {}
    unread: dict[str, int] = {}  # prefixes and how many tensors they have
    for name, tensor in tensors.items():
        prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
        renamed = _PREFIXES.get(prefix, "")
        if renamed is None:
            unread[prefix] = unread.get(prefix, 0) + 1
        else:
            found[renamed + name.removeprefix(prefix)] = tensor
    if unread:
        names = format_names(sorted(f"{prefix}* ({count})" for prefix, count in unread.items()))
        warnings.warn(f"{path}: tensors that are not read, since only text is served: {names}", stacklevel=5)
    return found
