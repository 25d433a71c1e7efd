"""The decode step of linear attention: kernels for TPUs (emulated, with race detection) and of Triton
(interpreted) against their reference, and in models.
"""

import dataclasses
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
from xinfer_jax.backends.kernels.delta_kernels import delta_form, select_delta
from xinfer_jax.kernels_pallas.reference_delta import DeltaState
from xinfer_jax.kernels_pallas.tpu import delta as delta_tpu
from xinfer_jax.mixers.linear_attention import mix
from xinfer_jax.mixers.recurrent import Recurrent

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
# K, N, H, Y, W, dtype, positions, and which rows have a token.
CASES = {
    "ragged": (1, 2, 128, 128, 3, F32, (5, 0, 7, 2, 0), (0, 1, 0, 1, 0)),
    "bf16": (2, 6, 128, 256, 2, BF16, (0, 9), (1, 1)),
    "no-row-has-a-token": (2, 2, 128, 128, 1, F32, (3, 0, 2), (0, 0, 0)),
    "groups-of-heads": (16, 16, 128, 256, 3, F32, (4, 0, 8), (1, 0, 1)),
    "tiles-of-rows": (1, 1, 128, 128, 3, BF16, range(70), (0,) * 66 + (1, 0, 0, 1)),
}


def assert_equals_reference(impl, args):
    out = delta_cases.assert_equals_reference("delta_step", impl, args)
    assert not out[args[-1] == 0].any()


@pytest.mark.parametrize("name, impl", full_except([("ragged", "interpret_tpu")], product(CASES, EMULATED)))
def test_step(name, impl):
    assert_equals_reference(impl, arrays(*CASES[name]))


def test_which_state_is_on_the_chip():
    """A row without a token has the state of the row before it. The first rows have the state of the first
    row with a token.
    """
    for count, want in [((0, 1, 0, 0, 1), [1, 1, 1, 1, 4]), ((0, 0), [0, 0]), ((1, 1, 0), [0, 1, 1])]:
        assert delta_tpu.rows_on_chip(jnp.array(count)).tolist() == want
    assert [delta_tpu.groups_of_heads(*case) for case in ((16, 2**21), (4, 2**21), (48, 2**22), (16, 9))] == [
        2,
        1,
        3,
        1,
    ]


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_another_row_changes_no_bit(impl):
    delta_cases.assert_rows_are_alone("delta_step", impl, arrays(*CASES["ragged"]))


@pytest.mark.soak
@pytest.mark.parametrize("impl", EMULATED)
def test_any_shape(impl):
    draws = np.random.RandomState(5)
    for seed in range(100):
        K, group, B = draws.randint(1, 5), draws.randint(1, 4), draws.randint(1, 6)
        H, Y = draws.choice([128, 256] if "tpu" in impl else [64, 128, 256], 2)
        case = K, K * group, H, Y, draws.randint(1, 5), (F32, BF16)[seed % 2]
        args = arrays(*case, draws.randint(0, 3, B), draws.randint(0, 2, B), seed=seed)
        assert_equals_reference(impl, args)


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_a_layer_equals_plain_jnp(impl):
    """The computation between the layer's products is compared. Rows without a token have another result,
    which nothing reads.
    """
    new, (*taps, log_rate_N, bias_N, norm_Y), old, start_B, count_B = arrays(*CASES["ragged"])
    layer = dict(zip(("conv_q", "conv_k", "conv_v"), taps, strict=True))
    layer |= dict(A_log=log_rate_N, dt_bias=bias_N, gated_norm=norm_Y)
    state = Recurrent(tuple(old[:3]), old.state, 64)
    operands = [x[:, None] for x in new], layer, state, start_B, count_B, None
    plain = partial(mix, config=HYBRID, spec=HYBRID.layers[0].mixer_of("delta"))
    out, after = jax.jit(partial(run_delta, impl))(*operands)
    want, wanted = jax.jit(plain)(*operands)
    has_token = count_B > 0
    np.testing.assert_allclose(out[has_token], want[has_token], rtol=1e-5, atol=1e-5)
    assert not out[~has_token].any()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), after, wanted)


def test_select_states_its_reasons():
    SD = jax.ShapeDtypeStruct

    def select(impl, q=BF16, taps=BF16, N=32, H=128, Y=128):
        state = DeltaState(None, None, None, SD((2, N, H, Y), F32))
        return kernels_pallas.select("delta_step", impl, SD((2, 4 * H), q), SD((4 * H, 4), taps), state)

    assert select("tpu") == select("tpu", F32, BF16) == ("tpu", "requested by name")
    assert select("triton", jnp.float16).impl == select("mosaic").impl == "triton"
    for impl, options, reason in [
        ("tpu", dict(q=jnp.float16), "dtype float16"),
        ("triton", dict(taps=jnp.int8), "dtype int8"),
        ("triton", dict(H=96), "head width 96 is not one of 64, 128, 256"),
        ("tpu", dict(Y=64), "head width 64 is less than 128"),
        ("tpu", dict(N=128), "a state of 8388608 bytes a row"),
    ]:
        with pytest.raises(ValueError, match=reason):
            select(impl, **options)


def test_kernels_used_has_the_step():
    params = jax.eval_shape(lambda: xj.init_params(HYBRID, jax.random.key(1), "bfloat16"))
    with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
        used = xj.kernels_used(params, HYBRID)
    assert used["delta_step"] == used["delta_prefill"] == ("tpu", "a TPU")
    assert "decode_attention" not in used
    assert xj.kernels_used(params, HYBRID)["delta_step"].impl == "xla"


def test_layers_without_a_kernel_stay_with_xla():
    layer = {"conv_q": jnp.zeros((128, 4))}
    q_BTX = jnp.zeros((2, 1, 128))
    state = xj.init_cache(HYBRID, 2, 64).layers[0]
    gelu = dataclasses.replace(HYBRID, hidden_act="gelu_pytorch_tanh")
    assert select_delta("delta_step", "tpu", q_BTX, layer, HYBRID, state).impl == "tpu"
    assert "the activation gelu" in select_delta("delta_step", "tpu", q_BTX, layer, gelu, state).reason
    small = Recurrent(state.inputs, state.state[..., :32], 64)
    assert select_delta("delta_step", "tpu", q_BTX, layer, HYBRID, small).reason.startswith("head width 32")
    operands = [q_BTX], layer, state, None, None, None
    assert delta_form(delta_call("tpu", *operands))
