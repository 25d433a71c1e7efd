"""Routes of mixtures: what was recorded is replayed in every way to score, with gradients into the router."""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

import xinfer_jax as xj

pytestmark = pytest.mark.newest  # and on the oldest with torch: test_gradients_live.py

NAMES = ("moe-some-layers-dense", "qwen3-next-sparse-step", "glm4-moe-groups")
CHANGES = {
    NAMES[0]: dict(num_hidden_layers=2, mlp_only_layers=[0], decoder_sparse_step=1),
    NAMES[1]: dict(num_hidden_layers=2, full_attention_interval=2, decoder_sparse_step=1, mlp_only_layers=[]),
    NAMES[2]: dict(num_hidden_layers=2),
}
TEXTS = ([5, 9, 2, 7, 7, 3, 1], [8, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])


def build(name, **changes):
    """Parameters and config, with a layer of each kind."""
    config = cases.Case(cases.CASES[name].hf | CHANGES.get(name, {}) | changes).config
    return cases.params_from(config, cases.random_tensors(config, 3)), config


def mixtures(config):
    return sum(layer.experts is not None for layer in config.layers)


@pytest.fixture(scope="module", params=full_except(NAMES[:1], NAMES, NAMES[1:2]))
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def others(model):
    """Routes that no router chose, without an expert twice."""
    _, config = model
    tokens_BT, _ = cases.pad_prompts(TEXTS)
    draws = np.random.default_rng(0).random((*tokens_BT.shape, mixtures(config), config.num_experts))
    return draws.argsort(-1)[..., : config.num_experts_per_tok].astype(np.int32)


def loss(params, config, *args, **how):
    return xj.score(params, config, *args, **how).logprobs_BT.sum()


slopes = jax.jit(jax.value_and_grad(loss), static_argnums=1, static_argnames="remat")
score = jax.jit(
    lambda params, config, batch, routed_experts: xj.score(
        params, config, *batch, routed_experts=routed_experts, return_routed_experts=True
    ),
    static_argnums=1,
)


def assert_close(got, want, bound=2e-5, least=0.1):
    """Compares to a part of each array's largest number. If the array is one number, a sum of many that
    cancel, it compares to a part of 1.
    """
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        at_least = 1.0 if y.size == 1 else least
        np.testing.assert_allclose(x, y, atol=bound * max(at_least, float(np.max(np.abs(y)))), rtol=0)


@pytest.mark.full
def test_given_experts_are_used_in_every_way_to_score(model, others):
    params, config = model
    batch = cases.pad_prompts(TEXTS)
    free = slopes(params, config, *batch, routed_experts=np.full_like(others, -1))
    found = score(params, config, batch, np.full_like(others, -1))
    np.testing.assert_allclose(free[0], found.logprobs_BT.sum(), rtol=1e-6)
    assert_close(slopes(params, config, *batch, routed_experts=found.routed_experts), free)
    real_BT = np.arange(batch[0].shape[1]) < batch[1][:, None]
    assert ((found.routed_experts >= 0).all((2, 3)) == real_BT).all() and (
        found.routed_experts[~real_BT] == -1
    ).all()

    want = slopes(params, config, *batch, routed_experts=others)
    assert abs(float(want[0] - free[0])) > 0.1
    routers = [layer["router"]["weight"] for layer in want[1]["layers"] if "router" in layer]
    assert len(routers) == mixtures(config) and all(np.abs(x).max() > 0 for x in routers)
    stacked = slopes(
        xj.params.stack_layers(params, config), config, *batch, routed_experts=others, remat="layer"
    )
    assert_close((stacked[0], xj.params.unstack_layers(stacked[1])), want)


@pytest.mark.full
def test_routes_of_packed_texts(model, others):
    params, config = model
    want = slopes(params, config, *cases.pad_prompts(TEXTS), routed_experts=others)
    row_1T = np.array([sum(TEXTS, [])], np.int32)
    ids_1T = np.repeat(np.arange(3), [*map(len, TEXTS)])[None]
    together = np.concatenate([x[: len(text)] for x, text in zip(others, TEXTS, strict=True)])[None]
    packed = slopes(params, config, row_1T, segment_ids_BT=ids_1T, routed_experts=together)
    assert_close(packed, want, 1e-4, 1)


def test_tokens_without_a_route_choose_freely(model, others):
    """A token of which one expert is -1. What was used is returned, here of stacked layers."""
    params, config = model
    batch = cases.pad_prompts(TEXTS)
    mixed = others.copy()
    mixed[:, 1::2, :, 0] = -1
    stacked = xj.params.stack_layers(params, config)
    first = score(stacked, config, batch, mixed)
    np.testing.assert_array_equal(first.routed_experts[:2, :2:2], others[:2, :2:2])
    assert (first.routed_experts[:2, 1] >= 0).all() and (first.routed_experts[:2, 1] != others[:2, 1]).any()
    again = score(stacked, config, batch, first.routed_experts)
    np.testing.assert_array_equal(again.logprobs_BT, first.logprobs_BT)
    np.testing.assert_array_equal(again.routed_experts, first.routed_experts)


