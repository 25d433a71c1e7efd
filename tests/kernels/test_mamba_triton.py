"""Mamba-2 by kernels of Triton, interpreted, against their reference: decode steps and prompts."""

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


# As above, then valid tokens of each row, and tokens.
PROMPTS = {
    "ragged": (1, 2, 64, 64, 3, F32, (5, 0, 7, 0), (70, 3, 0, 65), 70),
    "several-blocks": (2, 6, 128, 128, 1, F32, (64, 0), (257, 0), 300),
    "bf16": (1, 5, 64, 256, 3, BF16, (64,), (64,), 64),
}


@pytest.mark.parametrize("name", full_except(["ragged"], PROMPTS))
def test_prompts(name):
    """The order of sums is another one than that of the reference. Past the length are zeros."""
    args = arrays(*PROMPTS[name])
    out = mamba_cases.assert_equals_reference("mamba_prefill", IMPL, args, by_largest=True)
    assert not out[np.arange(out.shape[1]) >= args[-1][:, None]].any()
