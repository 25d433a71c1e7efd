"""Sampling masks: which ids each token could be sampled from, and `score` normalized over these."""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.sampling.support import keep_support, pack_support

CONFIG = cases.Case(cases.CASES["qwen2-gqa-tied-old"].hf | dict(num_hidden_layers=1)).config
PARAMS = cases.params_from(CONFIG, cases.random_tensors(CONFIG, 3))
V = CONFIG.vocab_size
PROMPTS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]], np.int32)
LENGTHS = np.array([3, 2], np.int32)
NONE = np.zeros(0, np.int32)
score = jax.jit(xj.score, static_argnums=1, static_argnames="entropy")


def unpack(support_TW: np.ndarray) -> np.ndarray:
    """bool [T, V], as the documentation says."""
    bytes_TW = np.ascontiguousarray(support_TW).view(np.uint8)
    return np.unpackbits(bytes_TW, axis=-1, bitorder="little")[..., :V] > 0


def rollout(sampling: xj.SamplingConfig, **how):
    keys = jax.random.split(jax.random.key(1), 2)
    logits_BV, cache = xj.prefill(PARAMS, CONFIG, PROMPTS, LENGTHS, xj.init_cache(CONFIG, 2, 32))
    return xj.decode_loop(PARAMS, CONFIG, logits_BV, cache, keys, sampling, NONE, 6, **how)


