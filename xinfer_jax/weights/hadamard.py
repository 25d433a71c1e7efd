"""Hadamard rotations that remove outliers from activations: QuaRot (Ashkboos et al. 2024).

A large value of one channel is spread over many channels, so int8 keeps the others precise.
The rotated model is the same function: if a vector and a matrix's rows are rotated by the same matrix, their
products stay the same. The residual stream is rotated, and the rotation is folded into every matrix that
reads or writes it. Values are rotated head by head, by folding into v's rows and o's columns. Norms commute
with rotations once their gains are folded into the columns of the next matrices. At run time only down_proj's
input is rotated, in blocks, and the residual stream at the final norm and before lm_head: so tied embeddings
stay tied, and hidden states equal those of the plain model.

Models into which this cannot be folded have every matrix's inputs rotated in blocks, and each product rotates
its activations so (`RotatedWeight.input_block`): that needs nothing of the model.

A rotation first multiplies by signs, without which the common part of all channels would become an outlier.
Then it multiplies by a Kronecker product of small symmetric matrices: Hadamard matrices for the power of two
in the width, and a Hartley matrix, [cos + sin](2 pi i j / m), for the remaining factor m.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config.model_config import ModelConfig
from ..config.unsupported import check_supported
from ..device import run_in_blocks
from ..errors import InputError
from .params import Params, ParamSpec, param_specs

_BLOCK = 64  # of down_proj's input, and of a Hadamard matrix: 128 and 256 take two and four times as long
_MIN_BLOCK = 16  # widths with a smaller power of two are rotated as one block
_HOST_BLOCK = 16  # of a Hadamard matrix on the host


def hadamard_rotate(x: jax.Array, width: int) -> jax.Array:
    """Returns x [..., I] rotated in blocks of that width; computed in float32, of the type of x."""
    x_RW = _multiply_factors(x.astype(jnp.float32).reshape(-1, width) * _signs(width))
    return x_RW.reshape(x.shape).astype(x.dtype)


def hadamard_unrotate(x: jax.Array, width: int) -> jax.Array:
    """Inverse of `hadamard_rotate`."""
    x_RW = _multiply_factors(x.astype(jnp.float32).reshape(-1, width)) * _signs(width)
    return x_RW.reshape(x.shape).astype(x.dtype)


def _multiply_factors(x_RW: jax.Array) -> jax.Array:
    x = x_RW
    stride = x_RW.shape[1]
    for matrix_NN in _factors(stride, _BLOCK):
        N = len(matrix_NN)
        stride //= N
        # XLA takes ten times as long with a last axis of size 1.
        terms = ("rn,nm->rm", (-1, N)) if stride == 1 else ("rnc,nm->rmc", (-1, N, stride))
        x = jnp.einsum(terms[0], x.reshape(terms[1]), matrix_NN, precision=lax.Precision.HIGHEST)
    return x.reshape(x_RW.shape)


def rotate_mlp(x: jax.Array, config: ModelConfig) -> jax.Array:
    """The input [..., F] of an MLP's last matrix, rotated in blocks of `mlp_block_width`."""
    return hadamard_rotate(x, mlp_block_width(config))


def mlp_block_width(config: ModelConfig) -> int:
    """Returns the width of the blocks in which down_proj's input is rotated."""
    return input_block_width(config.intermediate_size) or config.intermediate_size


def input_block_width(inputs: int) -> int:
    """Returns the width of the blocks in which a matrix's inputs can be rotated; 0: there is none."""
    power = min(_BLOCK, inputs & -inputs)
    return power if power >= _MIN_BLOCK else 0


@functools.lru_cache(maxsize=64)
def _factors(width: int, most: int) -> tuple[np.ndarray, ...]:
    """Symmetric orthogonal matrices, float32, whose Kronecker product has this width."""
    power = width & -width
    m = width // power
    factors = []
    if m > 1:
        angles = np.outer(np.arange(m), np.arange(m)) % m * (2 * np.pi / m)
        factors.append(((np.cos(angles) + np.sin(angles)) / np.sqrt(m)).astype(np.float32))
    while power > 1:
        size = min(power, most)
        index = np.arange(size)
        factors.append(_parity(index[:, None] & index) / np.sqrt(np.float32(size)))
        power //= size
    return tuple(factors)


@functools.lru_cache(maxsize=64)
def _signs(width: int) -> np.ndarray:
    """The Rudin-Shapiro sequence, float32 [W]: its product with a Hadamard matrix has no large entry."""
    index = np.arange(width)
    return _parity(index & index >> 1)


def _parity(number: np.ndarray) -> np.ndarray:
    """Returns -1 where an odd number of bits is set, else 1."""
    for shift in (16, 8, 4, 2, 1):
        number = number ^ number >> shift
    return 1 - 2 * (number & 1).astype(np.float32)


