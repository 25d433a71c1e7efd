"""The tree of parameter specs: shapes, logical axes and initial values."""

import dataclasses
from typing import Any

import jax

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
    d = (config.hidden_size, "embed")
    tree = _linear_attention(config) if config.is_linear(index) else _attention(config, index)
    if config.pre_norm:
        tree |= dict(attn_norm=_norm(d), mlp_norm=_norm(d))
    if config.post_norm:
        tree |= dict(attn_post_norm=_norm(d), mlp_post_norm=_norm(d))
    if config.sub_norm:
        tree["down_norm"] = _norm((config.intermediate_size, "mlp"))
    if P := config.hidden_size_per_layer_input:
        tree["input_gate"] = _linear((P, None), d)
        tree["input_proj"] = _linear(d, (P, None))
        tree["input_norm"] = _norm(d)
    if config.layer_scalar:
        tree["layer_scalar"] = ParamSpec((1,), (None,), "ones")
    has_experts = config.layer_experts and config.layer_experts[index]
    if not has_experts or config.experts_beside_mlp:
        is_double = config.use_double_wide_mlp and index >= config.num_cached_layers
        tree |= _mlp(config, config.intermediate_size * (2 if is_double else 1))
    if has_experts:
        tree |= _experts(config)
    return tree


def _attention(config: ModelConfig, index: int) -> Params:
    h = config.head_width(index)
    d = (config.hidden_size, "embed")
    n = (config.num_attention_heads * h, "heads")
    k = (config.kv_heads(index) * h, "kv_heads")
    tree: Params = {"o": _linear(d, n, config.o_bias), "q": _linear(n, d, config.qkv_bias)}
    has_kv = index < config.num_cached_layers
    if has_kv:
        tree["k"] = _linear(k, d, config.qkv_bias)
    if has_kv and not (config.attention_k_eq_v and config.layer_windows[index] is None):
        tree["v"] = _linear(k, d, config.qkv_bias)
    if config.attn_output_gate:
        tree["attn_gate"] = _linear(n, d, config.qkv_bias)
    if config.attention_sinks:
        tree["sinks"] = ParamSpec((config.num_attention_heads,), n[1:], "small")
    if config.sub_norm:
        tree["o_norm"] = _norm(n)
    if config.qk_norm:
        tree["q_norm"] = _norm(n if config.qk_norm_joint else (h, None))
        if has_kv:
            tree["k_norm"] = _norm(k if config.qk_norm_joint else (h, None))
    count = config.kv_heads(index)
    of_kv = lambda spec: dataclasses.replace(spec, kv_heads=count) if "kv_heads" in spec.axes else spec  # noqa: E731
    return jax.tree.map(of_kv, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


def _linear_attention(config: ModelConfig) -> Params:
    """Gated DeltaNet."""
    d = (config.hidden_size, "embed")
    N = (config.linear_num_value_heads, "linear_heads")
    keys = (config.linear_num_key_heads * config.linear_key_head_dim, "linear_heads")
    values = (N[0] * config.linear_value_head_dim, "linear_heads")
    tree: Params = {name: _linear(size, d) for name, size in dict(q=keys, k=keys, v=values, z=values).items()}
    tree |= {name: _linear(N, d, stays_float=True) for name in ("a", "b")}
    for name, (size, axis) in dict(q=keys, k=keys, v=values).items():
        shape = (size, config.linear_conv_kernel_dim)
        tree[f"conv_{name}"] = ParamSpec(shape, (axis, None), stays_float=True)
    tree["A_log"] = ParamSpec(N[:1], N[1:], "log_decay")
    tree["dt_bias"] = ParamSpec(N[:1], N[1:], "ones")
    tree["gated_norm"] = ParamSpec((config.linear_value_head_dim,), (None,), "ones")
    tree["o"] = _linear(d, values)
    return tree


def _mlp(config: ModelConfig, width: int) -> Params:
    d = (config.hidden_size, "embed")
    f = (width, "mlp")
    gate = _linear(f, d, config.mlp_bias)
    return {"gate": gate, "up": gate, "down": _linear(d, f, config.mlp_bias)}


def _experts(config: ModelConfig) -> Params:
    experts = (config.num_experts, "experts")
    d = (config.hidden_size, "embed")
    f = (config.moe_intermediate_size, None)
    bias = config.swiglu_limit is not None

    def stack(outputs: _Axis, inputs: _Axis) -> Params:
        leaf = {"weight": _spec(experts, outputs, inputs)}
        return leaf | ({"bias": _spec(experts, outputs, init="small", stays_float=True)} if bias else {})

    router = _linear((config.num_experts, None), d, bias, stays_float=True)
    tree: Params = {
        "router": router,
        "experts": {"gate": stack(f, d), "up": stack(f, d), "down": stack(d, f)},
    }
    if width := config.shared_expert_intermediate_size:
        tree["shared"] = _mlp(config, width)
        tree["shared_gate"] = _linear((1, None), d, stays_float=True)
    if config.experts_beside_mlp:
        router |= {"scale": _spec(d, init="ones"), "per_expert_scale": _spec((experts[0], None), init="ones")}
        tree |= {name: _norm(d) for name in ("mlp_out_norm", "experts_norm", "experts_out_norm")}
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
