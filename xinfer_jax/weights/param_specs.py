"""The tree of parameter specs: shapes, logical axes and initial values."""

import dataclasses
from typing import Any

import jax

from ..config.layer_spec import ExpertsSpec, MlpSpec
from ..config.model_config import ModelConfig

Params = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key

_Axis = tuple[int, str | None]  # size and name


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
        "embed": _linear(vocabulary, d, init="small"),
        "layers": tuple(_layer(config, i) for i in range(config.num_hidden_layers)),
        "final_norm": _norm(d),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = _linear(vocabulary, d)
    if P := config.hidden_size_per_layer_input:  # of each layer beside the hidden states: of a token
        width = (P * config.num_hidden_layers, None)
        tree["layer_embed"] = _linear((config.vocab_size_per_layer_input, "vocab"), width, init="small")
        tree["layer_proj"] = _linear(width, d)
        tree["layer_input_norm"] = _norm((P, None))
    return jax.tree_util.tree_map_with_path(_with_name, tree)


def _with_name(path: Any, spec: ParamSpec) -> ParamSpec:
    parts = (key.key if isinstance(key, jax.tree_util.DictKey) else key.idx for key in path)
    return dataclasses.replace(spec, name=".".join(map(str, parts)))


def _layer(config: ModelConfig, index: int) -> Params:
    spec = config.layers[index]
    d = (config.hidden_size, "embed")
    tree = _attention(config, index) if config.attention(index) else _linear_attention(config)
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
        tree["router"] |= {name: _spec(size, init="ones") for name, size in gains.items()}
        tree |= {name: _norm(d) for name in ("mlp_out_norm", "experts_norm", "experts_out_norm")}
    if P := config.hidden_size_per_layer_input:
        tree |= dict(input_gate=_linear((P, None), d), input_proj=_linear(d, (P, None)), input_norm=_norm(d))
    if spec.scalar:
        tree["layer_scalar"] = _spec((1, None), init="ones")
    return tree


def _attention(config: ModelConfig, index: int) -> Params:
    spec: Any = config.attention(index)
    h = config.head_width(index)
    d = (config.hidden_size, "embed")
    n = (config.num_attention_heads * h, "heads")
    k = (config.kv_heads(index) * h, "kv_heads")
    own = {} if spec.shares_kv else {"k": k} if spec.values_are_keys else {"k": k, "v": k}
    gate = {"attn_gate": n} if spec.output_gate else {}
    tree: Params = {name: _linear(size, d, spec.qkv_bias) for name, size in ({"q": n} | own | gate).items()}
    tree["o"] = _linear(d, n, spec.o_bias)
    if spec.sinks:
        tree["sinks"] = _spec((config.num_attention_heads, "heads"), init="small")
    if spec.o_norm:
        tree["o_norm"] = _norm(n)
    if spec.qk_norm:
        sizes = dict(q_norm=n) | ({} if spec.shares_kv else dict(k_norm=k))
        tree |= {name: _norm(size if spec.qk_norm == "joint" else (h, None)) for name, size in sizes.items()}
    count = config.kv_heads(index)
    of_kv = lambda spec: dataclasses.replace(spec, kv_heads=count) if "kv_heads" in spec.axes else spec  # noqa: E731
    return jax.tree.map(of_kv, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


def _linear_attention(config: ModelConfig) -> Params:
    """Gated DeltaNet."""
    spec: Any = config.linear_attention
    d = (config.hidden_size, "embed")
    n = (spec.num_value_heads, "linear_heads")
    keys = (spec.num_key_heads * spec.key_head_dim, "linear_heads")
    values = (spec.num_value_heads * spec.value_head_dim, "linear_heads")
    tree: Params = {name: _linear(size, d) for name, size in dict(q=keys, k=keys, v=values, z=values).items()}
    tree |= {name: _linear(n, d, stays_float=True) for name in ("a", "b")}
    for name, channels in dict(q=keys, k=keys, v=values).items():
        tree[f"conv_{name}"] = _spec(channels, (spec.conv_kernel_dim, None), stays_float=True)
    tree |= dict(A_log=_spec(n, init="log_decay"), dt_bias=_spec(n, init="ones"))
    tree |= dict(gated_norm=_spec((spec.value_head_dim, None), init="ones"), o=_linear(d, values))
    return tree


def _mlp(config: ModelConfig, spec: MlpSpec) -> Params:
    d = (config.hidden_size, "embed")
    f = (spec.intermediate_size or config.intermediate_size, "mlp")
    gate = _linear(f, d, spec.bias)
    tree: Params = {"gate": gate, "up": gate, "down": _linear(d, f, spec.bias)}
    return tree | ({"down_norm": _norm(f)} if spec.down_norm else {})


def _experts(config: ModelConfig, spec: ExpertsSpec) -> Params:
    experts = (spec.num_experts, "experts")
    d = (config.hidden_size, "embed")
    f = (spec.intermediate_size, None)

    def stack(outputs: _Axis, inputs: _Axis) -> Params:
        leaf = {"weight": _spec(experts, outputs, inputs)}
        return leaf | ({"bias": _spec(experts, outputs, init="small", stays_float=True)} if spec.bias else {})

    tree: Params = {
        "router": _linear((spec.num_experts, None), d, spec.bias, stays_float=True),
        "experts": {"gate": stack(f, d), "up": stack(f, d), "down": stack(d, f)},
    }
    if width := spec.shared_intermediate_size:
        tree["shared"] = _mlp(config, MlpSpec(width))
        tree["shared_gate"] = _linear((1, None), d, stays_float=True)
    return tree


def _spec(*axes: _Axis, init: str = "matrix", stays_float: bool = False) -> ParamSpec:
    (shape, names) = zip(*axes, strict=True)
    return ParamSpec(shape, names, init, stays_float)


def _norm(features: _Axis) -> ParamSpec:
    return _spec(features, init="norm")


def _linear(
    outputs: _Axis, inputs: _Axis, bias: bool = False, init: str = "matrix", stays_float: bool = False
) -> Params:
    leaf: Params = {"weight": _spec(outputs, inputs, init=init, stays_float=stays_float)}
    return leaf | ({"bias": _spec(outputs, init="small", stays_float=stays_float)} if bias else {})
