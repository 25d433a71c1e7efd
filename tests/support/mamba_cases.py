"""Random operands of kernels of Mamba-2, and what such kernels have to equal."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from xinfer_jax import kernels_pallas
from xinfer_jax.kernels_pallas import reference_mamba
from xinfer_jax.kernels_pallas.reference_mamba import MambaState, MambaToken, MambaWeights

F32, BF16 = jnp.float32, jnp.bfloat16


def arrays(G, N, Y, S, W, dtype, start, count, tokens=None, seed=0):  # noqa: PLR0913
    """The operands of a step, or of a prompt with so many tokens. Tokens of a prompt past the length, and the
    state of rows at position 0, are NaN.
    """
    draws = np.random.RandomState(seed)
    normal = lambda *shape, dtype=dtype: draws.standard_normal(shape).astype(dtype)  # noqa: E731
    B = len(start)
    rows = (B,) if tokens is None else (B, tokens)
    sizes = N * Y, G * S, G * S
    new = MambaToken(*(normal(*rows, size) for size in (*sizes, N)))
    if tokens is not None:
        is_past_BT1 = (np.arange(tokens) >= np.array(count)[:, None])[..., None]
        new = jax.tree.map(lambda x: np.where(is_past_BT1, np.nan, x).astype(dtype), new)
    taps = (normal(size, W + 1) for size in sizes)
    weights = MambaWeights(*taps, *map(normal, sizes), *(normal(N) for _ in range(3)))
    shapes = (B, N, W, Y), (B, G, W, S), (B, G, W, S), (B, N, Y, S)
    begins_B111 = (np.array(start) == 0)[:, None, None, None]
    old = MambaState(*(np.where(begins_B111, np.nan, normal(*shape)).astype(F32) for shape in shapes))
    new, weights, old = jax.tree.map(jnp.asarray, (new, weights, old))
    return new, weights, old, np.array(start, np.int32), np.array(count, np.int32)


@cache
def program(name, impl):
    """The kernel of this name; impl None: its reference."""
    kernel = partial(kernels_pallas.run_kernel, impl, name) if impl else getattr(reference_mamba, name)
    return jax.jit(kernel)


def assert_equals_reference(name, impl, args, by_largest=False):
    """States are near, inputs of the convolution equal, and rows without a token as they were. Returns the
    results. by_largest: results are as near, by the largest, as logits are elsewhere.
    """
    out, state = program(name, impl)(*args)
    want, wanted = program(name, None)(*args)
    assert out.dtype == want.dtype == F32
    size = max(1, np.abs(want).max()) if by_largest else 1
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * size)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, wanted)
    jax.tree.map(np.testing.assert_array_equal, state[:3], wanted[:3])
    size = max(1, np.abs(np.nan_to_num(wanted.state)).max()) if by_largest else 1
    np.testing.assert_allclose(state.state, wanted.state, rtol=1e-5, atol=1e-5 * size)
    is_empty = args[-1] == 0
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[is_empty], y[is_empty]), state, args[2])
    return np.asarray(out)


def assert_rows_are_alone(name, impl, args):
    """NaN in row 3 changes no bit of the other rows."""
    new, weights, old, *numbers = args
    before = jax.block_until_ready(program(name, impl)(*args))  # emulators wait for callbacks
    poison = partial(jax.tree.map, lambda x: x.at[3].set(np.nan))
    after = program(name, impl)(poison(new), weights, poison(old), *numbers)
    others = np.delete(np.arange(len(numbers[0])), 3)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), before, after)
    assert np.isnan(after[0][3]).any()


def assert_chunks_give_the_bits_of_the_whole(impl, args):
    """A prompt of 256 tokens in two chunks: the second one goes on from the state after the first."""
    new, weights, old, _, _ = args
    call = program("mamba_prefill", impl)
    start, whole, first = (np.array([x], np.int32) for x in (0, 256, 128))
    want, wanted = call(new, weights, old, start, whole)
    out, state = call(jax.tree.map(lambda x: x[:, :128], new), weights, old, start, first)
    more, state = call(jax.tree.map(lambda x: x[:, 128:], new), weights, state, first, whole - first)
    np.testing.assert_array_equal(np.concatenate([out, more], 1), want)
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
