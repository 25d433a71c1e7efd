"""The tensors of the text model in a checkpoint that has others: vision models, draft layers, value heads."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
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


# How the names of a family's tensors begin.
_FAMILIES = ("model.embed_tokens", "model.layers.", "model.norm.", "model.per_layer_", "lm_head.")
_CACHE_SCALE = re.compile(r"[._](q|k|v|kv|prob|output)_scale$")  # for keys and values in 8 bits


def text_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by the names that the text model alone would have. One warning names those that are
    not read: images and sound are not served, and the layers for multi-token prediction (`mtp`) do not draft.
    """
    found: dict[str, StoredTensor] = {}
    unread = Counter[str]()  # prefixes, and how many tensors they have
    for name, tensor in tensors.items():
        prefix = next((p for p in _PREFIXES if name.startswith(p)), "")
        renamed = _PREFIXES.get(prefix, "")
        if renamed is None:
            unread[f"{prefix}*"] += 1
        else:
            found[renamed + name.removeprefix(prefix)] = tensor
    _warn_of_unread(path, "only text is served", unread, 5)
    return found


def other_tensors(names: Iterable[str]) -> set[str]:
    """Of tensors that a model lacks, those that no family has: value heads, and scales of caches in 8 bits.

    Others within a layer belong to its sum: leaving them out would change it.
    """
    return {name for name in names if not name.startswith(_FAMILIES) or _CACHE_SCALE.search(name)}


def warn_of_other_tensors(path: Path, names: Iterable[str]) -> None:
    """One warning names the tensors that are not read, with how many there are for each pattern."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    _warn_of_unread(path, "no model has them", counts, 6)


def _warn_of_unread(path: Path, why: str, counts: Counter[str], stacklevel: int) -> None:
    if counts:
        names = format_names(f"{name} ({count})" for name, count in sorted(counts.items()))
        warnings.warn(f"{path}: tensors that are not read, since {why}: {names}", stacklevel=stacklevel)
