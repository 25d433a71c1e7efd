"""Prompts in linear attention: kernels for TPUs (emulated, with race detection) and of Triton (interpreted)
against their reference, which takes one token after the other, and in models.
"""

from functools import partial
from itertools import product

import delta_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_cases import BF16, EMULATED, F32, HYBRID, arrays, delta_call, run_delta
from quick import full_except

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.kernels.delta_kernels import delta_form
from xinfer_jax.kernels_pallas.delta_blocks import PAIRS, split
from xinfer_jax.kernels_pallas.reference_delta import DeltaState
from xinfer_jax.mixers.linear_attention import mix
from xinfer_jax.mixers.recurrent import Recurrent

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
# K, N, H, Y, W, dtype, positions, valid tokens, tokens.
CASES = {
    "ragged": (1, 2, 128, 128, 3, F32, (5, 0, 7, 0), (70, 3, 0, 65), 70),
    "grid-steps": (1, 3, 128, 128, 1, F32, (64, 0), (257, 0), 300),
    "no-row-has-a-token": (2, 2, 128, 128, 4, F32, (3, 0), (0, 0), 2),
    "groups-of-heads": (8, 24, 128, 128, 3, BF16, (64,), (64,), 64),
}


_LONGEST = [(name, "interpret_tpu") for name in ("grid-steps", "groups-of-heads")]
KINDS = full_except([("ragged", "interpret")], product(CASES, EMULATED), _LONGEST)

program = partial(delta_cases.program, "delta_prefill")


def assert_equals_reference(impl, args):
    """The order of sums is another one than that of the reference. Past the length are zeros."""
    out = delta_cases.assert_equals_reference("delta_prefill", impl, args, by_largest=True)
    assert not out[np.arange(out.shape[1]) >= args[-1][:, None]].any()


@pytest.mark.parametrize("name, impl", KINDS)
def test_prompts(name, impl):
    assert_equals_reference(impl, arrays(*CASES[name]))


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_chunks_of_whole_blocks_give_the_bits_of_the_whole(impl):
    """The second one goes on from the state after the first. XLA, which runs interpreted kernels, adds
    otherwise in products with an array of one block.
    """
    new, weights, old, _, _ = arrays(1, 2, 128, 128, 3, F32, (0,), (256,), 256)
    call = program(impl)
    start, whole, first = (np.array([x], np.int32) for x in (0, 256, 128))
    want, wanted = call(new, weights, old, start, whole)
    out, state = call(jax.tree.map(lambda x: x[:, :128], new), weights, old, start, first)
    more, state = call(jax.tree.map(lambda x: x[:, 128:], new), weights, state, first, whole - first)
    np.testing.assert_array_equal(np.concatenate([out, more], 1), want)
    jax.tree.map(np.testing.assert_array_equal, state, wanted)


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_weak_decays_between_strong_ones(impl):
    """A decay between two tokens is no difference of large rounded sums: states would be 4e-5 off."""
    new, weights, *others = arrays(1, 2, 128, 128, 3, F32, (0,), (64,), 64)
    weights = weights._replace(log_rate_N=weights.log_rate_N + 1)
    assert_equals_reference(impl, (new._replace(a=8 * new.a), weights, *others))


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_another_row_changes_no_bit(impl):
    delta_cases.assert_rows_are_alone("delta_prefill", impl, arrays(*CASES["ragged"]))


@pytest.mark.soak
@pytest.mark.parametrize("impl", EMULATED)
def test_any_shape(impl):
    draws = np.random.RandomState(5)
    for seed in range(100):
        K, group, B, T = draws.randint(1, 4), draws.randint(1, 4), draws.randint(1, 4), draws.randint(2, 300)
        H, Y = draws.choice([128, 256] if "tpu" in impl else [64, 128], 2)
        case = K, K * group, H, Y, draws.randint(1, 5), (F32, BF16)[seed % 2]
        args = arrays(*case, draws.randint(0, 3, B), draws.randint(0, T + 1, B), T, seed)
        assert_equals_reference(impl, args)
        jax.clear_caches()  # a process cannot hold so many programs


def test_products_of_parts_drop_no_digit_of_float32():
    draws = np.random.RandomState(0)
    a, b = (draws.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (64, 64)))
    parts = [[np.asarray(x, np.float64) for x in jax.jit(split)(x)] for x in (a, b)]
    np.testing.assert_array_equal(sum(parts[0]), a)
    want = a.astype(np.float64) @ b
    got = sum(parts[0][i] @ parts[1][j] for i, j in PAIRS)
    assert np.abs(got - want).max() < 2**-24 * np.abs(want).max()


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_a_layer_equals_plain_jnp(impl):
    """The computation between the layer's products is compared. It takes blocks too."""
    case = (1, 2, 128, 128, 3, F32, (5, 0), (70, 66), 70)
    new, (*taps, log_rate_N, bias_N, norm_Y), old, start_B, count_B = arrays(*case)
    new = jax.tree.map(jnp.nan_to_num, new)
    layer = dict(zip(("conv_q", "conv_k", "conv_v"), taps, strict=True))
    layer |= dict(A_log=log_rate_N, dt_bias=bias_N, gated_norm=norm_Y)
    state = Recurrent(tuple(old[:3]), old.state, 128)
    operands = list(new), layer, state, start_B, count_B, None
    plain = partial(mix, config=HYBRID, spec=HYBRID.layers[0].mixer_of("delta"))
    out, after = jax.jit(partial(run_delta, impl))(*operands)
    want, wanted = jax.jit(plain)(*operands)
    is_real = np.arange(70) < count_B[:, None]
    np.testing.assert_allclose(out[is_real], want[is_real], rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), after, wanted)


def test_which_prompts_have_the_kernel():
    layer = {"conv_q": jnp.zeros((128, 4))}
    q_BTX = jnp.zeros((2, 3, 128))
    state = xj.init_cache(HYBRID, 2, 64).layers[0]
    form = lambda *operands: delta_form(delta_call("tpu", [q_BTX], layer, *operands))  # noqa: E731
    assert form(state, None, None, None)
    assert form(state, None, None, jnp.zeros((2, 3), jnp.int32)) is None  # segments
    assert form(None, None, None, None) is None
    wide = DeltaState(None, None, None, jax.ShapeDtypeStruct((2, 1, 256, 128), F32))
    with pytest.raises(ValueError, match="head width 256 is above 128"):
        kernels_pallas.select("delta_prefill", "triton", q_BTX, layer["conv_q"], wide)
