"""The tree of parameter specs: shapes, logical axes and initial values."""

import dataclasses
from typing import Any

import jax

from .. import plugin
from ..config.layer_spec import ExpertsSpec, MlpSpec
from ..config.model_config import ModelConfig

Params = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key

Axis = tuple[int, str | None]  # size and name


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor: its shape, logical axes (`sharding.RULES`) and initial values."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "matrix"  # its initial values, as `params.init_params` has them
    stays_float: bool = False  # never quantized, as vectors are not
    kv_heads: int = 0  # along the axis of that name
    name: str = ""  # its path in the tree, as "layers.0.q.weight"

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows and columns; experts have a matrix each."""
        return len(self.shape) > 1

    @property
    def is_quantizable(self) -> bool:
        """Whether a quantized model has it quantized."""
        return self.is_matrix and not self.stays_float


def param_specs(config: ModelConfig) -> Params:
    """Returns the parameter tree of `config` with a `ParamSpec` at every leaf."""
    d = (config.hidden_size, "embed")
    vocabulary = (config.vocab_size, "vocab")
    tree: Params = {
        "embed": dense(vocabulary, d, init="small"),
        "layers": tuple(_layer(config, i) for i in range(config.num_hidden_layers)),
        "final_norm": _norm(d),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = dense(vocabulary, d)
    if P := config.hidden_size_per_layer_input:  # of each layer beside the hidden states: of a token
        width = (P * config.num_hidden_layers, None)
        tree["layer_embed"] = dense((config.vocab_size_per_layer_input, "vocab"), width, init="small")
        tree["layer_proj"] = dense(width, d)
        tree["layer_input_norm"] = _norm((P, None))
    return jax.tree_util.tree_map_with_path(_with_name, tree)


def leaf_name(path: Any) -> str:
    """Returns a path of jax in the tree as a name, such as "layers.0.q.weight"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _with_name(path: Any, spec: ParamSpec) -> ParamSpec:
    return dataclasses.replace(spec, name=leaf_name(path))


def _layer(config: ModelConfig, index: int) -> Params:
    spec = config.layers[index]
    d = (config.hidden_size, "embed")
    is_linear = config.is_linear(index)
    tree = plugin("layer params", "linear")(config) if is_linear else _attention(config, index)
    if spec.pre_norm:
        tree |= dict(attn_norm=_norm(d), mlp_norm=_norm(d))
    if spec.post_norm:
        tree |= dict(attn_post_norm=_norm(d), mlp_post_norm=_norm(d))
    if spec.mlp:
        tree |= _mlp(config, spec.mlp)
    if spec.experts:
        tree |= _experts(config, spec.experts)
    if spec.mlp and spec.experts:
        gains = dict(scale=d, per_expert_scale=(spec.experts.num_experts, None))
        tree["router"] |= {name: tensor(size, init="ones") for name, size in gains.items()}
        tree |= {name: _norm(d) for name in ("mlp_out_norm", "experts_norm", "experts_out_norm")}
    if P := config.hidden_size_per_layer_input:
        tree |= dict(input_gate=dense((P, None), d), input_proj=dense(d, (P, None)), input_norm=_norm(d))
    if spec.scalar:
        tree["layer_scalar"] = tensor((1, None), init="ones")
    return tree


def _attention(config: ModelConfig, index: int) -> Params:
    spec: Any = config.attention(index)
    h = config.head_width(index)
    d = (config.hidden_size, "embed")
    n = (config.num_attention_heads * h, "heads")
    k = (config.kv_heads(index) * h, "kv_heads")
    own = {} if spec.shares_kv else {"k": k} if spec.values_are_keys else {"k": k, "v": k}
    gate = {"attn_gate": n} if spec.output_gate else {}
    tree: Params = {name: dense(size, d, spec.qkv_bias) for name, size in ({"q": n} | own | gate).items()}
    tree["o"] = dense(d, n, spec.o_bias)
    if spec.sinks:
        tree["sinks"] = tensor((config.num_attention_heads, "heads"), init="small")
    if spec.o_norm:
        tree["o_norm"] = _norm(n)
    if spec.qk_norm:
        sizes = dict(q_norm=n) | ({} if spec.shares_kv else dict(k_norm=k))
        tree |= {name: _norm(size if spec.qk_norm == "joint" else (h, None)) for name, size in sizes.items()}
    count = config.kv_heads(index)
    of_kv = lambda spec: dataclasses.replace(spec, kv_heads=count) if "kv_heads" in spec.axes else spec  # noqa: E731
    return jax.tree.map(of_kv, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


def _mlp(config: ModelConfig, spec: MlpSpec) -> Params:
    d = (config.hidden_size, "embed")
    f = (spec.intermediate_size or config.intermediate_size, "mlp")
    up = dense(f, d, spec.bias)
    tree: Params = {**({"gate": up} if spec.gated else {}), "up": up, "down": dense(d, f, spec.bias)}
    return tree | ({"down_norm": _norm(f)} if spec.down_norm else {})


def _experts(config: ModelConfig, spec: ExpertsSpec) -> Params:
    experts = (spec.num_experts, "experts")
    d = (config.hidden_size, "embed")
    f = (spec.intermediate_size, None)

    def stack(outputs: Axis, inputs: Axis) -> Params:
        bias = {"bias": tensor(experts, outputs, init="small", stays_float=True)} if spec.bias else {}
        return {"weight": tensor(experts, outputs, inputs)} | bias

    tree: Params = {
        "router": dense((spec.num_experts, None), d, spec.bias, stays_float=True),
        "experts": {"gate": stack(f, d), "up": stack(f, d), "down": stack(d, f)},
    }
    if width := spec.shared_intermediate_size:
        tree["shared"] = _mlp(config, MlpSpec(width))
        tree["shared_gate"] = dense((1, None), d, stays_float=True)
    return tree


def tensor(*axes: Axis, init: str = "matrix", stays_float: bool = False) -> ParamSpec:
    """Returns the spec of a tensor with these axes."""
    (shape, names) = zip(*axes, strict=True)
    return ParamSpec(shape, names, init, stays_float)


def _norm(features: Axis) -> ParamSpec:
    return tensor(features, init="norm")


def dense(
    outputs: Axis, inputs: Axis, bias: bool = False, init: str = "matrix", stays_float: bool = False
) -> Params:
    """Returns the specs of a matrix, and of its bias if it has one."""
    leaf: Params = {"weight": tensor(outputs, inputs, init=init, stays_float=stays_float)}
    return leaf | ({"bias": tensor(outputs, init="small", stays_float=stays_float)} if bias else {})
