"""Random operands of kernels of linear attention, and what such kernels have to equal."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from small_models import QWEN

from xinfer_jax import kernels_pallas
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.families.reading import from_hf
from xinfer_jax.kernels_pallas import reference_delta
from xinfer_jax.kernels_pallas.reference_delta import DeltaState, DeltaWeights, NewToken
from xinfer_jax.mixers.linear_attention import mix
from xinfer_jax.ops.operation import Call, run

F32, BF16 = jnp.float32, jnp.bfloat16
EMULATED = ("interpret_tpu", "interpret")


def hybrid(K: int, N: int, H: int, Y: int):
    """The config of a layer of linear attention."""
    return from_hf(
        QWEN
        | dict(model_type="qwen3_next", num_hidden_layers=1, full_attention_interval=2, num_experts=0)
        | dict(linear_num_key_heads=K, linear_num_value_heads=N, linear_key_head_dim=H)
        | dict(linear_value_head_dim=Y)
    )


HYBRID = hybrid(1, 2, 128, 128)
_OPERANDS = ("products", "layer", "cache", "start_B", "num_tokens_B", "first_BT")


def delta_call(impl, *operands, config=HYBRID) -> Call:
    """A call of "delta_step", whose operands are given in order."""
    by_name = dict(zip(_OPERANDS, operands, strict=True))
    plain = partial(mix, config=config, spec=config.layers[0].mixer_of("delta"))
    return Call(plain, by_name, dict(config=config), RunConfig(impl))


def run_delta(impl, *operands, config=HYBRID):
    """Runs the call by the kernel of that name, and returns its result."""
    call = delta_call(impl, *operands, config=config)
    return run("delta_step", call.plain, call.run_config, static=call.static, **call.operands)


def arrays(K, N, H, Y, W, dtype, start, count, tokens=None, seed=0):  # noqa: PLR0913
    """The operands of a step, or of a prompt with so many tokens. Tokens of a prompt past the length, and the
    state of rows at position 0, are NaN.
    """
    draws = np.random.RandomState(seed)
    normal = lambda *shape, dtype=dtype: draws.standard_normal(shape).astype(dtype)  # noqa: E731
    B = len(start)
    rows = (B,) if tokens is None else (B, tokens)
    new = NewToken(*(normal(*rows, size) for size in (K * H, K * H, N * Y, N * Y, N, N)))
    if tokens is not None:
        is_past_BT1 = (np.arange(tokens) >= np.array(count)[:, None])[..., None]
        new = jax.tree.map(lambda x: np.where(is_past_BT1, np.nan, x).astype(dtype), new)
    taps = (normal(size, W + 1) for size in (K * H, K * H, N * Y))
    weights = DeltaWeights(*taps, normal(N), normal(N), normal(Y))
    shapes = (B, K, W, H), (B, K, W, H), (B, N, W, Y), (B, N, H, Y)
    begins_B111 = (np.array(start) == 0)[:, None, None, None]
    old = DeltaState(*(np.where(begins_B111, np.nan, normal(*shape)).astype(F32) for shape in shapes))
    new, weights, old = jax.tree.map(jnp.asarray, (new, weights, old))
    return new, weights, old, np.array(start, np.int32), np.array(count, np.int32)


@cache
def program(name, impl):
    """The kernel of this name; impl None: its reference."""
    kernel = partial(kernels_pallas.run_kernel, impl, name) if impl else getattr(reference_delta, name)
    return jax.jit(partial(kernel, eps=1e-6))


def assert_equals_reference(name, impl, args, by_largest=False):
    """States are near, inputs of the convolution equal, and rows without a token as they were. Returns the
    results. by_largest: float32 results are as near, by the largest, as logits are elsewhere.
    """
    out, state = program(name, impl)(*args)
    want, wanted = program(name, None)(*args)
    assert out.dtype == args[0].z.dtype
    out, want = (np.asarray(x, np.float32) for x in (out, want))
    limit = 1e-5 if args[0].z.dtype == F32 else 2e-2
    size = max(1, np.abs(want).max()) if by_largest else 1
    np.testing.assert_allclose(out, want, rtol=limit, atol=limit * size)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, wanted)
    jax.tree.map(np.testing.assert_array_equal, state[:3], wanted[:3])
    np.testing.assert_allclose(state.state, wanted.state, atol=1e-5)
    is_empty = args[-1] == 0
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[is_empty], y[is_empty]), state, args[2])
    return out


def assert_rows_are_alone(name, impl, args):
    """NaN in row 3 changes no bit of the other rows."""
    new, weights, old, *numbers = args
    before = jax.block_until_ready(program(name, impl)(*args))  # emulators wait for callbacks
    poison = partial(jax.tree.map, lambda x: x.at[3].set(np.nan))
    after = program(name, impl)(poison(new), weights, poison(old), *numbers)
    others = np.delete(np.arange(len(numbers[0])), 3)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[others], y[others]), before, after)
    assert np.isnan(after[0][3]).any()
