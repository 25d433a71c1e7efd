"""PRNG keys of requests and rows, and the Gumbel noise of a draw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import array_module
from ..errors import InputError, format_value

DRAW_TOKEN = 0  # purpose of a draw, the last number folded into its key
DRAW_BEAMS = 1
DRAW_CALLER = 2  # of callers' functions: folded in first
DRAW_XTC = 3


def check_key(key: jax.Array, batch: int) -> jax.Array:
    """Returns the key or keys as threefry keys. Keys of rbg and unsafe_rbg, and old-style uint32 keys, are
    accepted too.

    Raises:
        InputError: no key, a number of keys that is not the batch, or keys of another kind.
    """
    if not isinstance(key, np.ndarray | jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == np.uint32 and key.ndim in (1, 2))
    ):
        raise InputError(f"key must come from jax.random.key(seed), got {format_value(key)}")
    if key.dtype == np.uint32 and key.shape[-1] in (2, 4):
        key = jax.random.wrap_key_data(key, impl="threefry2x32" if key.shape[-1] == 2 else "rbg")
    if str(key.dtype) not in ("key<fry>", *_RBG):
        raise InputError(
            f"keys of {key.dtype}{list(key.shape)} are not supported: make them by"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    if key.shape not in ((), (batch,)):
        raise InputError(f"keys of shape {key.shape} for {batch} rows: give one key, or one per row")
    return _threefry_key(key) if str(key.dtype) in _RBG else key


_RBG = ("key<rbg>", "key<urbg>")


def _threefry_key(key: jax.Array) -> jax.Array:
    """Returns Threefry keys of the first two words of rbg keys, in which the other two are folded. Draws of
    rbg keys themselves depend on the batch under `jax.vmap`.
    """
    data = jax.random.key_data(key)
    key = jax.random.wrap_key_data(data[..., :2], impl="threefry2x32")
    fold_in = jax.vmap(jax.random.fold_in) if key.ndim else jax.random.fold_in
    return fold_in(fold_in(key, data[..., 2]), data[..., 3])


def key_from_seed(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)`, also of a 64-bit seed, without compiling a program."""
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """Returns one key per row: `fold_in(key, row)` of one key, or the keys themselves if there is one per
    row.

    Raises:
        InputError: see `check_key`.
    """
    key = check_key(key, batch)
    return key if key.ndim else FOLD_IN(key, array_module(batch).arange(batch))


FOLD_IN = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


def answer_keys(key: jax.Array, prompt_R: np.ndarray, answer_R: np.ndarray) -> np.ndarray:
    """Returns the key data, uint32 [R, 2], of rows that answer prompts. No program is compiled for it.

    Args:
        key: a result of `check_key`: one key, into which the prompt's number is folded, or one per prompt.
        prompt_R: int32, which prompt each row answers.
        answer_R: int32, number of the answer to that prompt. It is folded in, except for 0.
    """
    data = np.asarray(jax.random.key_data(key))
    data_R2 = data[prompt_R] if data.ndim > 1 else _fold_in(data[None], prompt_R)
    return np.where(answer_R[:, None] == 0, data_R2, _fold_in(data_R2, answer_R))


def _fold_in(data_R2: np.ndarray, number_R: np.ndarray) -> np.ndarray:
    """Runs `jax.random.fold_in` on the host. data_R2: uint32 [R, 2] or [1, 2]."""
    words = _threefry(data_R2.T, np.zeros(len(number_R), np.uint32), number_R.astype(np.uint32))
    return np.stack(words, -1)


def gumbel_noise(row_key: jax.Array, position: Any, purpose: Any, index_A: jax.Array) -> jax.Array:
    """Returns standard Gumbel noise of one draw, float32 [A]: the numbers at these indices, each from 23 bits
    of `jax.random.bits` (as `jax_threefry_partitionable`) of fold_in(fold_in(row_key, position), purpose).
    """
    key = jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)
    first_A, second_A = _threefry(jax.random.key_data(key), jnp.uint32(0), index_A.astype(jnp.uint32))
    uniform = (((first_A ^ second_A) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _threefry(key_2, first, second):
    """Computes Threefry-2x32 of 20 rounds (Salmon et al. 2011), uint32. jax's own is a loop on CPUs: each
    round writes its words, in four times the time of this, which fuses.
    """
    keys = key_2[0], key_2[1], key_2[0] ^ key_2[1] ^ np.uint32(0x1BD11BDA)
    first += keys[0]
    second += keys[1]
    for i in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            first += second
            second = (second << distance | second >> 32 - distance) ^ first
        first += keys[(i + 1) % 3]
        second += keys[(i + 2) % 3] + np.uint32(i + 1)
    return first, second