@pytest.mark.full
def test_a_rollout_is_scored_with_its_routes():
    """It is also scored with them if the scoring model's router would choose others, and after the result of
    a tool.
    """
    params, config = build(NAMES[0], num_hidden_layers=1, mlp_only_layers=[])
    prompts_BT, num_tokens_B = cases.pad_prompts(TEXTS)
    asked = dict(return_routed_experts=True)

    @jax.jit
    def rollout():
        cache = xj.init_cache(config, 3, 32)
        prompt = xj.run_model(params, config, prompts_BT, cache, num_tokens_B, **asked)
        logits_BV = xj.unembed(params, config, prompt.hidden[np.arange(3), num_tokens_B - 1])
        out = xj.decode_loop(
            params, config, logits_BV, prompt.cache, jax.random.key(1), xj.SamplingConfig(temperature=1.0),
            np.array([95]), np.array([6, 1, 4]), output_size=6, **asked,
        )  # fmt: skip
        together_BT = jnp.concatenate([out.token_B[:, None], np.ones((3, 2), np.int32)], 1)
        more = xj.run_model(params, config, together_BT, out.cache, **asked)
        return (
            out,
            xj.rollouts.pack_rollout(prompts_BT, num_tokens_B, out, prompt.routed_experts),
            more.routed_experts,
        )

    out, packed, more = rollout()
    for row, n in enumerate(out.length_B):  # the last token has not been through the model
        assert (out.routed_experts[row, : n - 1] >= 0).all() and (
            out.routed_experts[row, n - 1 :] == -1
        ).all()
    batch = packed.tokens_BT, packed.num_tokens_B
    free = np.full_like(packed.routed_experts, -1)
    chosen = score(params, config, batch, free).routed_experts
    fed_BT = np.arange(packed.tokens_BT.shape[1]) < packed.num_tokens_B[:, None] - 1
    np.testing.assert_array_equal(packed.routed_experts[fed_BT], chosen[fed_BT])
    assert (packed.routed_experts[~fed_BT] == -1).all()
    other = jax.tree.map(lambda x: x * 1.3 + 0.1, params)
    assert (score(other, config, batch, free).routed_experts[fed_BT] != packed.routed_experts[fed_BT]).any()
    used = score(other, config, batch, packed.routed_experts).routed_experts
    np.testing.assert_array_equal(used[fed_BT], packed.routed_experts[fed_BT])
    alone = xj.rollouts.pack_rollout(prompts_BT, num_tokens_B, out)
    assert (alone.routed_experts[:, 0] == -1).all() and (alone.routed_experts != -1).any()
    tokens_BT = np.array(packed.tokens_BT)
    for row, n in enumerate(packed.num_tokens_B):
        tokens_BT[row, n : n + 2] = 1
    whole = score(params, config, (tokens_BT, packed.num_tokens_B + 2), free).routed_experts
    for row, n in enumerate(packed.num_tokens_B):
        np.testing.assert_array_equal(more[row], whole[row, n - 1 : n + 2])


def test_models_without_mixtures_and_misshapen_routes_raise():
    params, config = build("moe-some-layers-dense")
    tokens_BT = np.ones((2, 3), np.int32)
    for routed_experts, message in (
        (
            np.zeros((2, 3, 9, 2), np.int32),
            r"routed_experts must be an array of integers of the shape \[2, 3, ",
        ),
        (np.zeros((2, 3, mixtures(config), 2)), "routed_experts must be an array of integers"),
        (np.full((2, 3, mixtures(config), 2), 6), "routed_experts: expert 6 is outside -1 … 5"),
    ):
        with pytest.raises(xj.InputError, match=message):
            xj.forward(params, config, tokens_BT, routed_experts=routed_experts)
    params, config = build("qwen2-gqa-tied-old")
    cache = xj.init_cache(config, 2, 16)
    logits_BV = jnp.zeros((2, config.vocab_size))
    loop = cache, jax.random.key(0), xj.SamplingConfig(), np.array([1]), 2
    for call in (
        lambda: xj.run_model(params, config, tokens_BT, return_routed_experts=True),
        lambda: xj.run_model(params, config, tokens_BT, cache, return_routed_experts=True),
        lambda: xj.score(params, config, tokens_BT, routed_experts=np.zeros((2, 3, 1, 1), np.int32)),
        lambda: xj.decode_loop(params, config, logits_BV, *loop, return_routed_experts=True),
    ):
        with pytest.raises(xj.InputError, match="this model has none"):
            call()
