"""PRNG keys of requests, rows and draws, and the Gumbel noise of a draw."""

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, format_value

DRAW_TOKEN = 0  # purpose of a draw, the last number folded into its key
DRAW_BEAMS = 1


def check_key(key: jax.Array, batch: int) -> jax.Array:
    """Returns the key or keys. Old-style uint32 keys are accepted too.

    Raises:
        InputError: no key, a number of keys that is not the batch, or keys of another kind than threefry.
    """
    if not isinstance(key, np.ndarray | jax.Array) or not (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == np.uint32 and key.ndim in (1, 2))
    ):
        raise InputError(f"key must come from jax.random.key(seed), got {format_value(key)}")
    if key.dtype == np.uint32 and key.shape[-1] == 2:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if str(key.dtype) != "key<fry>":  # with rbg a row's numbers would depend on its batch
        raise InputError(
            f"keys of {key.dtype}{list(key.shape)} are not supported: make them by"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    if key.shape not in ((), (batch,)):
        raise InputError(f"keys of shape {key.shape} for {batch} rows: give one key, or one per row")
    return key


def key_from_seed(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)`, also of a 64-bit seed, without compiling a program."""
    words = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def row_keys(key: jax.Array, batch: int) -> jax.Array:
    """One key per row: `fold_in(key, row)` of one key, or the keys themselves where there is one per row.

    Raises:
        InputError: as `check_key`.
    """
    key = check_key(key, batch)
    return key if key.ndim else FOLD_IN(key, np.arange(batch))


FOLD_IN = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
FOLD_IN_EACH = jax.jit(jax.vmap(jax.random.fold_in))


def draw_key(row_key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """The key of one draw: fold_in(fold_in(row_key, position), purpose)."""
    return jax.random.fold_in(jax.random.fold_in(row_key, position), purpose)


def gumbel_noise(key: jax.Array, size: int, index_A: jax.Array | None = None) -> jax.Array:
    """Standard Gumbel noise, float32 [size], from 23 random bits for each number. Computed here so that every
    jax version draws the same. index_A: which of the numbers, [A]; None: all.
    """
    bits = _bits_at(key, size, jnp.arange(size) if index_A is None else index_A)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _bits_at(key: jax.Array, size: int, index_A: jax.Array) -> jax.Array:
    """`jax.random.bits(key, (size,))[index_A]`, without making the other bits.

    Threefry maps two words to two words. With `jax_threefry_partitionable` its input is (0, index), else
    (index, index + size / 2), padded with 0.
    """
    index_A = index_A.astype(jnp.uint32)
    half = -(-size // 2)
    partitionable = jax.threefry_partitionable.value
    first_A = jnp.zeros_like(index_A) if partitionable else index_A % half
    second_A = index_A if partitionable else jnp.where(first_A + half < size, first_A + half, 0)
    first_A, second_A = _threefry(jax.random.key_data(key), first_A, second_A)
    return first_A ^ second_A if partitionable else jnp.where(index_A < half, first_A, second_A)


def _threefry(key_2: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011), uint32. jax's own is a loop on CPUs: each round writes
    its words, in four times the time of this, which fuses.
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