class TensorRotation(NamedTuple):
    """How a checkpoint's tensor is rotated, and which gains are folded into it."""

    outputs: int = 0  # width of the blocks along the first axis; 0: not rotated
    inputs: int = 0  # the same along the second axis
    norm: str | None = None  # of a matrix: the norm whose gains are folded into it; of a norm: its own name


def rotate_tensor(tensor: Any, rotation: TensorRotation, norm: Callable[[str], np.ndarray]) -> Any:
    """Rotates a tensor, in float32 on the host: an array, or an object that reads a slice of rows. Returns an
    array, or where outputs are not rotated an object that rotates rows as they are read.

    norm: returns a norm's weights by its name.
    """
    if rotation.norm and len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    if rotation.outputs:
        tensor = _rotate_outputs(tensor[:], rotation.outputs)
    gain_I = norm(rotation.norm).astype(np.float32) if rotation.norm else None
    return RotatedRows(tensor, rotation.inputs, gain_I) if rotation.inputs else tensor


class RotatedRows:
    """A matrix [O, I] whose rows are read, multiplied elementwise by gains [I], and rotated."""

    def __init__(self, matrix_OI: Any, width: int, gain_I: np.ndarray | None = None):
        self._matrix_OI = matrix_OI
        self._width = width
        self._gain_I = gain_I
        self.shape = matrix_OI.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        x_RI = self._matrix_OI[rows].astype(np.float32)
        x_RI = x_RI if self._gain_I is None else x_RI * self._gain_I
        return rotate_on_host(x_RI, self._width)


def _rotate_outputs(tensor: np.ndarray, width: int) -> np.ndarray:
    """Rotates the first axis of a bias [O] or a matrix [O, I] in blocks; float32."""
    x_OI = tensor.reshape(len(tensor), -1)
    out_OI = np.empty(x_OI.shape, np.float32)

    def rotate_columns(at: slice) -> None:
        out_OI[:, at] = rotate_on_host(np.ascontiguousarray(x_OI[:, at].T, np.float32), width).T

    run_in_blocks(rotate_columns, x_OI.shape[1], 4 * len(x_OI))
    return out_OI.reshape(tensor.shape)


def rotate_on_host(x_RI: np.ndarray, width: int) -> np.ndarray:
    """`hadamard_rotate` of float32, in products so small that BLAS starts no threads of its own."""
    x = x_RI.reshape(-1, width) * _signs(width)
    stride = width
    for matrix_NN in _factors(width, _HOST_BLOCK):
        N = len(matrix_NN)
        stride //= N
        x = x.reshape(-1, width // N, N) @ matrix_NN if stride == 1 else matrix_NN @ x.reshape(-1, N, stride)
    return x.reshape(x_RI.shape)


def can_rotate(config: ModelConfig) -> bool:
    """Whether rotations can be folded into all parts of the model."""
    try:
        check_supported(config, "rotations", "rotations are", "leave them out")
    except InputError:
        return False
    return True


def tensor_rotations(config: ModelConfig) -> dict[str, TensorRotation]:
    """Returns the rotation of every parameter that changes, by its name in the tree. Raises InputError where
    the model has a part with which they are not supported.
    """
    check_supported(config, "rotations", "rotations are", "leave them out")
    d = config.hidden_size
    h = config.head_dim
    attn = (0, d, "attn_norm")
    mlp = (0, d, "mlp_norm")
    down = (d, mlp_block_width(config), "")
    rotations = dict(q=attn, k=attn, v=(h, d, "attn_norm"), o=(d, h, ""), gate=mlp, up=mlp, down=down)
    changes = {"embed.weight": TensorRotation(0, d), "lm_head.weight": TensorRotation(0, d)}
    for layer in param_specs(config)["layers"]:
        for name, (outputs, inputs, norm) in rotations.items():
            gains = layer[norm].name if norm else None
            changes[layer[name]["weight"].name] = TensorRotation(outputs, inputs, gains)
            if outputs and "bias" in layer[name]:
                changes[layer[name]["bias"].name] = TensorRotation(outputs)
            if gains:
                changes[gains] = TensorRotation(norm=gains)
    return changes


def rotated_params(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Returns rotated parameters of a float model, each of its own type, and the config with `rotated` set.
    Raises InputError as `tensor_rotations`.
    """
    rotations = tensor_rotations(config)
    specs = param_specs(config)
    names = [spec.name for spec in jax.tree.leaves(specs)]
    by_name = dict(zip(names, jax.tree.leaves(params), strict=True))

    def leaf(spec: ParamSpec, x: Any) -> jax.Array:
        rotation = rotations.get(spec.name)
        if rotation is None:
            return x
        x_rotated = rotate_tensor(np.asarray(x), rotation, lambda name: np.asarray(by_name[name]))
        return jnp.asarray(x_rotated[:], x.dtype)

    return jax.tree.map(leaf, specs, params), dataclasses.replace(config, rotated=True)
