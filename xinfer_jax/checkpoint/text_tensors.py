"""The tensors of the text model in a checkpoint that has others: vision models, draft layers, value heads."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import format_names
from ..families.skipped_tensors import find_prefix, text_name
from .tensors import StoredTensor

# How the names of a family's tensors begin.
_FAMILIES = ("model.embed_tokens", "model.layers.", "model.norm.", "model.per_layer_", "lm_head.")
_CACHE_SCALE = re.compile(r"[._](q|k|v|kv|prob|output)_scale$")  # for keys and values in 8 bits


def text_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors by the names that the text model alone would have. One warning names those that are
    not read: images and sound are not served, and the layers for multi-token prediction (`mtp`) do not draft.
    """
    found: dict[str, StoredTensor] = {}
    skipped: Counter[str] = Counter()  # tensors by prefix
    for name, tensor in tensors.items():
        if own := text_name(name):
            found[own] = tensor
        else:
            skipped[f"{find_prefix(name)}*"] += 1
    _warn_of_skipped(path, "only text is served", skipped, 5)
    return found


def other_tensors(names: Iterable[str]) -> set[str]:
    """Of tensors that a model lacks, those that no family has: value heads, and scales of caches in 8 bits.

    Others within a layer belong to its sum: leaving them out would change it.
    """
    return {name for name in names if not name.startswith(_FAMILIES) or _CACHE_SCALE.search(name)}


def warn_of_other_tensors(path: Path, names: Iterable[str]) -> None:
    """One warning names the tensors that are not read, with how many there are for each pattern."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    _warn_of_skipped(path, "no model has them", counts, 6)


def _warn_of_skipped(path: Path, why: str, counts: Counter[str], stacklevel: int) -> None:
    if counts:
        names = format_names(f"{name} ({count})" for name, count in sorted(counts.items()))
        warnings.warn(f"{path}: tensors that are not read, since {why}: {names}", stacklevel=stacklevel)
