"""Mamba-2 by kernels for TPUs, emulated with race detection, against their reference: decode steps and
prompts. Then both in models, for TPUs and GPUs.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import mamba_cases
import numpy as np
import parity_cases
import pytest
from mamba_cases import BF16, F32, arrays
from quick import full_except

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.kernels.mamba_kernels import mamba_form
from xinfer_jax.config.layer_spec import LayerSpec
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.kernels_pallas.reference_mamba import MambaState
from xinfer_jax.kernels_pallas.tpu.mamba import chunks_of_heads
from xinfer_jax.kernels_pallas.tpu.mamba_prompts import heads_of_step
from xinfer_jax.mixers.mamba2 import Mamba2Spec, mix_states
from xinfer_jax.mixers.recurrent import Recurrent
from xinfer_jax.ops.operation import Call, run

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
IMPL = "interpret_tpu"
# G, N, Y, S, W, dtype, positions, and which rows have a token.
STEPS = {
    "ragged": (1, 8, 64, 128, 3, F32, (5, 0, 7, 2), (0, 1, 0, 1)),
    "no-row-has-a-token": (2, 16, 128, 128, 1, BF16, (3, 0), (0, 0)),
    "parts-of-groups": (1, 32, 64, 256, 3, F32, (4, 0, 8), (1, 0, 1)),
    "several-groups": (4, 32, 64, 256, 2, BF16, (0, 9), (1, 1)),
    "heads-in-lanes": (2, 128, 64, 128, 3, F32, (4, 0), (0, 1)),
    "wide-heads": (1, 8, 256, 256, 3, F32, (0, 1), (1, 1)),
}
_LONGEST = ("parts-of-groups", "heads-in-lanes", "wide-heads")
# As above, then valid tokens of each row, and tokens.
PROMPTS = {
    "ragged": (1, 8, 64, 128, 3, F32, (5, 0, 7, 0), (70, 3, 0, 65), 70),
    "grid-steps": (1, 16, 64, 128, 1, F32, (64, 0), (257, 0), 300),
    "several-groups": (4, 8, 128, 256, 3, BF16, (64,), (64,), 64),
    "heads-of-one-group-each": (3, 3, 64, 128, 3, F32, (1,), (9,), 9),
}


def assert_step_equals_reference(args):
    out = mamba_cases.assert_equals_reference("mamba_step", IMPL, args, by_largest=True)
    assert not out[args[-1] == 0].any()


def assert_prompts_equal_reference(args):
    """The order of sums is another one than that of the reference. Past the length are zeros."""
    out = mamba_cases.assert_equals_reference("mamba_prefill", IMPL, args, by_largest=True)
    assert not out[np.arange(out.shape[1]) >= args[-1][:, None]].any()


@pytest.mark.parametrize("name", full_except(["ragged"], STEPS, soak=_LONGEST))
def test_step(name):
    assert_step_equals_reference(arrays(*STEPS[name]))


@pytest.mark.parametrize("name", full_except(["ragged"], PROMPTS))
def test_prompts(name):
    assert_prompts_equal_reference(arrays(*PROMPTS[name]))


def test_how_heads_are_divided():
    """Chunks have whole groups, or parts of one."""
    cases = ((64, 8, 2**21), (48, 1, 3 * 2**19), (128, 1, 2**22), (128, 8, 2**22), (24, 1, 3 * 2**18))
    assert [chunks_of_heads(*case) for case in cases] == [2, 1, 4, 4, 1]
    assert [chunks_of_heads(N, G, 2**22) for N, G in ((96, 3), (96, 2), (32, 32))] == [3, 4, 4]
    cases = ((64, 8), (48, 48), (128, 16), (6, 3), (3, 1), (20, 20))
    assert [heads_of_step(*case) for case in cases] == [8, 8, 8, 6, 3, 5]


@pytest.mark.soak
@pytest.mark.parametrize("kernel", ["mamba_step", "mamba_prefill"])
def test_another_row_changes_no_bit(kernel):
    cases = STEPS if kernel == "mamba_step" else PROMPTS
    mamba_cases.assert_rows_are_alone(kernel, IMPL, arrays(*cases["ragged"]))


@pytest.mark.soak
def test_chunks_of_whole_blocks_give_the_bits_of_the_whole():
    """The second one goes on from the state after the first."""
    args = arrays(1, 8, 64, 128, 3, F32, (0,), (256,), 256)
    mamba_cases.assert_chunks_give_the_bits_of_the_whole(IMPL, args)


@pytest.mark.soak
def test_any_step():
    draws = np.random.RandomState(5)
    for seed in range(60):
        G, B = draws.randint(1, 4), draws.randint(1, 6)
        N, Y, S = G * 8 * draws.randint(1, 4), draws.choice([64, 128, 256]), draws.choice([128, 256])
        case = G, N, Y, S, draws.randint(1, 5), (F32, BF16)[seed % 2]
        assert_step_equals_reference(arrays(*case, draws.randint(0, 3, B), draws.randint(0, 2, B), seed=seed))
        jax.clear_caches()  # a process cannot hold so many programs


@pytest.mark.soak
def test_any_prompts():
    draws = np.random.RandomState(6)
    for seed in range(60):
        G, B, T = draws.randint(1, 4), draws.randint(1, 4), draws.randint(2, 300)
        N, Y, S = 2 * G * draws.randint(1, 5), draws.choice([64, 128, 256]), draws.choice([128, 256])
        case = G, N, Y, S, draws.randint(1, 5), (F32, BF16)[seed % 2]
        numbers = draws.randint(0, 3, B), draws.randint(0, T + 1, B), T
        assert_prompts_equal_reference(arrays(*case, *numbers, seed=seed))
        jax.clear_caches()


# --- in models ----------------------------------------------------------------------------------------------

SPEC = Mamba2Spec(num_heads=8, head_dim=64, n_groups=1, state_size=128, conv_kernel=4)
CONFIG = dataclasses.replace(
    parity_cases.CASES["qwen3-head-dim-tied"].config, layers=(LayerSpec((SPEC,)),), num_hidden_layers=1
)
_OPERANDS = ("products", "layer", "cache", "start_B", "num_tokens_B", "first_BT")


def call_of(impl, *operands, config=CONFIG) -> Call:
    """A call of "mamba_step", whose operands are given in order."""
    by_name = dict(zip(_OPERANDS, operands, strict=True))
    return Call(partial(mix_states, spec=SPEC), by_name, dict(config=config), RunConfig(impl))


def run_mamba(impl, *operands):
    call = call_of(impl, *operands)
    return run("mamba_step", call.plain, call.run_config, static=call.static, **call.operands)


def layer_of(weights, *, conv_bias):
    """The parameters of a layer."""
    layer = {f"conv_{name}": getattr(weights, name) for name in "xbc"}
    layer |= {f"conv_{name}_bias": getattr(weights, f"bias_{name}") for name in "xbc" if conv_bias}
    return layer | dict(A_log=weights.log_rate_N, dt_bias=weights.dt_bias_N, D=weights.skip_N)


@pytest.mark.parametrize(
    "impl, tokens", full_except([("interpret", 1)], [("interpret", 1), (IMPL, 1), (IMPL, 9)], [(IMPL, 9)])
)
def test_a_layer_equals_plain_jnp(impl, tokens):
    """The computation between the layer's products is compared. Rows without a token have another result,
    which nothing reads.
    """
    case = (1, 8, 64, 128, 3, F32, (5, 0, 7), (tokens, 0, tokens), tokens)
    new, weights, old, start_B, count_B = arrays(*case)
    new, old = jax.tree.map(jnp.nan_to_num, (new, old))
    layer = layer_of(weights, conv_bias=tokens == 1)
    operands = list(new), layer, Recurrent((old.c, old.b, old.x), old.state, 64), start_B, count_B, None
    out, after = jax.jit(partial(run_mamba, impl))(*operands)
    want, wanted = jax.jit(partial(mix_states, spec=SPEC))(*operands)
    has_token = count_B > 0
    np.testing.assert_allclose(out[has_token], want[has_token], rtol=1e-5, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), after, wanted)


def test_which_calls_have_a_kernel():
    layer = {"conv_x": jnp.zeros((512, 4))}
    state = xj.init_cache(CONFIG, 2, 64).layers[0]
    drafts = state.with_draft_slots(2, jnp.zeros(2, jnp.int32))

    def form(cache, first_BT=None, tokens=1):
        products = [jnp.zeros((2, tokens, 512))]
        return mamba_form(call_of("tpu", products, layer, cache, None, None, first_BT))

    assert form(state)
    assert form(state, tokens=3)
    assert form(drafts) is form(None) is form(state, jnp.zeros((2, 1), jnp.int32)) is None


def test_select_states_its_reasons():
    SD = jax.ShapeDtypeStruct

    def select(impl, x=BF16, taps=BF16, N=32, Y=64, S=128):
        state = MambaState(None, None, None, SD((2, N, Y, S), F32))
        return kernels_pallas.select("mamba_step", impl, SD((2, N * Y), x), SD((N * Y, 4), taps), state)

    assert select("tpu") == select("tpu", F32, BF16, Y=256) == ("tpu", "requested by name")
    assert select("triton", jnp.float16).impl == select("mosaic").impl == "triton"
    for impl, options, reason in [
        ("tpu", dict(x=jnp.float16), "dtype float16"),
        ("tpu", dict(taps=jnp.int8), "dtype int8"),
        ("tpu", dict(S=64), "state size 64 is less than 128"),
        ("tpu", dict(N=12), "12 heads, not a multiple of 8"),
        ("tpu", dict(S=96), "state size 96 is not one of 64, 128, 256"),
        ("triton", dict(Y=96), "head width 96 is not one of 64, 128, 256"),
    ]:
        with pytest.raises(ValueError, match=reason):
            select(impl, **options)


def test_kernels_used_has_both():
    params = jax.eval_shape(lambda: xj.init_params(CONFIG, jax.random.key(1), "bfloat16"))
    with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
        used = xj.kernels_used(params, CONFIG)
    assert used["mamba_step"] == used["mamba_prefill"] == ("tpu", "a TPU")
    assert "decode_attention" not in used
    assert xj.kernels_used(params, CONFIG)["mamba_step"].impl == "xla"