def test_bits_of_masks():
    is_in_BV = np.random.default_rng(0).random((3, V)) < 0.3
    support_BW = pack_support(jnp.where(is_in_BV, 1.0, -jnp.inf))
    assert support_BW.shape == (3, -(-V // 32)) and support_BW.dtype == np.uint32
    np.testing.assert_array_equal(unpack(np.asarray(support_BW)), is_in_BV)
    kept_BV = keep_support(jnp.zeros((3, V)), support_BW)
    np.testing.assert_array_equal(kept_BV > -jnp.inf, is_in_BV)
    assert jnp.all(keep_support(jnp.zeros((3, V)), 0 * support_BW) == 0)  # an empty mask keeps all


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.3, top_p=0.8),
        pytest.param(dict(temperature=2.0, top_k=70, top_p=0.9), marks=pytest.mark.soak),
        pytest.param(dict(temperature=0.9, min_p=0.2, forbidden_token_ids=[3, 4]), marks=pytest.mark.full),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_scores_with_masks_are_the_log_probabilities_of_the_sampler(settings):
    out = rollout(xj.SamplingConfig(**settings), return_support=True)
    plain = rollout(xj.SamplingConfig(**settings))
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    assert plain.alternatives is None and out.alternatives.id_BTA.shape == (2, 6, 0)
    packed = xj.rollouts.pack_rollout(PROMPTS, LENGTHS, out)
    rows = PARAMS, CONFIG, packed.tokens_BT, packed.num_tokens_B
    scores_BT = score(*rows, temperature=settings["temperature"], support=packed.support).logprobs_BT
    np.testing.assert_allclose(scores_BT[packed.mask_BT], packed.logprobs_BT[packed.mask_BT], atol=1e-5)
    whole_BT = score(*rows, temperature=settings["temperature"]).logprobs_BT
    assert (scores_BT > whole_BT + 1e-3)[packed.mask_BT].any()  # the masks leave out something
    np.testing.assert_allclose(scores_BT[~packed.mask_BT], whole_BT[~packed.mask_BT], atol=1e-5)
    is_in_BTV = unpack(np.asarray(out.alternatives.support_BTW))
    assert np.take_along_axis(is_in_BTV, np.asarray(out.tokens_BT)[..., None], -1).all()
    if "top_k" in settings:
        assert is_in_BTV.sum(-1).max() <= settings["top_k"]


def test_scores_with_masks_have_gradients_and_entropy():
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(2, V, (2, 7)).astype(np.int32)
    is_in_BTV = rng.random((2, 7, V)) < 0.2
    np.put_along_axis(is_in_BTV, tokens_BT[..., None], True, -1)
    is_in_BTV[0, 2] = True
    support = np.packbits(is_in_BTV, axis=-1, bitorder="little")
    support = np.pad(support, ((0, 0), (0, 0), (0, -support.shape[-1] % 4))).view(np.uint32)

    def reference(params):
        logits_BTV, _ = xj.forward(params, CONFIG, tokens_BT)
        logits_BTV = jnp.where(is_in_BTV[:, 1:], logits_BTV[:, :-1] / 0.7, -1e30)
        logprobs_BTV = jax.nn.log_softmax(logits_BTV, -1)
        entropy_BT = -(jnp.exp(logprobs_BTV) * logprobs_BTV).sum(-1)
        return jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], -1)[..., 0], entropy_BT

    def own(params, chunk=None):
        found = xj.score(
            params, CONFIG, tokens_BT, temperature=0.7, support=support, entropy=True, chunk=chunk
        )
        return found.logprobs_BT, found.entropy_BT

    def loss(function):
        return lambda params: sum(x.mean() for x in function(params))

    for found, wanted in zip(jax.jit(own)(PARAMS), jax.jit(reference)(PARAMS), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    gradient, wanted = (jax.jit(jax.grad(loss(f)))(PARAMS) for f in (own, reference))
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    parts = jax.jit(own, static_argnums=1)(PARAMS, 2)
    np.testing.assert_allclose(parts[0], jax.jit(own)(PARAMS)[0], atol=1e-6)


def test_a_token_outside_its_mask_is_impossible():
    tokens_BT = np.array([[5, 6, 7]], np.int32)
    support = np.zeros((1, 3, -(-V // 32)), np.uint32)
    support[0, 2, 0] = 1 << 6  # id 6 alone
    found = np.asarray(score(PARAMS, CONFIG, tokens_BT, support=support).logprobs_BT)
    assert np.isfinite(found[0, 0]) and found[0, 1] == -np.inf


@pytest.mark.parametrize(
    ("support", "more", "why"),
    [
        (np.zeros((1, 3, 2), np.uint32), {}, r"support must be an array of integers of the shape \[1, 3, "),
        (np.zeros((1, 3, -(-V // 32)), np.int32), {}, "support must have the dtype uint32, got int32"),
        (np.zeros((1, 3, -(-V // 32)), np.uint32), dict(reference=PARAMS), "does not go with reference"),
    ],
)
def test_invalid_masks_are_rejected(support, more, why):
    with pytest.raises(xj.InputError, match=why):
        xj.score(PARAMS, CONFIG, np.array([[5, 6, 7]]), support=support, **more)


@pytest.mark.parametrize(
    "how", [{}, pytest.param(dict(draft="lookup", draft_tokens=2), marks=pytest.mark.soak)], ids=len
)
def test_generate_returns_masks(how):
    sampling = xj.SamplingConfig(temperature=0.8, top_k=4)
    options = xj.GenerateOptions(max_tokens=6, sampling=sampling, eos_token_ids=(), support=True, n=2, **how)
    prompts = [[5, 6, 7], [8, 9]]
    out = xj.generate(PARAMS, CONFIG, prompts, options, key=jax.random.key(3))
    assert out.alternatives is None and out.logits is None and len(out.support) == 4
    for i, (ids, support_TW) in enumerate(zip(out.tokens, out.support, strict=True)):
        is_in_TV = unpack(support_TW)
        assert is_in_TV.shape == (6, V) and (is_in_TV.sum(-1) <= 4).all()
        assert is_in_TV[np.arange(6), ids].all()
        prompt = prompts[i // 2]
        tokens_1T = np.array([[*prompt, *ids]], np.int32)
        support_1TW = np.pad(support_TW, ((len(prompt), 0), (0, 0)))[None]
        logits_1TV, _ = xj.forward(PARAMS, CONFIG, tokens_1T)
        best_TV = np.asarray(jax.lax.top_k(logits_1TV[0, len(prompt) - 1 : -1], 4)[1])
        np.testing.assert_array_equal(np.sort(best_TV, -1), [np.flatnonzero(row) for row in is_in_TV])
        assert np.isfinite(score(PARAMS, CONFIG, tokens_1T, support=support_1TW).logprobs_BT).all()
    plain = xj.generate(PARAMS, CONFIG, prompts, xj.GenerateOptions(max_tokens=2), key=jax.random.key(3))
    assert plain.support is None
