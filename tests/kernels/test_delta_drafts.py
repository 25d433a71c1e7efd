"""Draft tokens in linear attention: kernels for TPUs (emulated, with race detection) and of Triton
(interpreted) against plain jnp, which takes blocks.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import BF16, EMULATED, F32, HYBRID, arrays
from quick import full_except

from xinfer_jax.cache.recurrent import Recurrent
from xinfer_jax.model.linear_attention import _mix
from xinfer_jax.ops.operation import run

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def calls(impl, sizes, dtype, K, N, W, P, seed):  # noqa: PLR0913
    """Results and caches of calls with so many tokens each, from position 0 or 7 on, of the kernel and
    of plain jnp. Of each call's tokens a random number is accepted; some rows have none.
    """
    plain = partial(_mix, config=HYBRID)
    form = jax.jit(partial(run, "delta_step", plain, impl=impl, config=HYBRID))
    draws = np.random.RandomState(seed)
    start_B = np.array([0, 7, 7, 0], np.int32)
    _, (*taps, log_rate_N, bias_N, norm_Y), old, *_ = arrays(
        K, N, 128, 128, W, dtype, start_B, start_B, 1, seed
    )
    layer = dict(zip(("conv_q", "conv_k", "conv_v"), taps, strict=True))
    layer |= dict(A_log=log_rate_N, dt_bias=bias_N, gated_norm=norm_Y)
    old = jax.tree.map(jnp.nan_to_num, old)
    cache = Recurrent(tuple(old[:3]), old.state, 4096).with_draft_slots(P, start_B)
    for i, T in enumerate(sizes):
        count_B = draws.randint(0, T + 1, 4).astype(np.int32)
        count_B[:2] = T, 0
        new, *_ = arrays(K, N, 128, 128, W, dtype, start_B, count_B, T, seed + i)
        new = jax.tree.map(jnp.nan_to_num, new)
        operands = list(new), layer, cache, start_B, count_B, None
        yield form(*operands), jax.jit(plain)(*operands), count_B
        _, cache = form(*operands)
        is_draft = 1 < T <= P
        accepted_B = draws.randint(0, count_B + 1) if is_draft else count_B
        start_B = np.where(count_B > 0, start_B + accepted_B, start_B).astype(np.int32)


def assert_equal(impl, sizes, dtype=F32, K=1, N=2, W=3, P=5, seed=0):  # noqa: PLR0913
    limit = 1e-5 if dtype == F32 else 2e-2
    for (out, after), (want, wanted), count_B in calls(impl, sizes, dtype, K, N, W, P, seed):
        is_real = np.arange(out.shape[1]) < count_B[:, None]
        out, want = (np.asarray(x, np.float32)[is_real] for x in (out, want))
        np.testing.assert_allclose(out, want, rtol=limit, atol=limit * max(1, np.abs(want).max()))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5), after, wanted)


@pytest.mark.parametrize("impl", EMULATED)
@pytest.mark.parametrize("sizes", full_except(["3 3"], ["3 3", "5 1 1 4", "2 70 3"]))
def test_calls_equal_plain_jnp(sizes, impl):
    assert_equal(impl, [int(T) for T in sizes.split()])


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_any_shape(impl, request):
    """Random shapes, with `--soak`."""
    if not request.config.getoption("soak"):
        pytest.skip("--soak runs it")
    draws = np.random.RandomState(7)
    for seed in range(50):
        P = draws.randint(2, 9)
        K = draws.randint(1, 4)
        sizes = draws.randint(1, P + 1, 2)
        case = (F32, BF16)[seed % 2], K, K * draws.randint(1, 4), draws.randint(1, 5)
        assert_equal(impl, [int(T) for T in sizes], *case, P, seed)
        jax.clear_caches()  # a process cannot hold so many programs
