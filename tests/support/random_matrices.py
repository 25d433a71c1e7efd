"""Random parameters and checkpoints. Matrices of every format that kernels of products read, and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from parity_cases import fuse_tensors, random_tensors

import xinfer_jax as xj
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf
from xinfer_jax.kernels_pallas.reference_products import Matrix
from xinfer_jax.weights.quantization import quantized_leaf

BF16, F16 = jnp.bfloat16, jnp.float16
INT4 = (4, 64, True)
FP8 = ["fp8", "fp8 by output"]


def random_params(config, seed=0, dtype="float32"):
    """Parameters that NumPy draws: outside a jit `xj.init_params` compiles some forty programs."""
    draws = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), dtype))

    def leaf(x):
        noise = draws.standard_normal(x.shape)
        numbers = noise * x.shape[-1] ** -0.5 if x.ndim > 1 else 1 + 0.1 * noise
        return jnp.asarray(numbers.astype(x.dtype))

    return jax.tree.map(leaf, shapes)


def write_checkpoint(path, hf, fused=False, seed=0, **how):
    """Writes a checkpoint of random tensors without a tokenizer. fused: some are one, as in transformers."""
    config = from_hf(hf)
    tensors = random_tensors(config, seed)
    has_one_form = any(spec.fused_name == spec.hf_name for spec in jax.tree.leaves(file_specs(config)))
    if fused or has_one_form or config.experts and config.experts.swiglu:
        tensors = fuse_tensors(config, tensors)
    for name in [name for name in tensors if "{}" in name]:
        tensors |= {name.format(i): one for i, one in enumerate(tensors.pop(name))}
    tensors = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    return tiny.write(path, hf, with_tokenizer=False, weights=tensors, **how)


def matrix(draws, kind, outputs, inputs, dtype, bias):
    """A random matrix. kind: float, int8, of FP8, or (bits, J, whether it has zeros)."""
    bias_O = jnp.asarray(draws.standard_normal(outputs), dtype) if bias else None
    if kind == "float":
        return Matrix(jnp.asarray(draws.standard_normal((outputs, inputs)), dtype), bias=bias_O)
    if kind == "int8":
        values = jnp.asarray(draws.integers(-127, 128, (outputs, inputs)), jnp.int8)
        return Matrix(values, jnp.asarray(draws.random(outputs) / 50, jnp.float32), bias=bias_O)
    if kind in FP8:
        values = jnp.asarray(draws.standard_normal((outputs, inputs)) * 2, jnp.float8_e4m3fn)
        sizes = (-(-outputs // 128), -(-inputs // 128)) if kind == "fp8" else (outputs,)
        return Matrix(values, jnp.asarray(draws.random(sizes) / 2, jnp.float32), bias=bias_O)
    bits, J, zeros = kind
    Q = -(-inputs // J)
    scale = jnp.asarray(draws.random((Q, outputs)) * 2**-bits, F16)
    if bits == 8:
        return Matrix(jnp.asarray(draws.integers(-127, 128, (Q, J, outputs)), jnp.int8), scale, bias=bias_O)
    values = jnp.asarray(draws.integers(0, 256, (Q, J // 2, outputs)), jnp.uint8)
    zero = jnp.asarray(draws.integers(0, 16, (Q, outputs)), jnp.uint8) if zeros else None
    return Matrix(values, scale, zero, bias_O)


def quantized_experts(layer, quantize, group):
    """The layer with its experts' matrices in int8 or int4, in groups of this size."""

    def quantized(x_XOI):
        return jax.device_put(quantized_leaf(np.asarray(x_XOI, np.float32), "", quantize, group))

    experts = layer["experts"]
    return layer | {
        "experts": {name: leaf | {"weight": quantized(leaf["weight"])} for name, leaf in experts.items()}
    }
