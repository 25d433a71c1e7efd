"""The tree of parameter shapes: the single source for initialisation, the loader's check and byte counts.

Matrices keep the checkpoint's layout [out, in]: nothing is transposed while loading, and a one-row product reads each
output's weights in one run (measured on CPU: 18-21 GB/s against 10-16 for [in, out]).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import ModelConfig
from .errors import InputError
from .quantization import check_method, quantized_leaf

Params = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One tensor: its shape and its name in a Hugging Face checkpoint."""

    shape: tuple[int, ...]
    hf_name: str


def param_specs(config: ModelConfig) -> Params:
    """The parameter tree of `config` with a `ParamSpec` at every leaf."""
    d, f, v, h = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * h, config.num_key_value_heads * h

    def linear(name: str, out_size: int, in_size: int, bias: bool) -> Params:
        leaf = {"weight": ParamSpec((out_size, in_size), f"{name}.weight")}
        return leaf | ({"bias": ParamSpec((out_size,), f"{name}.bias")} if bias else {})

    def layer(prefix: str) -> Params:
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        tree = {
            "attn_norm": ParamSpec((d,), f"{prefix}.input_layernorm.weight"),
            "q": linear(f"{attn}.q_proj", heads, d, config.qkv_bias),
            "k": linear(f"{attn}.k_proj", kv_heads, d, config.qkv_bias),
            "v": linear(f"{attn}.v_proj", kv_heads, d, config.qkv_bias),
            "o": linear(f"{attn}.o_proj", d, heads, config.o_bias),
            "mlp_norm": ParamSpec((d,), f"{prefix}.post_attention_layernorm.weight"),
            "gate": linear(f"{mlp}.gate_proj", f, d, config.mlp_bias),
            "up": linear(f"{mlp}.up_proj", f, d, config.mlp_bias),
            "down": linear(f"{mlp}.down_proj", d, f, config.mlp_bias),
        }
        if config.qk_norm:
            tree["q_norm"] = ParamSpec((h,), f"{attn}.q_norm.weight")
            tree["k_norm"] = ParamSpec((h,), f"{attn}.k_norm.weight")
        return tree

    tree = {
        "embed": linear("model.embed_tokens", v, d, bias=False),
        "layers": tuple(layer(f"model.layers.{i}") for i in range(config.num_hidden_layers)),
        "final_norm": ParamSpec((d,), "model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = linear("lm_head", v, d, bias=False)
    return tree


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = None, quantize: str | None = None) -> Params:
    """Random parameters: matrices normal with standard deviation 1/sqrt(inputs) (0.02 for the embedding), biases normal 0.02, norms one.

    Args:
        config: the model.
        key: one PRNG key.
        dtype: of every leaf; None: `default_dtype()`.
        quantize: None, "int8" or "int4": the matrices in that form, one after the other, so that they never exist in `dtype` all at once.
    """
    dtype = resolve_dtype(dtype)
    check_method(quantize)
    specs, tree = jax.tree.flatten(param_specs(config))
    keys = jax.random.split(key, len(specs))

    def init(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if spec.hf_name.endswith("norm.weight"):
            return jnp.ones(spec.shape, dtype)
        scale = 0.02 if "embed" in spec.hf_name or len(spec.shape) == 1 else 1 / math.sqrt(spec.shape[1])
        matrix = (scale * jax.random.normal(key, spec.shape)).astype(dtype)
        return matrix if quantize is None or len(spec.shape) == 1 else quantized_leaf(np.asarray(matrix), spec.hf_name, quantize)

    return jax.tree.unflatten(tree, [init(spec, key) for spec, key in zip(specs, keys, strict=True)])


def default_dtype() -> Any:
    """float32 on CPU, bfloat16 on GPU and TPU."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def activation_dtype(params: Params) -> Any:
    """The type of hidden states: that of the norms, which are never quantized."""
    return params["final_norm"].dtype


def cache_dtype(params: Params) -> Any:
    """For K and V: that of the activations; on CPU float32, since XLA there widens a 16-bit cache as a whole at every step (jax 0.10)."""
    return jnp.float32 if jax.default_backend() == "cpu" else activation_dtype(params)


def resolve_dtype(dtype: Any) -> Any:
    """A floating dtype from its name, a dtype, or None for the default.

    Raises:
        InputError: none of float32, bfloat16, float16.
    """
    if dtype is None:
        return default_dtype()
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise InputError(f"dtype {name!r} is not supported: use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def tree_bytes(tree: Any) -> int:
    """Bytes that the arrays of a pytree hold."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
