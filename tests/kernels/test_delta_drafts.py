"""Draft tokens in linear attention: kernels for TPUs (emulated, with race detection) and of Triton
(interpreted) against plain jnp, which takes blocks.
"""

import dataclasses
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import BF16, EMULATED, F32, arrays, hybrid, run_delta
from quick import full_except

from xinfer_jax.mixers.linear_attention import mix
from xinfer_jax.mixers.recurrent import Recurrent

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls with so many tokens each, of a cache with P draft slots; letters as in `reference_delta`."""

    sizes: tuple[int, ...]
    dtype: type = F32
    heads: tuple[int, int] = (1, 2)  # K, N
    widths: tuple[int, int] = (128, 128)  # H, Y
    W: int = 3
    P: int = 5
    seed: int = 0


CASES = {
    "drafts": Case((3, 3)),
    "steps": Case((5, 1, 1, 4)),
    "prompt": Case((2, 70, 3)),
    "groups-of-heads": Case((2, 2), heads=(16, 32)),
}


_LONGEST = [(name, "interpret_tpu") for name in ("steps", "groups-of-heads")]
KINDS = full_except([("drafts", "interpret")], product(CASES, EMULATED), _LONGEST)


def calls(impl, case):
    """Operands of the calls, from position 0 or 7 on, with results and caches of the kernel and of plain jnp.
    Of each call's tokens a random number is accepted; some rows have none, in the last call all.
    """
    config = hybrid(*case.heads, *case.widths)
    plain = partial(mix, config=config, spec=config.layers[0].mixer_of("delta"))
    form = jax.jit(partial(run_delta, impl, config=config))
    draws = np.random.RandomState(case.seed)
    start_B = np.array([0, 7, 7, 0], np.int32)
    sizes = *case.heads, *case.widths, case.W, case.dtype
    _, (*taps, log_rate_N, bias_N, norm_Y), old, *_ = arrays(*sizes, start_B, start_B, 1, case.seed)
    layer = dict(zip(("conv_q", "conv_k", "conv_v"), taps, strict=True))
    layer |= dict(A_log=log_rate_N, dt_bias=bias_N, gated_norm=norm_Y)
    old = jax.tree.map(jnp.nan_to_num, old)
    cache = Recurrent(tuple(old[:3]), old.state, 4096).with_draft_slots(case.P, start_B)
    for i, T in enumerate(case.sizes):
        count_B = draws.randint(0, T + 1, 4).astype(np.int32)
        count_B[[1, 2]] = 0, T
        if i > 1 and i == len(case.sizes) - 1:
            count_B[:] = 0
        new, *_ = arrays(*sizes, start_B, count_B, T, case.seed + i)
        operands = list(jax.tree.map(jnp.nan_to_num, new)), layer, cache, start_B, count_B, None
        got = form(*operands)
        yield (form, new, operands), got, jax.jit(plain)(*operands)
        cache = got[1]
        accepted_B = draws.randint(0, count_B + 1) if cache.holds_drafts(T) else count_B
        start_B = np.where(count_B > 0, start_B + accepted_B, start_B).astype(np.int32)


def assert_equal(impl, case):
    limit = 1e-5 if case.dtype == F32 else 2e-2
    for (form, new, operands), (out, after), (want, wanted) in calls(impl, case):
        assert "pallas_call" in str(jax.make_jaxpr(form)(*operands))
        is_real = np.arange(out.shape[1]) < operands[-2][:, None]
        assert not np.asarray(out, np.float32)[~is_real].any()
        got, want = (np.asarray(x, np.float32)[is_real] for x in (out, want))
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit * max(1, np.abs(want).max(initial=0)))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5), after, wanted)
        # Tokens past the length may be NaN, and so may be states before position 0.
        cache, start_B, count_B = operands[2:5]
        begins_B111 = ((start_B == 0) & (count_B > 0))[:, None, None, None]
        cache = dataclasses.replace(cache, state=jnp.where(begins_B111, np.nan, cache.state))
        with_nan, cache = form(list(new), operands[1], cache, *operands[3:])
        np.testing.assert_array_equal(with_nan, out)
        np.testing.assert_array_equal(cache.state, after.state)


@pytest.mark.parametrize("name, impl", KINDS)
def test_calls_equal_plain_jnp(name, impl):
    assert_equal(impl, CASES[name])


@pytest.mark.soak
@pytest.mark.parametrize("impl", EMULATED)
def test_any_shape(impl):
    draws = np.random.RandomState(7)
    for seed in range(100):
        P = draws.randint(2, 9)
        K = draws.randint(1, 4)
        sizes = tuple(int(T) for T in draws.randint(1, P + 1, 2))
        heads = K, K * draws.randint(1, 4)
        widths = tuple(int(x) for x in draws.choice([128, 256] if "tpu" in impl else [64, 128, 256], 2))
        assert_equal(impl, Case(sizes, (F32, BF16)[seed % 2], heads, widths, draws.randint(1, 5), P, seed))
        jax.clear_caches()  # a process cannot hold so many programs
