"""The tree of parameter specs: shapes, logical axes, and the names of tensors in a checkpoint."""

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any

import jax

from ..config.model_config import ModelConfig

Params = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key

_Axis = tuple[int, str | None]  # size and name


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor: its shape, logical axes (`sharding.RULES`), and its place in a Hugging Face checkpoint."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_name: str  # with "{}": one tensor for each expert, stacked here along the first axis
    fused_name: str | None = None  # a larger tensor that may contain it instead
    first_row: int = 0  # its first row in that tensor, on the last axis but one
    fused_rows: int = 0  # rows of that tensor; of each group, where it has several
    fused_groups: int = 1  # groups of rows, each with an equal part of this one's
    depthwise: bool = False  # that tensor is the weight of a convolution, [rows, 1, width]
    interleaved: int = (
        0  # experts: that tensor has inputs first; its outputs are by turns those of so many leaves
    )
    stays_float: bool = False  # never quantized, as vectors are not
    kv_heads: int = 0  # along the axis of that name

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns; experts have a matrix each."""
        return len(self.shape) > 1

    @property
    def is_quantizable(self) -> bool:
        """Whether a quantized model has it quantized."""
        return self.is_matrix and not self.stays_float

    def tensor_shapes(self, tensors: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the tensors that contain it in a checkpoint with these tensors."""
        if self.fused_name and self.interleaved:
            (experts, outputs, *inputs) = self.shape
            return {self.fused_name: (experts, *inputs, outputs * self.interleaved)}
        if self.fused_name and self.fused_name in tensors:
            rows = self.fused_rows * self.fused_groups
            if self.depthwise:
                return {self.fused_name: (rows, 1, self.shape[-1])}
            return {self.fused_name: (*self.shape[:-2], rows, *self.shape[1:][-1:])}
        if "{}" in self.hf_name:
            return {self.hf_name.format(expert): self.shape[1:] for expert in range(self.shape[0])}
        return {self.hf_name: self.shape}

    def tensor_parts(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the tensors that contain it, as parts of equal size.

        Args:
            tensors: the `StoredTensor`s of a checkpoint by name.
        """
        if self.fused_name and self.interleaved:
            return tensors[self.fused_name].transposed(self.first_row, self.interleaved)
        if self.fused_name and self.fused_name in tensors:
            (*experts, rows, width) = self.shape if self.is_matrix else (*self.shape, 0)
            groups = self.fused_groups * math.prod(experts)
            shape = (rows // self.fused_groups, width) if self.is_matrix else (rows // self.fused_groups,)
            firsts = range(self.first_row, self.fused_rows * groups, self.fused_rows)
            return [tensors[self.fused_name].view(first, shape) for first in firsts]
        return [tensors[name] for name in self.tensor_shapes(tensors)]


def param_specs(config: ModelConfig) -> Params:
    """Returns the parameter tree of `config` with a `ParamSpec` at every leaf."""
    d = config.hidden_size
    v = config.vocab_size
    tree = {
        "embed": _linear("model.embed_tokens", (v, "vocab"), (d, "embed")),
        "layers": tuple(_layer(config, i) for i in range(config.num_hidden_layers)),
        "final_norm": ParamSpec((d,), ("embed",), "model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = _linear("lm_head", (v, "vocab"), (d, "embed"))
    return tree | _per_layer_inputs(config)


def _per_layer_inputs(config: ModelConfig) -> Params:
    """What makes the inputs of each layer beside the hidden states, P wide, of a token and its embedding."""
    P = config.hidden_size_per_layer_input
    if not P:
        return {}
    (rows, width) = (config.vocab_size_per_layer_input, P * config.num_hidden_layers)
    name = "model.per_layer_model_projection"
    return {
        "layer_embed": _linear("model.embed_tokens_per_layer", (rows, "vocab"), (width, None)),
        "layer_proj": _linear(name, (width, None), (config.hidden_size, "embed")),
        "layer_input_norm": ParamSpec((P,), (None,), "model.per_layer_projection_norm.weight"),
    }


def _layer(config: ModelConfig, index: int) -> Params:
    prefix = f"model.layers.{index}"
    d = (config.hidden_size, "embed")
    if config.is_linear(index):
        tree = _linear_attention(config, f"{prefix}.linear_attn")
    else:
        tree = _attention(config, index, f"{prefix}.self_attn")
    norms: dict[str, str] = {}
    if config.pre_norm:
        norms |= dict(attn_norm="input", mlp_norm="pre_feedforward" if config.post_norm else "post_attention")
    if config.post_norm:
        norms |= dict(attn_post_norm="post_attention", mlp_post_norm="post_feedforward")
    for name, hf_name in norms.items():
        tree[name] = ParamSpec(d[:1], d[1:], f"{prefix}.{hf_name}_layernorm.weight")
    if config.sub_norm:
        f = (config.intermediate_size, "mlp")
        tree["down_norm"] = ParamSpec(f[:1], f[1:], f"{prefix}.mlp.ffn_sub_norm.weight")
    if P := config.hidden_size_per_layer_input:
        tree["input_gate"] = _linear(f"{prefix}.per_layer_input_gate", (P, None), d)
        tree["input_proj"] = _linear(f"{prefix}.per_layer_projection", d, (P, None))
        tree["input_norm"] = ParamSpec(d[:1], d[1:], f"{prefix}.post_per_layer_input_norm.weight")
    if config.layer_scalar:
        tree["layer_scalar"] = ParamSpec((1,), (None,), f"{prefix}.layer_scalar")
    has_experts = config.layer_experts and config.layer_experts[index]
    if config.use_double_wide_mlp and index >= config.num_cached_layers:
        config = dataclasses.replace(config, intermediate_size=2 * config.intermediate_size)
    if has_experts and config.experts_beside_mlp:
        return tree | _mlp(config, f"{prefix}.mlp") | _experts_beside_mlp(config, prefix)
    feed_forward = _experts if has_experts else _mlp
    return tree | feed_forward(config, f"{prefix}.mlp")


def _attention(config: ModelConfig, index: int, prefix: str) -> Params:
    h = config.head_width(index)
    d = (config.hidden_size, "embed")
    heads = config.num_attention_heads * h
    kv_heads = config.kv_heads(index) * h
    n = (heads, "heads")
    k = (kv_heads, "kv_heads")
    fused = (f"{prefix}.qkv_proj", heads + 2 * kv_heads) if config.fused_projections else None
    tree: Params = {"o": _linear(f"{prefix}.o_proj", d, n, config.o_bias)}
    has_kv = index < config.num_cached_layers
    if has_kv:
        tree["k"] = _linear(f"{prefix}.k_proj", k, d, config.qkv_bias, fused, heads)
    if has_kv and not (config.attention_k_eq_v and config.layer_windows[index] is None):
        tree["v"] = _linear(f"{prefix}.v_proj", k, d, config.qkv_bias, fused, heads + kv_heads)
    if config.attn_output_gate:  # of each head first the query, then the gate
        fused = (f"{prefix}.q_proj", 2 * h)
        groups = config.num_attention_heads
        for name, row in (("query", 0), ("gate", h)):
            leaf = _linear(f"{prefix}.{name}_proj", n, d, config.qkv_bias, fused, row, groups)
            tree["q" if name == "query" else "attn_gate"] = leaf
    else:
        tree["q"] = _linear(f"{prefix}.q_proj", n, d, config.qkv_bias, fused, 0)
    if config.attention_sinks:
        tree["sinks"] = ParamSpec((config.num_attention_heads,), n[1:], f"{prefix}.sinks")
    if config.sub_norm:
        tree["o_norm"] = ParamSpec(n[:1], n[1:], f"{prefix}.attn_sub_norm.weight")
    if config.qk_norm:
        sizes = dict(q_norm=n, k_norm=k) if config.qk_norm_joint else dict(q_norm=(h, None), k_norm=(h, None))
        for name, (size, axis) in sizes.items():
            if has_kv or name == "q_norm":
                tree[name] = ParamSpec((size,), (axis,), f"{prefix}.{name}.weight")
    count = config.kv_heads(index)
    of_kv = lambda spec: dataclasses.replace(spec, kv_heads=count) if "kv_heads" in spec.axes else spec  # noqa: E731
    return jax.tree.map(of_kv, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


def _linear_attention(config: ModelConfig, prefix: str) -> Params:
    """Gated DeltaNet: Qwen3-Next has its projections in two matrices, for each key head one after the other
    what belongs to it; Qwen3.5 has query, key and value one after the other, and the others apart.
    """
    K = config.linear_num_key_heads
    N = config.linear_num_value_heads
    d = (config.hidden_size, "embed")
    keys = K * config.linear_key_head_dim
    values = N * config.linear_value_head_dim
    sizes = dict(query=keys, key=keys, value=values, z=values, b=N, a=N)
    if config.interleaved_projections:
        fused = dict(in_proj_qkvz=("query", "key", "value", "z"), in_proj_ba=("b", "a"))
    else:
        fused = dict(in_proj_qkv=("query", "key", "value"))
    groups = K if config.interleaved_projections else 1
    # Of each part: its tensor and the rows of a group there, its row in a group, and the groups.
    places: dict[str, tuple[tuple[str, int], int, int]] = {}
    for tensor, parts in fused.items():
        rows = [sizes[part] // groups for part in parts]
        for i, part in enumerate(parts):
            places[part] = ((f"{prefix}.{tensor}", sum(rows)), sum(rows[:i]), groups)
    leaves = dict(q="query", k="key", v="value", z="z", b="b", a="a")
    tree: Params = {}
    for leaf, part in leaves.items():
        name = f"{prefix}.{part}_proj" if part in places else f"{prefix}.in_proj_{part}"
        place, row, count = places.get(part, (None, 0, 1))
        outputs = (sizes[part], "linear_heads")
        tree[leaf] = _linear(name, outputs, d, False, place, row, count, stays_float=leaf in "ba")
    taps = config.linear_conv_kernel_dim
    channels = dict(q=(keys, 0), k=(keys, keys), v=(values, 2 * keys))
    for name, (size, row) in channels.items():
        tree[f"conv_{name}"] = ParamSpec(
            (size, taps), ("linear_heads", None), f"{prefix}.{leaves[name]}_conv.weight",
            f"{prefix}.conv1d.weight", row, 2 * keys + values, depthwise=True, stays_float=True,
        )  # fmt: skip
    for name in ("A_log", "dt_bias"):
        tree[name] = ParamSpec((N,), ("linear_heads",), f"{prefix}.{name}")
    tree["gated_norm"] = ParamSpec((config.linear_value_head_dim,), (None,), f"{prefix}.norm.weight")
    tree["o"] = _linear(f"{prefix}.out_proj", d, (values, "linear_heads"))
    return tree


def _mlp(config: ModelConfig, prefix: str) -> Params:
    d = (config.hidden_size, "embed")
    f = (config.intermediate_size, "mlp")
    bias = config.mlp_bias
    fused = (f"{prefix}.gate_up_proj", 2 * f[0]) if config.fused_projections else None
    return {
        "gate": _linear(f"{prefix}.gate_proj", f, d, bias, fused, 0),
        "up": _linear(f"{prefix}.up_proj", f, d, bias, fused, f[0]),
        "down": _linear(f"{prefix}.down_proj", d, f, bias),
    }


def _experts(config: ModelConfig, prefix: str) -> Params:
    """Checkpoints have a tensor for each expert, or stacked ones, as transformers 5 has in memory."""
    if config.swiglu_limit is not None:
        return _experts_with_biases(config, prefix)
    experts = config.num_experts
    d = config.hidden_size
    f = config.moe_intermediate_size

    def stack(name: str, shape: tuple[int, int], fused_name: str, first_row: int, fused_rows: int) -> Params:
        expert_name = f"{prefix}.experts.{{}}.{name}.weight"
        stacked_name = f"{prefix}.experts.{fused_name}"
        axes = ("experts", *(("embed", None) if name == "down_proj" else (None, "embed")))
        return {
            "weight": ParamSpec((experts, *shape), axes, expert_name, stacked_name, first_row, fused_rows)
        }

    stacks = {
        "gate": stack("gate_proj", (f, d), "gate_up_proj", 0, 2 * f),
        "up": stack("up_proj", (f, d), "gate_up_proj", f, 2 * f),
        "down": stack("down_proj", (d, f), "down_proj", 0, d),
    }
    tree = {
        "router": _linear(f"{prefix}.gate", (experts, None), (d, "embed"), stays_float=True),
        "experts": stacks,
    }
    if width := config.shared_expert_intermediate_size:
        shared = dataclasses.replace(config, intermediate_size=width)
        tree["shared"] = _mlp(shared, f"{prefix}.shared_expert")
        gate = f"{prefix}.shared_expert_gate"
        tree["shared_gate"] = _linear(gate, (1, None), (d, "embed"), stays_float=True)
    return tree


def _experts_with_biases(config: ModelConfig, prefix: str) -> Params:
    """gpt-oss: checkpoints have stacked tensors, inputs first, with outputs of gate and up by turns."""
    experts = (config.num_experts, "experts")
    d = (config.hidden_size, "embed")
    f = (config.moe_intermediate_size, None)

    def stack(name: str, outputs: _Axis, inputs: _Axis, stacked_name: str, place: int, leaves: int) -> Params:
        def spec(axes: tuple[_Axis, ...], suffix: str, stacked_suffix: str, stays_float: bool) -> ParamSpec:
            (shape, names) = zip(*axes, strict=True)
            stacked = f"{prefix}.experts.{stacked_name}{stacked_suffix}"
            hf_name = f"{prefix}.experts.{name}.{suffix}"
            return ParamSpec(
                shape, names, hf_name, stacked, place, interleaved=leaves, stays_float=stays_float
            )

        return {
            "weight": spec((experts, outputs, inputs), "weight", "", False),
            "bias": spec((experts, outputs), "bias", "_bias", True),
        }

    return {
        "router": _linear(f"{prefix}.router", (config.num_experts, None), d, True, stays_float=True),
        "experts": {
            "gate": stack("gate_proj", f, d, "gate_up_proj", 0, 2),
            "up": stack("up_proj", f, d, "gate_up_proj", 1, 2),
            "down": stack("down_proj", d, f, "down_proj", 0, 1),
        },
    }


def _experts_beside_mlp(config: ModelConfig, prefix: str) -> Params:
    """Gemma 4: experts that all layers have beside the MLP, with norms of their own."""
    d = (config.hidden_size, "embed")
    tree = _experts(config, prefix)
    scales = dict(scale=d, per_expert_scale=(config.num_experts, None))
    tree["router"] = _linear(f"{prefix}.router.proj", (config.num_experts, None), d, stays_float=True) | {
        name: ParamSpec(axis[:1], axis[1:], f"{prefix}.router.{name}") for name, axis in scales.items()
    }
    names = dict(mlp_out_norm="post_feedforward_layernorm_1", experts_norm="pre_feedforward_layernorm_2")
    names["experts_out_norm"] = "post_feedforward_layernorm_2"
    return tree | {name: ParamSpec(d[:1], d[1:], f"{prefix}.{hf}.weight") for name, hf in names.items()}


def _linear(  # noqa: PLR0913
    name: str, outputs: _Axis, inputs: _Axis, bias: bool = False, fused: tuple[str, int] | None = None,
    row: int = 0, groups: int = 1, stays_float: bool = False,
) -> Params:  # fmt: skip
    """fused: a layer whose matrix may contain this one, and its rows; row and groups: as in `ParamSpec`."""
    (rows, of_rows) = outputs
    (columns, of_columns) = inputs

    def spec(shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str) -> ParamSpec:
        apart = ParamSpec(shape, axes, f"{name}.{kind}", stays_float=stays_float)
        if not fused:
            return apart
        (tensor, fused_rows) = fused
        return dataclasses.replace(
            apart, fused_name=f"{tensor}.{kind}", first_row=row, fused_rows=fused_rows, fused_groups=groups
        )

    leaf: Params = {"weight": spec((rows, columns), (of_rows, of_columns), "weight")}
    return leaf | ({"bias": spec((rows,), (of_rows,), "bias")} if bias else {})
