"""The tree of parameter specs: shapes, logical axes and initial values."""

import dataclasses
from typing import Any

import jax

from ..annotations import Params as Params
from ..config.model_config import ModelConfig, check_config
from ..errors import InputError
from ..registry import plugin

Axis = tuple[int, str | None]  # size and name


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor: its shape, logical axes (`sharding.RULES`) and initial values."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | float = "matrix"  # its initial values, as `init_params` has them, or one number for all
    stays_float: bool = False  # never quantized, as vectors are not
    kv_heads: int = 0  # along the axis of that name
    name: str = ""  # its path in the tree, as "layers.0.q.weight"
    dtype: str | None = None  # its dtype in every model; None: the model's

    @property
    def is_matrix(self) -> bool:
        """Returns True if the parameter has rows and columns. Each expert has a matrix."""
        return len(self.shape) > 1

    @property
    def is_quantizable(self) -> bool:
        """Returns True if the parameter is quantized in a quantized model."""
        return self.is_matrix and not self.stays_float


def param_specs(config: ModelConfig) -> Params:
    """Returns the parameter tree of `config` with a `ParamSpec` at every leaf. The tree of a Llama is

        embed: {weight: [V, D]}
        layers: a tuple of L dicts
            attn_norm: [D]
            q: {weight: [N H, D]}, k: {weight: [K H, D]}, v: {weight: [K H, D]}, o: {weight: [D, N H]}
            mlp_norm: [D]
            gate: {weight: [F, D]}, up: {weight: [F, D]}, down: {weight: [D, F]}
        final_norm: [D]
        lm_head: {weight: [V, D]}, absent if the model is tied

    Matrices may have a bias next to their weight. Other mixers and feed-forwards have other leaves.
    """
    check_config(config)
    d = (config.hidden_size, "embed")
    vocabulary = (config.vocab_size, "vocab")
    tree: Params = {
        "embed": dense(vocabulary, d, init="small"),
        "layers": tuple(layer_specs(config, i) for i in range(config.num_hidden_layers)),
        "final_norm": norm_spec(d),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = dense(vocabulary, d)
    if P := config.hidden_size_per_layer_input:  # of each layer beside the hidden states: of a token
        width = (P * config.num_hidden_layers, None)
        tree["layer_embed"] = dense((config.vocab_size_per_layer_input, "vocab"), width, init="small")
        tree["layer_proj"] = dense(width, d)
        tree["layer_input_norm"] = norm_spec((P, None))
    if config.draft_head is not None:
        tree["draft_head"] = plugin("draft head", config.draft_head.kind).of_model(config).param_specs()
    return jax.tree_util.tree_map_with_path(_with_name, tree)


def leaf_name(path: Any) -> str:
    """Returns a path of jax in the tree as a name, such as "layers.0.q.weight"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _with_name(path: Any, spec: ParamSpec) -> ParamSpec:
    return dataclasses.replace(spec, name=leaf_name(path))


def layer_specs(config: ModelConfig, index: int) -> Params:
    """Returns the specs of one layer."""
    spec = config.layers[index]
    d = (config.hidden_size, "embed")
    parts: list[tuple[str, Any]] = [("attn", mixer) for mixer in config.mixers(index)]
    if feed_forward := config.feed_forward(index):
        parts.append(("mlp", feed_forward))
    tree: Params = {}
    for name, part in parts:
        own = part.param_specs()
        if common := sorted(tree.keys() & own.keys()):
            raise InputError(f"parts of layer {index} have parameters of the same names: {', '.join(common)}")
        tree |= own
        tree |= {f"{name}_norm": norm_spec(d)} if spec.pre_norm else {}
        tree |= {f"{name}_post_norm": norm_spec(d)} if spec.post_norm else {}
    if P := config.hidden_size_per_layer_input:
        tree |= dict(input_gate=dense((P, None), d), input_proj=dense(d, (P, None)), input_norm=norm_spec(d))
    if spec.scalar:
        tree["layer_scalar"] = tensor((1, None), init="ones")
    return tree


def tensor(
    *axes: Axis, init: str = "matrix", stays_float: bool = False, dtype: str | None = None
) -> ParamSpec:
    """Returns the spec of a tensor with these axes."""
    (shape, names) = zip(*axes, strict=True)
    return ParamSpec(shape, names, init, stays_float, dtype=dtype)


def norm_spec(features: Axis) -> ParamSpec:
    """Returns the spec of the weight of a norm."""
    return tensor(features, init="norm")


def dense(
    outputs: Axis, inputs: Axis, bias: bool = False, init: str = "matrix", stays_float: bool = False
) -> Params:
    """Returns the specs of a matrix, and of its bias if it has one."""
    leaf: Params = {"weight": tensor(outputs, inputs, init=init, stays_float=stays_float)}
    return leaf | ({"bias": tensor(outputs, init="small", stays_float=stays_float)} if bias else {})
