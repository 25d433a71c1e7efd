"""`init_params`: random parameters from their specs."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import Dtype
from ..checks import is_traced
from ..config.model_config import ModelConfig
from ..modes import in_default_modes
from .param_specs import Params, ParamSpec, param_specs
from .params import check_weights, resolve_dtype


@in_default_modes
def init_params(
    config: ModelConfig, key: jax.Array, dtype: Dtype | None = None, quantize: str | None = None
) -> Params:
    """Returns random parameters for a config, for tests, benchmarks or training from scratch.

    Matrices are normal with the standard deviation 1/sqrt(inputs). Embeddings and biases have the standard
    deviation 0.02, and norms are 1. To get the shapes without memory, call it in `jax.eval_shape`.

    Args:
        config: the config of the model.
        key: one PRNG key.
        dtype: the dtype of every leaf whose spec names no dtype. None takes float32 on a CPU, and bfloat16 on
            other devices.
        quantize: "int8", "int4" or "ternary" quantizes the matrices. Only one matrix at a time then exists in
            `dtype`. None quantizes nothing.

    Raises:
        InputError: the parameters need more memory than there is.
    """
    dtype = resolve_dtype(dtype)
    quantized = None
    if quantize is not None:
        from .quantization import quantizer

        quantized = quantizer(config, quantize)
    specs, tree = jax.tree.flatten(param_specs(config))
    float_bits = 8 * jnp.dtype(dtype).itemsize
    matrix_bits = float_bits if quantize is None else 8 if quantize == "int8" else 4
    bits = (math.prod(x.shape) * (matrix_bits if x.is_quantizable else float_bits) for x in specs)
    if not is_traced(key):  # else only shapes may be wanted
        check_weights(sum(bits) // 8)
    keys = jax.random.split(key, len(specs))

    def init(spec: ParamSpec, key: jax.Array) -> Any:
        own = spec.dtype or dtype
        if isinstance(spec.init, float):
            return jnp.full(spec.shape, spec.init, own)
        if spec.init == "ones":
            return jnp.ones(spec.shape, own)
        if spec.init == "norm":
            return jnp.full(spec.shape, 1 - (config.norm_offset or 0), own)
        if spec.init == "log_decay":  # exp of it: between 0.01 and 16
            return jnp.log(jax.random.uniform(key, spec.shape, jnp.float32, 0.01, 16)).astype(own)
        scale = 0.02 if spec.init == "small" else 1 / math.sqrt(spec.shape[-1])
        matrix = (scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(own)
        return quantized(matrix, spec.name) if quantized and spec.is_quantizable else matrix

    return jax.tree.unflatten(tree, [init(spec, key) for spec, key in zip(specs, keys, strict=True)])
