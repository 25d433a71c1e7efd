"""Hybrids: linear attention beside full attention. The recurrent state is a kind of cache: what is cached
equals what is not, however it is split. Drafts are undone. What has no state is rejected.
"""

import dataclasses

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from family_checks import CACHED, NEW
from layer_changes import with_mixer

import xinfer_jax as xj
from xinfer_jax.mixers.linear_attention import _Tokens, delta_rule, recurrent_step
from xinfer_jax.weights.layout import is_divisible

pytestmark = pytest.mark.oldest

CASE = cases.CASES["qwen3-5-tied"]


@pytest.fixture(scope="module")
def model():
    """A layer of linear attention, and one of full attention."""
    return family_checks.small_model(
        CASE, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )


@pytest.fixture(scope="module")
def out(model):
    """Returns the output of `generate`."""
    return xj.generate(*model, dataclasses.replace(CACHED, keep_prefix=True))


def random_tokens(T: int) -> tuple[_Tokens, jax.Array]:
    random = np.random.RandomState(0)
    q, k, v = (random.standard_normal((2, 3, T, width)).astype(np.float32) for width in (8, 8, 12))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -random.uniform(0, 0.2, (2, 3, T)).astype(np.float32)
    beta = random.uniform(0, 1, (2, 3, T)).astype(np.float32)
    return _Tokens(q, k, v, decay, beta), jnp.asarray(random.standard_normal((2, 3, 8, 12)), jnp.float32)


def single_steps(tokens: _Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(state, t):
        one, state = recurrent_step(jax.tree.map(lambda x: x[:, :, None], t), state)
        return state, one[:, :, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), tokens)
    state, outs = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(outs, 0, 2), state


@pytest.mark.full
def test_blocks_equal_single_steps_and_so_do_their_gradients():
    args = random_tokens(150)

    def run(form):
        out, vjp = jax.vjp(form, *args)
        return out, vjp(jax.tree.map(jnp.cos, out))

    found, expected = (jax.jit(run, static_argnums=0)(form) for form in (delta_rule, single_steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0], expected[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found[1], expected[1])


@pytest.mark.full
def test_weak_decays_between_strong_ones_lose_no_digits():
    tokens, state = random_tokens(128)
    tokens = tokens._replace(decay_BNT=-np.exp(40 * -tokens.decay_BNT - 4))
    for a, b in zip(jax.jit(delta_rule)(tokens, state), jax.jit(single_steps)(tokens, state), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.full
def test_equal_keys_lose_no_digits():
    (q, k, v, _, beta, _), state = random_tokens(128)
    k = np.broadcast_to(k[:, :, :1], k.shape)
    args = _Tokens(q, k, v, np.zeros_like(beta), np.ones_like(beta)), 0 * state
    for a, b in zip(jax.jit(delta_rule)(*args), jax.jit(single_steps)(*args), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_cached_equals_uncached_however_it_is_split(model):
    _, config, _ = model
    cache = xj.init_cache(config, 3, 128, "int8")
    assert cache.layers[0].state.dtype == np.float32 and cache.dtype == "int8"
    cache = family_checks.check_chunks(model, (1, 2, 39, 76, 77))
    with pytest.raises(xj.InputError, match="row 0 cannot go back from 5 to 4 tokens: its layers of linear"):
        cache.truncate([4, 23, 77])
    assert cache.truncate([0, 23, 77]).length_B.tolist() == [0, 23, 77]


@pytest.mark.full
def test_streams_and_beams(model, out):
    params, config, prompts = model
    streamed = [*xj.stream(params, config, prompts, CACHED)]
    assert [[*row] for row in zip(*streamed, strict=True)] == out.tokens
    prompts = prompts[:2]
    beams = xj.beam_search(params, config, prompts, num_beams=2, length_penalty=0.0, max_tokens=NEW)
    rows = [prompt + best for prompt, (best, *_) in zip(prompts, beams.sequences, strict=True)]
    tokens_BT, num_tokens_B = cases.pad_prompts(rows)
    exact_BT = jax.jit(xj.score)(params, config, tokens_BT, num_tokens_B).logprobs_BT
    for i, (prompt, (score, *_)) in enumerate(zip(prompts, beams.scores, strict=True)):
        np.testing.assert_allclose(score, exact_BT[i, len(prompt) - 1 :][:NEW].sum(), atol=1e-3)


@pytest.mark.full
def test_drafts_are_undone(model, out):
    family_checks.check_drafts_are_undone(model, out)


@pytest.mark.full
def test_prefixes_reach_to_their_state(model, out, tmp_path):
    family_checks.check_prefix_of_states(model, out, tmp_path / "prefix")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layer_types=["linear_attention", "mamba", "mamba"]), "layer type 'mamba' is not supported"),
        (dict(linear_num_value_heads=5), "linear_num_value_heads 5 is not a multiple of"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be at least 2"),
        (dict(attn_output_gate=False), "attn_output_gate False is not supported"),
        (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype 'bfloat16' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


def test_null_is_as_absent():
    absent = dict(attn_output_gate=None, mamba_ssm_dtype=None)
    assert xj.ModelConfig.from_hf(CASE.hf | absent) == CASE.config


def test_meshes_divide_the_heads_of_linear_attention():
    """Dividing their widths is not enough: three heads of width 12 have 36 numbers, which two devices
    divide.
    """
    odd = with_mixer(CASE.config, num_key_heads=3, num_value_heads=6)
    assert is_divisible(CASE.config, 2) and not is_divisible(odd, 2)


def test_rejected_draft_models_and_caches(model):
    params, config, prompts = model
    draft = xj.Model(params, config)
    with pytest.raises(
        xj.InputError, match="draft model is not supported .*'qwen3_5_text', which has linear"
    ):
        xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=NEW, draft=draft))
    other = with_mixer(config, num_value_heads=8)
    with pytest.raises(xj.InputError, match=r"states of \(8, 12, 12\).* for a model of .*\(2, 12, 12\)"):
        xj.decode_step(params, config, np.zeros(1, np.int32), xj.init_cache(other, 1, 8))
