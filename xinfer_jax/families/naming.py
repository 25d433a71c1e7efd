"""`FileSpec`: the place of a parameter in a Hugging Face checkpoint, from the names of its family."""

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any

import jax

from ..config.model_config import ModelConfig, check_config
from ..plugins import load
from ..registry import plugin
from ..weights.param_specs import Params, ParamSpec, leaf_name, param_specs
from .family import Family, Joined, Names

TIED = ("model.embed_tokens.weight", "lm_head.weight")  # the two names of a tied matrix
# Names of leaves in the files, of families that have no others; those of a layer are within it. Mixers and
# feed-forwards have those of their own leaves.
NAMES = dict(
    embed="model.embed_tokens", final_norm="model.norm.weight", lm_head="lm_head",
    attn_norm="input_layernorm.weight", mlp_norm="post_attention_layernorm.weight",
    attn_post_norm="post_attention_layernorm.weight", mlp_post_norm="post_feedforward_layernorm.weight",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FileSpec(ParamSpec):
    """A parameter with its place in a Hugging Face checkpoint."""

    hf_name: str = ""  # with "{}": one tensor for each expert, stacked here along the first axis
    fused_name: str | None = None  # a larger tensor that may contain it instead
    first_row: int = 0  # its first row in that tensor, on the last axis but one
    fused_rows: int = 0  # rows of that tensor; of each group, where it has several
    fused_groups: int = 1  # groups of rows, each with an equal part of this one's
    axes_of_leaves: tuple[int | None, ...] | None = None  # of that tensor, as in `Joined`
    # Experts: that tensor has inputs first; its outputs are by turns those of so many leaves.
    interleaved: int = 0
    is_published: bool = True  # whether published files have the larger tensor, where there is one

    @property
    def published_name(self) -> str:
        """The tensor that published files have it in."""
        return self.fused_name if self.fused_name and self.is_published else self.hf_name

    @property
    def row_axis(self) -> int:
        """The axis of its outputs."""
        return max(0, len(self.shape) - 2)

    def tensor_shapes(self, tensors: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the tensors that contain it in a checkpoint with these tensors."""
        if self.fused_name and self.interleaved:
            (experts, outputs, *inputs) = self.shape
            return {self.fused_name: (experts, *inputs, outputs * self.interleaved)}
        if self.fused_name and self.fused_name in tensors:
            rows = self.fused_rows * self.fused_groups
            if self.has_inputs_first(tensors):
                return {self.fused_name: (self.shape[0], self.shape[2], rows)}
            shape = (*self.shape[:-2], rows, *self.shape[1:][-1:])
            if self.axes_of_leaves is not None:
                shape = tuple(1 if axis is None else shape[axis] for axis in self.axes_of_leaves)
            return {self.fused_name: shape}
        if "{}" in self.hf_name:
            return {self.hf_name.format(expert): self.shape[1:] for expert in range(self.shape[0])}
        return {self.hf_name: self.shape}

    @property
    def layout_name(self) -> str | None:
        """The name of the tensor whose shape says whether the larger one has inputs first. None: it never
        has.
        """
        name = self.fused_name
        if not name or len(self.shape) < 3 or self.interleaved:
            return None
        return (
            name.replace("gate_up_proj", "down_proj")
            if name.endswith(("gate_up_proj", "down_proj"))
            else None
        )

    def has_inputs_first(self, tensors: Any) -> bool:
        """Returns True if a checkpoint with these tensors stores all experts in one tensor with their inputs
        first, as published Qwen3-VL does. The shape of down_proj decides.
        """
        if not isinstance(tensors, Mapping) or self.layout_name is None or self.fused_name is None:
            return False
        down = tensors.get(self.layout_name)
        is_down = self.fused_name.endswith("down_proj")
        down_shape = self.shape[1:] if is_down else self.shape[:0:-1]  # [outputs, inputs]
        return down is not None and tuple(down.shape[1:]) == down_shape[::-1] != down_shape

    def tensor_parts(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the `StoredTensor`s that contain it, as parts of equal size."""
        if self.fused_name and self.interleaved:
            return tensors[self.fused_name].transposed(self.first_row, self.interleaved)
        if self.fused_name and self.has_inputs_first(tensors):
            return tensors[self.fused_name].slice_axis(2, self.first_row, self.shape[1]).transposed(0, 1)
        if self.fused_name and self.fused_name in tensors:
            (*experts, rows, width) = self.shape if self.is_matrix else (*self.shape, 0)
            groups = self.fused_groups * math.prod(experts)
            shape = (rows // self.fused_groups, width) if self.is_matrix else (rows // self.fused_groups,)
            firsts = range(self.first_row, self.fused_rows * groups, self.fused_rows)
            return [tensors[self.fused_name].view(first, shape) for first in firsts]
        return [tensors[name] for name in self.tensor_shapes(tensors)]


def published_name(config: ModelConfig, name: str) -> str:
    """Returns the name of a tensor in published files. name: its name here, which may have another prefix."""
    return _with_prefix(load("family", config.model_type).prefixes, name)


def module_name(config: ModelConfig, name: str) -> str:
    """Returns the name of a module or parameter in transformers' model. name: its name here."""
    prefixes = load("family", config.model_type).module_prefixes
    return _with_prefix(prefixes, f"{name}.").removesuffix(".")


def _with_prefix(prefixes: Mapping[str, str], name: str) -> str:
    """Returns the name with the first of these prefixes replaced that it has."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


def file_specs(config: ModelConfig) -> Params:
    """Returns the parameter tree of `config` with a `FileSpec` at every leaf."""
    check_config(config)
    family = load("family", config.model_type)
    names = Names(NAMES | family.names.leaves, family.names.joined)
    tree = specs_by_names(config, names, family.mixer_names)
    if config.draft_head is not None:
        tree["draft_head"] = _draft_head_specs(config, names, family)
    return tree


def _draft_head_specs(config: ModelConfig, names: Names, family: Family) -> Params:
    """Returns the specs of the draft head in the files of a model. names: the names of a layer."""
    spec: Any = config.draft_head
    own = plugin("draft head", spec.kind).of_model(config).config
    tree = param_specs(config)["draft_head"]
    (layer,) = tree.pop("layers")
    head = family.draft_head
    (prefix, of_layer) = (x.format(config.num_hidden_layers) for x in (head.prefix, head.layer_prefix))
    named_layer = _named_layer(layer, own, 0, names, family.mixer_names, of_layer)
    return _named(tree, head.leaves, prefix, [], own) | {"layers": (named_layer,)}


def specs_by_names(
    config: ModelConfig, names: Names, mixer_names: Mapping[str, Names], prefix: str = "model.layers"
) -> Params:
    """Returns `file_specs` by other names, without a draft head. mixer_names: see `Family`. prefix: the
    prefix of a layer's tensors.
    """
    tree = param_specs(config)
    layers = tuple(
        _named_layer(layer, config, i, names, mixer_names, f"{prefix}.{i}.")
        for i, layer in enumerate(tree["layers"])
    )
    return _named(_outside_layers(tree), names.leaves, "", [], config) | {"layers": layers}


def draft_specs(tree: Params, config: ModelConfig, names: Names, prefix: str) -> Params:
    """Returns the parameter tree of a draft head with a `FileSpec` at every leaf.

    Args:
        tree: `DraftHead.param_specs` of the head.
        config: the numbers of its own layers.
        names: the names that differ from `NAMES`.
        prefix: the prefix of a layer's tensors, with "{}" in the place of its number.
    """
    names = Names({**NAMES, **names.leaves}, names.joined)
    tree = jax.tree_util.tree_map_with_path(
        lambda path, spec: dataclasses.replace(spec, name=leaf_name(path)), tree
    )
    layers = tuple(
        _named_layer(layer, config, i, names, {}, prefix.format(i)) for i, layer in enumerate(tree["layers"])
    )
    return _named(_outside_layers(tree), names.leaves, "", [], config) | {"layers": layers}


def _outside_layers(tree: Params) -> Params:
    return {leaf: spec for leaf, spec in tree.items() if leaf not in ("layers", "draft_head")}


def _named_layer(
    layer: Params,
    config: ModelConfig,
    index: int,
    names: Names,
    mixer_names: Mapping[str, Names],
    prefix: str,
) -> Params:
    """Returns the specs of a layer with their places in the files."""
    mixers = config.mixers(index)
    leaves: dict[str, str] = {}
    parts: list[Any] = [*mixers, config.feed_forward(index)]
    for part in filter(None, parts):
        leaves |= part.names
    leaves |= names.leaves
    joined = [(tensor, config) for tensor in names.joined]
    for mixer in mixers:
        own = mixer_names.get(mixer.spec.kind, Names())
        leaves |= own.leaves
        joined += [(tensor, mixer.spec) for tensor in own.joined]
    return _named(layer, leaves, prefix, joined, config)


def _named(
    tree: Params,
    names: Mapping[str, str],
    prefix: str,
    joined: list[tuple[Joined, Any]],
    config: ModelConfig,
) -> Params:
    """Returns the specs of a layer, or of the parameters outside of layers, with their places in the files.
    joined: tensors, each with the object that has the field that `Joined.groups` names, if it is not the
    config.
    """
    flat = {leaf_name(keys): spec for keys, spec in jax.tree_util.tree_leaves_with_path(tree)}

    def file_spec(keys: Any, spec: ParamSpec) -> FileSpec:
        path = leaf_name(keys)
        (leaf, kind) = path.rsplit(".", 1) if path.endswith((".weight", ".bias")) else (path, "")
        suffix = f".{kind}" if kind else ""
        fields: dict[str, Any] = dict(hf_name=f"{prefix}{names[leaf]}{suffix}")
        for tensor, sizes in joined:
            parts = [f"{part}{suffix}" for part in tensor.leaves]
            if leaf in tensor.leaves and flat.keys() >= {*parts}:
                groups: Any = getattr(sizes, tensor.groups, None) or getattr(config, tensor.groups, 1)
                fields |= _place(tensor, leaf, kind, [_rows(flat[part]) for part in parts], groups)
                fields["fused_name"] = prefix + fields["fused_name"]
        return FileSpec(**vars(spec), **fields)

    return jax.tree_util.tree_map_with_path(file_spec, tree)


def _place(tensor: Joined, leaf: str, kind: str, rows: list[int], groups: int) -> dict[str, Any]:
    """Returns the fields of a leaf that this tensor may hold. rows: the number of rows of each of its leaves.
    groups: the number of groups of rows.
    """
    index = tensor.leaves.index(leaf)
    ends = {"weight": "", "bias": "_bias"} if tensor.stacked else {"weight": ".weight", "bias": ".bias"}
    name = tensor.name + ends.get(kind, "")
    if tensor.interleaved:
        return dict(fused_name=name, first_row=index, interleaved=len(rows))
    return dict(
        fused_name=name, first_row=sum(rows[:index]) // groups, fused_rows=sum(rows) // groups,
        fused_groups=groups, axes_of_leaves=tensor.axes_of_leaves, is_published=tensor.is_published,
    )  # fmt: skip


def _rows(spec: ParamSpec) -> int:
    return spec.shape[-2] if spec.is_matrix else spec.shape[0]
