"""Mamba-2 by kernels of Triton, interpreted, against their reference: decode steps and prompts."""

import jax
import mamba_cases
import numpy as np
import pytest
from mamba_cases import BF16, F32, arrays
from quick import full_except

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
IMPL = "interpret"
# G, N, Y, S, W, dtype, positions, and which rows have a token.
STEPS = {
    "ragged": (2, 4, 64, 128, 3, F32, (5, 0, 7, 2, 0), (0, 1, 0, 1, 0)),
    "bf16": (1, 3, 128, 256, 3, BF16, (0, 9), (1, 1)),
    "no-row-has-a-token": (2, 2, 64, 64, 1, F32, (3, 0, 2), (0, 0, 0)),
}


def assert_step_equals_reference(args):
    out = mamba_cases.assert_equals_reference("mamba_step", IMPL, args)
    assert not out[args[-1] == 0].any()


@pytest.mark.parametrize("name", full_except(["ragged"], STEPS))
def test_step(name):
    assert_step_equals_reference(arrays(*STEPS[name]))


@pytest.mark.full
def test_another_row_changes_no_bit_of_a_step():
    mamba_cases.assert_rows_are_alone("mamba_step", IMPL, arrays(*STEPS["ragged"]))


@pytest.mark.soak
def test_a_step_of_any_shape():
    draws = np.random.RandomState(5)
    for seed in range(60):
        (G, group), B = draws.randint(1, 5, 2), draws.randint(1, 6)
        Y, S = draws.choice([64, 128, 256], 2)
        case = G, G * group, Y, S, draws.randint(1, 5), (F32, BF16)[seed % 2]
        assert_step_equals_reference(arrays(*case, draws.randint(0, 3, B), draws.randint(0, 2, B), seed=seed))
        jax.clear_caches()  # a process cannot hold so many programs


# As above, then valid tokens of each row, and tokens.
PROMPTS = {
    "ragged": (1, 2, 64, 64, 3, F32, (5, 0, 7, 0), (70, 3, 0, 65), 70),
    "several-blocks": (2, 6, 128, 128, 1, F32, (64, 0), (257, 0), 300),
    "bf16": (1, 5, 64, 256, 3, BF16, (64,), (64,), 64),
}


def assert_prompts_equal_reference(args):
    """The order of sums is another one than that of the reference. Past the length are zeros."""
    out = mamba_cases.assert_equals_reference("mamba_prefill", IMPL, args, by_largest=True)
    assert not out[np.arange(out.shape[1]) >= args[-1][:, None]].any()


@pytest.mark.parametrize("name", full_except(["ragged"], PROMPTS))
def test_prompts(name):
    assert_prompts_equal_reference(arrays(*PROMPTS[name]))


@pytest.mark.full
def test_chunks_of_whole_blocks_give_the_bits_of_the_whole():
    """The second one goes on from the state after the first. XLA, which runs interpreted kernels, adds
    otherwise in products with an array of one block.
    """
    args = arrays(1, 2, 64, 64, 3, F32, (0,), (256,), 256)
    mamba_cases.assert_chunks_give_the_bits_of_the_whole(IMPL, args)


@pytest.mark.full
def test_weak_decays_between_strong_ones():
    """A decay between two tokens is no difference of large rounded sums."""
    new, weights, *others = arrays(1, 2, 64, 64, 3, F32, (0,), (64,), 64)
    weights = weights._replace(log_rate_N=weights.log_rate_N + 1)
    assert_prompts_equal_reference((new._replace(dt=8 * new.dt), weights, *others))


@pytest.mark.full
def test_another_row_changes_no_bit_of_prompts():
    mamba_cases.assert_rows_are_alone("mamba_prefill", IMPL, arrays(*PROMPTS["ragged"]))


@pytest.mark.soak
def test_prompts_of_any_shape():
    draws = np.random.RandomState(5)
    for seed in range(60):
        G, group, B, T = (draws.randint(1, most) for most in (3, 7, 4, 300))
        Y, S = draws.choice([64, 128, 256], 2)
        case = G, G * group, Y, S, draws.randint(1, 5), (F32, BF16)[seed % 2]
        args = arrays(*case, draws.randint(0, 3, B), draws.randint(0, T + 1, B), T, seed)
        assert_prompts_equal_reference(args)
        jax.clear_caches()
