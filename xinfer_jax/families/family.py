"""`Family`: the content of a family's file, and the names of tensors in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..config.model_config import ModelConfig
from .draft_heads import QWEN_MTP, MtpNames


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor that may hold several leaves of a layer, one after the other along its rows."""

    name: str  # of the tensor, without "model.layers.N." and without ".weight" or ".bias"
    leaves: tuple[str, ...]  # which it holds, in order
    # The field of the mixer's spec, or of the config, that says how many groups of rows it has, each with an
    # equal part of every leaf; "": one.
    groups: str = ""
    stacked: bool = False  # it has those of all experts, and no ".weight" in its name
    interleaved: bool = False  # its inputs come first; its outputs are by turns those of the leaves
    # Of each of its axes the axis of its leaves, None for one of size 1, as (0, None, 1) of [rows, 1, width].
    # A number alone has (), and its leaf has the shape [1]. None: its axes are those of its leaves.
    axes_of_leaves: tuple[int | None, ...] | None = None
    is_published: bool = True  # published files have it; False: they have its leaves, and it is read too


# Prefixes of families whose files have the model as "backbone".
BACKBONE = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
}


@dataclasses.dataclass(frozen=True)
class Names:
    """The places of the leaves of a layer in the files, if they differ from `naming.NAMES`."""

    # Name of a leaf, as "q" or "experts.gate", to that of its tensor or module.
    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    joined: tuple[Joined, ...] = ()  # tensors that hold several leaves, if the layer has all of these


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models."""

    defaults: dict[str, Any]  # of config.json, as in transformers
    # The fields of `ModelConfig` that it sets, from config.json with its defaults and the number of layers.
    read: Callable[[Mapping, int], dict[str, Any]]
    architecture: str  # its class in transformers
    # The inverse of `read`: settings of config.json that `to_hf` does not write for all families.
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    names: Names = Names()  # of the tensors; names of no layer are among `leaves` too
    # By the kind of a mixer: names of its tensors, beside these.
    mixer_names: Mapping[str, Names] = dataclasses.field(default_factory=dict)
    # Of the names of a checkpoint's tensors those that change nothing and that no other family has.
    unused: Callable[[ModelConfig, Collection[str]], set[str]] = lambda config, names: set()
    draft_head: MtpNames = QWEN_MTP  # the style of its heads for multi-token prediction
    # Prefixes of names in published files, by the prefixes that names have here. The first one that fits is
    # used. `skipped_tensors` reads both.
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module_prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in transformers' model
    # Adds fields to config.json, with its defaults, that follow from its other fields.
    complete: Callable[[Mapping], Mapping] = lambda hf: hf
