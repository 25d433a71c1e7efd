"""Tensors of a checkpoint that the text model does not read: of other parts, or without effect."""

import re
from collections.abc import Collection

from ..config.model_config import ModelConfig
from ..plugins import load
from .family import BACKBONE

INV_FREQ = "rotary_emb.inv_freq"  # how the names of old checkpoints' tables end
_MTP = "mtp."  # how the names of draft heads in Qwen's style begin
# How names of transformers 5 end: how the published names of these tensors end, which are ours.
_PUBLISHED_ENDS = {
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".self_attn.g_proj.weight": ".self_attn.gate_proj.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}
_OWN_END = re.compile(f"({'|'.join(map(re.escape, _PUBLISHED_ENDS))})$")
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
# Prefixes of names, and what the text model alone would have in their place; None: another part has it.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.": "",
    "model.visual.": None,
    "visual.": None,
    _MTP: None,
    **{name: f"model.{name}" for name in ("embed_tokens.", "layers.", "norm.")},  # saved without its head
    "model.embeddings.": "model.embed_tokens.",  # names in transformers of what files have in "backbone"
    "model.norm_f.": "model.norm.",
    **{published: own for own, published in BACKBONE.items()},
    **dict.fromkeys(
        f"{outer}{part}."
        for outer in ("model.", "")
        for part in (
            "vision_tower",
            "audio_tower",
            "embed_vision",
            "embed_audio",
            "vision_embedder",
            "mm_projector",
            "multi_modal_projector",
        )  # fmt: skip
    ),
}


def find_prefix(name: str) -> str:
    """Returns the prefix that says which part of the checkpoint a tensor belongs to. "": the text model."""
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")


def text_name(name: str, has_draft_head: bool = False) -> str | None:
    """Returns the name that the text model alone would have for this tensor. None: it is of another part.
    has_draft_head: True: a draft head in the files is a part of the text model.
    """
    prefix = find_prefix(name)
    if prefix == _MTP and has_draft_head:
        return name
    renamed = _PREFIXES.get(prefix, "")
    if renamed is None:
        return None
    return renamed + _OWN_END.sub(lambda end: _PUBLISHED_ENDS[end[0]], name.removeprefix(prefix))


def full_name(own: str, other: str) -> str:
    """Returns the full name of a tensor of the text model: its own name with the prefix that another name in
    the same checkpoint has.
    """
    prefix = find_prefix(other)
    return prefix + own.removeprefix(_PREFIXES.get(prefix) or "")


def unused_draft_names(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Returns the unused names of draft heads, also in layers after the last one of the model."""
    numbered = {name: _LAYER.match(name) for name in unused_names(config, names)}
    return {
        name
        for name, layer in numbered.items()
        if name.startswith(_MTP) or layer and int(layer[1]) >= config.num_hidden_layers
    }


def unused_names(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Returns the names within the text model that a checkpoint may have and that change nothing."""
    unused = {name for name in names if name.endswith(INV_FREQ)}
    unused |= {"lm_head.weight"} if config.tie_word_embeddings else set()
    family = load("family", config.model_type)
    if config.draft_head is None:
        drafting = {layer[1] for name in names if ".eh_proj." in name and (layer := _LAYER.match(name))}
        starts = tuple(f"model.layers.{i}." for i in drafting if int(i) >= config.num_hidden_layers)
    else:
        starts = family.draft_head.starts_of_copies(config)
    unused |= {name for name in names if name.startswith(starts)}  # of multi-token prediction
    return unused | family.unused(config, names)
