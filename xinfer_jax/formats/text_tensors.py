"""The tensors of the text model in a checkpoint that has others: vision models, draft layers, value heads."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..config.model_config import ModelConfig
from ..errors import format_names
from ..families.skipped_tensors import INV_FREQ, find_prefix, text_name, unused_draft_names
from .tensors import StoredTensor

_LOGGER = logging.getLogger(__name__)

# How the names of a family's tensors begin.
_FAMILIES = ("model.embed_tokens", "model.layers.", "model.norm.", "model.per_layer_", "lm_head.")
_CACHE_SCALE = re.compile(r"[._](q|k|v|kv|prob|output)_(scale|zero_point)$")  # for keys and values in 8 bits


def text_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Returns the tensors by the names that the text model alone would have, and patterns with counts of the
    tensors that are known and not read: images and sound are not served, layers for multi-token prediction
    (`mtp`, or layers after the last one) are read only if the config has a draft head, and rotary frequencies
    are computed.
    """
    found: dict[str, StoredTensor] = {}
    skipped: Counter[str] = Counter()
    for name, tensor in tensors.items():
        own = text_name(name, config.draft_head is not None)
        if own:
            found[own] = tensor
        if not own or own.endswith(INV_FREQ):
            skipped[f"*{INV_FREQ}" if own else f"{find_prefix(name)}*"] += 1
    skipped.update(map(_draft_pattern, unused_draft_names(config, found)))
    return found, _counted(skipped)


def _draft_pattern(name: str) -> str:
    """Returns the pattern of a tensor of a draft head: model.layers.61.* or mtp.embed_tokens.*."""
    parts = 3 if name.startswith("model.") else 2
    return ".".join([*name.split(".")[:parts], "*"])


def has_head(names: Iterable[str]) -> bool:
    """Returns True if some tensor, quantized or not, belongs to the head."""
    return any((text_name(name) or "").startswith("lm_head.") for name in names)


def other_tensors(names: Iterable[str]) -> set[str]:
    """Returns, from the tensors that a model lacks, the ones that no family has: value heads, and scales of
    caches in 8 bits.

    Any other tensor within a layer is part of the layer's computation: leaving it out would change the
    result.
    """
    return {name for name in names if not name.startswith(_FAMILIES) or _CACHE_SCALE.search(name)}


def warn_of_other_tensors(path: Path, names: Iterable[str]) -> None:
    """Logs one warning with the names of the tensors that are not read, as patterns with their counts."""
    counts = _counted(Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    if counts:
        names_of_patterns = format_names(counts)
        _LOGGER.warning("%s: tensors that are not read, since no model has them: %s", path, names_of_patterns)


def _counted(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{name} ({count})" for name, count in sorted(counts.items()))
