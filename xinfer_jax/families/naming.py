"""`FileSpec`: where a parameter is in a Hugging Face checkpoint, from the names of its family."""

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..plugins import load
from ..weights.param_specs import Params, ParamSpec, leaf_name, param_specs
from .family import Joined, Names

TIED = ("model.embed_tokens.weight", "lm_head.weight")  # the two names of a tied matrix
# Names of leaves in the files, of families that have no others; those of a layer are within it.
NAMES = dict(
    embed="model.embed_tokens", final_norm="model.norm.weight", lm_head="lm_head",
    attn_norm="input_layernorm.weight", mlp_norm="post_attention_layernorm.weight",
    attn_post_norm="post_attention_layernorm.weight", mlp_post_norm="post_feedforward_layernorm.weight",
    **{leaf: f"self_attn.{leaf}_proj" for leaf in "qkvo"},
    **{leaf: f"self_attn.{leaf}.weight" for leaf in ("q_norm", "k_norm")},
    **{leaf: f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FileSpec(ParamSpec):
    """A parameter with its place in a Hugging Face checkpoint."""

    hf_name: str = ""  # with "{}": one tensor for each expert, stacked here along the first axis
    fused_name: str | None = None  # a larger tensor that may contain it instead
    first_row: int = 0  # its first row in that tensor, on the last axis but one
    fused_rows: int = 0  # rows of that tensor; of each group, where it has several
    fused_groups: int = 1  # groups of rows, each with an equal part of this one's
    depthwise: bool = False  # that tensor is the weight of a convolution, [rows, 1, width]
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
            if self.depthwise:
                return {self.fused_name: (rows, 1, self.shape[-1])}
            if self.has_inputs_first(tensors):
                return {self.fused_name: (self.shape[0], self.shape[2], rows)}
            return {self.fused_name: (*self.shape[:-2], rows, *self.shape[1:][-1:])}
        if "{}" in self.hf_name:
            return {self.hf_name.format(expert): self.shape[1:] for expert in range(self.shape[0])}
        return {self.hf_name: self.shape}

    def has_inputs_first(self, tensors: Any) -> bool:
        """Whether a checkpoint with these tensors has all experts in one, and their inputs first, as
        published Qwen3-VL has: by the shape of down_proj.
        """
        if not isinstance(tensors, Mapping) or not self.fused_name or len(self.shape) < 3 or self.interleaved:
            return False
        down = tensors.get(self.fused_name.replace("gate_up_proj", "down_proj"))
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


def file_specs(config: ModelConfig) -> Params:
    """Returns the parameter tree of `config` with a `FileSpec` at every leaf."""
    family = load("family", config.model_type)
    return specs_by_names(config, NAMES | family.names.leaves, family.names, family.linear_names)


def specs_by_names(
    config: ModelConfig,
    names: Mapping[str, str],
    attention: Names,
    linear: Names,
    prefix: str = "model.layers",
) -> Params:
    """Returns `file_specs` by other names: of all leaves, of layers of attention and of linear attention.
    prefix: of a layer's tensors.
    """
    tree = param_specs(config)
    layers = []
    for i, layer in enumerate(tree["layers"]):
        own = linear if config.is_linear(i) else attention
        sizes = config.linear_attention if config.is_linear(i) else config
        layers.append(_named(layer, {**names, **own.leaves}, f"{prefix}.{i}.", own.joined, sizes))
    rest = {leaf: spec for leaf, spec in tree.items() if leaf != "layers"}
    return _named(rest, names, "", (), None) | {"layers": tuple(layers)}


def _named(
    tree: Params, names: Mapping[str, str], prefix: str, joined: tuple[Joined, ...], sizes: Any
) -> Params:
    """The specs of a layer, or of what is in none, with their places in the files. sizes: what has the fields
    that `Joined.groups` names.
    """
    flat = {leaf_name(keys): spec for keys, spec in jax.tree_util.tree_leaves_with_path(tree)}

    def file_spec(keys: Any, spec: ParamSpec) -> FileSpec:
        path = leaf_name(keys)
        (leaf, kind) = path.rsplit(".", 1) if path.endswith((".weight", ".bias")) else (path, "")
        suffix = f".{kind}" if kind else ""
        fields: dict[str, Any] = dict(hf_name=f"{prefix}{names[leaf]}{suffix}")
        for tensor in joined:
            if leaf in tensor.leaves:
                rows = [_rows(flat[f"{part}{suffix}"]) for part in tensor.leaves]
                fields |= _place(tensor, leaf, kind, rows, sizes)
                fields["fused_name"] = prefix + fields["fused_name"]
        return FileSpec(**vars(spec), **fields)

    return jax.tree_util.tree_map_with_path(file_spec, tree)


def _place(tensor: Joined, leaf: str, kind: str, rows: list[int], sizes: Any) -> dict[str, Any]:
    """The fields of a leaf that this tensor may hold. rows: of each of its leaves."""
    index = tensor.leaves.index(leaf)
    ends = {"weight": "", "bias": "_bias"} if tensor.stacked else {"weight": ".weight", "bias": ".bias"}
    name = tensor.name + ends.get(kind, "")
    if tensor.interleaved:
        return dict(fused_name=name, first_row=index, interleaved=len(rows))
    groups = getattr(sizes, tensor.groups) if tensor.groups else 1
    return dict(
        fused_name=name, first_row=sum(rows[:index]) // groups, fused_rows=sum(rows) // groups,
        fused_groups=groups, depthwise=tensor.depthwise, is_published=tensor.is_published,
    )  # fmt: skip


def _rows(spec: ParamSpec) -> int:
    return spec.shape[-2] if spec.is_matrix else spec.shape[0]
