"""The tree of parameter specs: the single source for initialisation, the loader's check and byte counts."""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..memory import check_memory
from .quantization import quantized_leaf
from .quantized_weights import check_quantize_method

AnyArray = jax.Array | np.ndarray  # jit takes both
Params = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key

_Axis = tuple[int, str | None]  # size and name

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor: its shape, logical axes (`sharding.RULES`), and its place in a Hugging Face checkpoint."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    hf_name: str  # with "{}": one tensor for each expert, stacked here along the first axis
    fused_name: str | None = None  # a larger tensor that may contain it instead
    first_row: int = 0  # its first row in that tensor, on the last axis but one
    fused_rows: int = 0  # rows of that tensor

    def tensor_shapes(self, tensors: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the tensors that contain it in a checkpoint with these tensors."""
        if self.fused_name and self.fused_name in tensors:
            return {self.fused_name: (*self.shape[:-2], self.fused_rows, self.shape[-1])}
        if "{}" in self.hf_name:
            return {self.hf_name.format(expert): self.shape[1:] for expert in range(self.shape[0])}
        return {self.hf_name: self.shape}

    def tensor_parts(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the tensors that contain it, as parts of equal size.

        Args:
            tensors: the `StoredTensor`s of a checkpoint by name.
        """
        if self.fused_name and self.fused_name in tensors:
            firsts = range(self.first_row, self.fused_rows * math.prod(self.shape[:-2]), self.fused_rows)
            return [tensors[self.fused_name].view(first, self.shape[-2:]) for first in firsts]
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
    return tree


def _layer(config: ModelConfig, index: int) -> Params:
    prefix = f"model.layers.{index}"
    h = config.head_dim
    d = (config.hidden_size, "embed")
    heads = config.num_attention_heads * h
    kv_heads = config.num_key_value_heads * h
    n = (heads, "heads")
    k = (kv_heads, "kv_heads")
    attn = f"{prefix}.self_attn"
    fused = (f"{attn}.qkv_proj.weight", heads + 2 * kv_heads) if config.fused_projections else None
    tree: Params = {
        "q": _linear(f"{attn}.q_proj", n, d, config.qkv_bias, fused, 0),
        "k": _linear(f"{attn}.k_proj", k, d, config.qkv_bias, fused, heads),
        "v": _linear(f"{attn}.v_proj", k, d, config.qkv_bias, fused, heads + kv_heads),
        "o": _linear(f"{attn}.o_proj", d, n, config.o_bias),
    }
    norms: dict[str, str] = {}
    if config.pre_norm:
        norms |= dict(attn_norm="input", mlp_norm="pre_feedforward" if config.post_norm else "post_attention")
    if config.post_norm:
        norms |= dict(attn_post_norm="post_attention", mlp_post_norm="post_feedforward")
    for name, hf_name in norms.items():
        tree[name] = ParamSpec(d[:1], d[1:], f"{prefix}.{hf_name}_layernorm.weight")
    if config.sub_norm:
        f = (config.intermediate_size, "mlp")
        tree["o_norm"] = ParamSpec(n[:1], n[1:], f"{attn}.attn_sub_norm.weight")
        tree["down_norm"] = ParamSpec(f[:1], f[1:], f"{prefix}.mlp.ffn_sub_norm.weight")
    if config.qk_norm:
        sizes = dict(q_norm=n, k_norm=k) if config.qk_norm_joint else dict(q_norm=(h, None), k_norm=(h, None))
        for name, (size, axis) in sizes.items():
            tree[name] = ParamSpec((size,), (axis,), f"{attn}.{name}.weight")
    has_experts = config.layer_experts and config.layer_experts[index]
    feed_forward = _experts if has_experts else _mlp
    return tree | feed_forward(config, f"{prefix}.mlp")


def _mlp(config: ModelConfig, prefix: str) -> Params:
    d = (config.hidden_size, "embed")
    f = (config.intermediate_size, "mlp")
    bias = config.mlp_bias
    fused = (f"{prefix}.gate_up_proj.weight", 2 * f[0]) if config.fused_projections else None
    return {
        "gate": _linear(f"{prefix}.gate_proj", f, d, bias, fused, 0),
        "up": _linear(f"{prefix}.up_proj", f, d, bias, fused, f[0]),
        "down": _linear(f"{prefix}.down_proj", d, f, bias),
    }


def _experts(config: ModelConfig, prefix: str) -> Params:
    """Checkpoints have a tensor for each expert, or stacked ones, as transformers 5 has in memory."""
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
    return {"router": _linear(f"{prefix}.gate", (experts, None), (d, "embed")), "experts": stacks}


def _linear(
    name: str, outputs: _Axis, inputs: _Axis, bias=False, fused: tuple[str, int] | None = None, row: int = 0
) -> Params:
    """fused: name and rows of a tensor that may contain the matrix; row: its first row there."""
    fused_fields = (fused[0], row, fused[1]) if fused else ()
    (rows, of_rows) = outputs
    (columns, of_columns) = inputs
    leaf: Params = {
        "weight": ParamSpec((rows, columns), (of_rows, of_columns), f"{name}.weight", *fused_fields)
    }
    return leaf | ({"bias": ParamSpec((rows,), (of_rows,), f"{name}.bias")} if bias else {})


def init_params(
    config: ModelConfig, key: jax.Array, dtype: Any = None, quantize: str | None = None
) -> Params:
    """Returns random parameters: matrices normal with deviation 1/sqrt(inputs), embedding and biases 0.02,
    norms 1.

    Args:
        config, key: the model, and one PRNG key.
        dtype: of every leaf; None: float32 on CPU, bfloat16 elsewhere.
        quantize: None, "int8", "int4" or "ternary": the form of the matrices. Only one matrix at a time
            exists in `dtype`.

    Raises:
        InputError: they need more memory than there is.
    """
    dtype = resolve_dtype(dtype)
    check_quantize_method(None if quantize == "ternary" else quantize)
    check_quantize(config, quantize)
    specs, tree = jax.tree.flatten(param_specs(config))
    check_weights(specs, dtype, quantize)
    keys = jax.random.split(key, len(specs))

    def init(spec: ParamSpec, key: jax.Array) -> Any:
        if spec.hf_name.endswith("norm.weight"):
            return jnp.full(spec.shape, 1 - config.norm_offset, dtype)
        scale = 0.02 if "embed" in spec.hf_name or len(spec.shape) == 1 else 1 / math.sqrt(spec.shape[-1])
        matrix = (scale * jax.random.normal(key, spec.shape)).astype(dtype)
        if quantize is None or len(spec.shape) == 1:
            return matrix
        return jax.device_put(quantized_leaf(np.asarray(matrix), spec.hf_name, quantize))

    return jax.tree.unflatten(tree, [init(spec, key) for spec, key in zip(specs, keys, strict=True)])


def check_weights(
    specs: Sequence[ParamSpec], dtype: Any, quantize: str | None = None, share: float = 1
) -> None:
    """Raises InputError where the tensors need more memory than there is.

    Args:
        specs: the tensors.
        dtype: of floating-point tensors.
        quantize: None, "int8", or another method, which counts 4 bits a number.
        share: fraction of the tensors in this memory.
    """
    float_bits = 8 * jnp.dtype(dtype).itemsize
    matrix_bits = float_bits if quantize is None else 8 if quantize == "int8" else 4
    bits = sum(math.prod(spec.shape) * (matrix_bits if len(spec.shape) > 1 else float_bits) for spec in specs)
    check_memory(
        int(share * bits / 8), "the weights", "use a smaller dtype, quantize them, or use a smaller model"
    )


def check_params(params: Any, config: Any) -> None:
    """Raises InputError unless params are a model's tree and config is its `ModelConfig`."""
    if not isinstance(config, ModelConfig):
        raise InputError(f"config must be a ModelConfig, as model.config is, got {type(config).__name__}")
    if not isinstance(params, Mapping) or not {"embed", "layers", "final_norm"} <= params.keys():
        raise InputError(f"params must be a model's tree, as model.params is, got {type(params).__name__}")
    if len(params["layers"]) != config.num_hidden_layers:
        raise InputError(
            f"params have {len(params['layers'])} layers, the config has {config.num_hidden_layers}"
        )


def check_quantize(config: ModelConfig, method: str | None) -> None:
    """Raises InputError where the model's matrices cannot be quantized by this method."""
    if method and config.num_experts:
        raise InputError(
            f"quantized weights ({method}) are not supported for model_type {config.model_type!r}: experts"
            " stay float numbers"
        )


def activation_dtype(params: Params) -> Any:
    """Returns the dtype of hidden states: that of the norms, which are never quantized."""
    return params["final_norm"].dtype


def cache_dtype(params: Params) -> Any:
    """Returns the dtype of keys and values: that of activations; on CPU float32, since XLA (jax 0.10) would
    convert all of them in each step.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else activation_dtype(params)


def resolve_dtype(dtype: Any) -> Any:
    """Returns a floating dtype from its name or dtype; None: float32 on CPU, bfloat16 on GPU and TPU.

    Raises:
        InputError: it is none of float32, bfloat16, float16.
    """
    if dtype is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if name not in tuple(_DTYPES):
        raise InputError(f"dtype {format_value(name)} is not supported: use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree's arrays, or of its shapes and types."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
