"""Rotations that leave a model's function as it is and its activations without outliers: QuaRot (Ashkboos et
al. 2024). What is large in one channel is spread over many, so that rounding to int8 keeps the others too.

A vector and a matrix's row that are turned alike have the same product. The residual stream lies turned, and
every matrix that reads from it or writes to it takes the rotation in; so do values, head by head, in v's rows
and o's columns. Norms commute with it once their gains are columns of what follows. Turned while running are
only what enters the last matrix of an MLP, behind a product, and the stream at the last norm and once more
before the vocabulary matrix: so a tied table stays one, and hidden states are those of the plain model.

A rotation is a Kronecker product of small symmetric matrices, behind signs, without which what channels have
in common would become an outlier: Hadamard's for the power of two in a width, and Hartley's, [cos + sin](2 pi
i j / m), for what is left. The MLP's inside is turned in blocks of 64: as one product with a matrix it takes
less time than what follows takes to round it.
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
from ..errors import InputError
from ..host import by_blocks
from .params import Params, ParamSpec, param_specs

_BLOCK = 64  # of the MLP's inside, and of a Hadamard matrix: 128 and 256 take two and four times as long
_LEAST = 16  # what has no such power of two is turned as a whole
_ON_HOST = 16  # of a Hadamard matrix


def rotated(x: jax.Array, width: int) -> jax.Array:
    """x [..., I] turned in blocks of that width. In float32; of the type of x."""
    return _mixed(x.astype(jnp.float32).reshape(-1, width) * _signs(width)).reshape(x.shape).astype(x.dtype)


def restored(x: jax.Array, width: int) -> jax.Array:
    """What `rotated` makes x of."""
    x_RW = _mixed(x.astype(jnp.float32).reshape(-1, width)) * _signs(width)
    return x_RW.reshape(x.shape).astype(x.dtype)


def _mixed(x_RW: jax.Array) -> jax.Array:
    x = x_RW
    below = x_RW.shape[1]
    for matrix_NN in _factors(below, _BLOCK):
        N = len(matrix_NN)
        below //= N
        # With a last axis of one XLA takes ten times as long.
        terms = ("rn,nm->rm", (-1, N)) if below == 1 else ("rnc,nm->rmc", (-1, N, below))
        x = jnp.einsum(terms[0], x.reshape(terms[1]), matrix_NN, precision=lax.Precision.HIGHEST)
    return x.reshape(x_RW.shape)


def inner_block(config: ModelConfig) -> int:
    """The width of the blocks in which the MLP's inside is turned."""
    power = min(_BLOCK, config.intermediate_size & -config.intermediate_size)
    return power if power >= _LEAST else config.intermediate_size


@functools.lru_cache(maxsize=64)
def _factors(width: int, most: int) -> tuple[np.ndarray, ...]:
    """Symmetric orthogonal matrices, float32, whose Kronecker product has that width."""
    power = width & -width
    m = width // power
    factors = []
    if m > 1:
        turns = np.outer(np.arange(m), np.arange(m)) % m * (2 * np.pi / m)
        factors.append(((np.cos(turns) + np.sin(turns)) / np.sqrt(m)).astype(np.float32))
    while power > 1:
        size = min(power, most)
        index = np.arange(size)
        factors.append(_parity(index[:, None] & index) / np.sqrt(np.float32(size)))
        power //= size
    return tuple(factors)


@functools.lru_cache(maxsize=64)
def _signs(width: int) -> np.ndarray:
    """Rudin's and Shapiro's, float32 [W]: a Hadamard matrix makes nothing large of them."""
    index = np.arange(width)
    return _parity(index & index >> 1)


def _parity(number: np.ndarray) -> np.ndarray:
    """-1 where an odd number of bits is set, else 1."""
    for shift in (16, 8, 4, 2, 1):
        number = number ^ number >> shift
    return 1 - 2 * (number & 1).astype(np.float32)


class Turn(NamedTuple):
    """What becomes of a tensor of a checkpoint. Widths of blocks that are turned; 0: none."""

    outputs: int = 0  # along the first axis
    inputs: int = 0  # along the second
    norm: str | None = None  # the norm whose gains the second axis takes; of a norm: they are taken


def turned(tensor: Any, turn: Turn, norm: Callable[[str], np.ndarray]) -> Any:
    """A tensor as `turn` says, float32 on the host: of a matrix what gives rows when asked for them; but
    where outputs are turned it holds all.

    Args:
        tensor: an array, or what reads rows of one when asked for them.
        turn: one of `turns`.
        norm: gives a norm's weights by its name.
    """
    if turn.norm and len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    if turn.outputs:
        tensor = _along_outputs(tensor[:], turn.outputs)
    gain_I = norm(turn.norm).astype(np.float32) if turn.norm else None
    return _Columns(tensor, turn.inputs, gain_I) if turn.inputs else tensor


class _Columns:
    """A matrix [O, I], its columns times gains and then turned; gives rows."""

    def __init__(self, matrix_OI: Any, width: int, gain_I: np.ndarray | None):
        self._matrix_OI = matrix_OI
        self._width = width
        self._gain_I = gain_I
        self.shape = matrix_OI.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        x_RI = self._matrix_OI[rows].astype(np.float32)
        x_RI = x_RI if self._gain_I is None else x_RI * self._gain_I
        return _on_host(x_RI, self._width)


def _along_outputs(tensor: np.ndarray, width: int) -> np.ndarray:
    """A bias [O] or a matrix [O, I], float32, its first axis turned in blocks."""
    x_OI = tensor.reshape(len(tensor), -1)
    out_OI = np.empty(x_OI.shape, np.float32)

    def some(at: slice) -> None:
        out_OI[:, at] = _on_host(np.ascontiguousarray(x_OI[:, at].T, np.float32), width).T

    by_blocks(some, x_OI.shape[1], 4 * len(x_OI))
    return out_OI.reshape(tensor.shape)


def _on_host(x_RI: np.ndarray, width: int) -> np.ndarray:
    """`rotated` of float32, in products so small that BLAS starts no threads beside ours."""
    x = x_RI.reshape(-1, width) * _signs(width)
    below = width
    for matrix_NN in _factors(width, _ON_HOST):
        N = len(matrix_NN)
        below //= N
        x = x.reshape(-1, width // N, N) @ matrix_NN if below == 1 else matrix_NN @ x.reshape(-1, N, below)
    return x.reshape(x_RI.shape)


def check_gains(config: ModelConfig, what: str) -> None:
    """Raises InputError for a family whose norms' gains cannot become columns, or whose MLP is not one."""
    if config.num_experts or config.post_norm or config.sub_norm or config.norm_offset or not config.pre_norm:
        why = "a mixture of experts" if config.num_experts else "norms of another kind or place"
        raise InputError(
            f"{what} are not supported for model_type {config.model_type!r}, which has {why}: leave them out"
        )


def turns(config: ModelConfig) -> dict[str, Turn]:
    """By its name in a checkpoint, what becomes of every tensor that rotations change.

    Raises:
        InputError: as `check_gains`.
    """
    check_gains(config, "rotations, which int8 activations need,")
    d = config.hidden_size
    h = config.head_dim
    attn = (0, d, "attn_norm")
    mlp = (0, d, "mlp_norm")
    inside = inner_block(config)
    ways = dict(q=attn, k=attn, v=(h, d, "attn_norm"), o=(d, h, ""), gate=mlp, up=mlp, down=(d, inside, ""))
    found = {"model.embed_tokens.weight": Turn(0, d), "lm_head.weight": Turn(0, d)}
    for layer in param_specs(config)["layers"]:
        for name, (outputs, inputs, norm) in ways.items():
            gains = layer[norm].hf_name if norm else None
            found[layer[name]["weight"].hf_name] = Turn(outputs, inputs, gains)
            if outputs and "bias" in layer[name]:
                found[layer[name]["bias"].hf_name] = Turn(outputs)
            if gains:
                found[gains] = Turn(norm=gains)
    return found


def rotated_params(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The same function of a float model: its parameters turned, each of its own type, and the config that
    says so.

    Raises:
        InputError: as `turns`.
    """
    known = turns(config)
    specs = param_specs(config)
    leaves = jax.tree.leaves(params)
    by_name = {spec.hf_name: leaf for spec, leaf in zip(jax.tree.leaves(specs), leaves, strict=True)}

    def leaf(spec: ParamSpec, x: Any) -> jax.Array:
        turn = known.get(spec.hf_name)
        if turn is None:
            return x
        made = turned(np.asarray(x), turn, lambda name: np.asarray(by_name[name]))
        return jnp.asarray(made[:], x.dtype)

    return jax.tree.map(leaf, specs, params), dataclasses.replace(config, rotated=True)
