"""Engines of mixtures that record routes, and what is right of these."""

import jax
import numpy as np
import parity_cases as cases

import xinfer_jax as xj

NAMES = ("moe-some-layers-dense", "qwen3-next-sparse-step")
CHANGES = {NAMES[0]: dict(num_hidden_layers=2, mlp_only_layers=[0], decoder_sparse_step=1)}
SHAPE = dict(rows=2, capacity=256, pages=6, chunk=64, routed_experts=True)


def build(name: str) -> xj.Model:
    config = cases.Case(cases.CASES[name].hf | CHANGES.get(name, {})).config
    return xj.Model(cases.params_from(config, cases.random_tensors(config, 3)), config)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 90, length).tolist()


score = jax.jit(xj.score, static_argnums=1, static_argnames="return_routed_experts")


def check(model: xj.Model, ids: list[int], answer: xj.types.Answer, params=None) -> None:
    """The routes are those of a pass over all tokens, and replaying them gives the log-probabilities."""
    params = model.params if params is None else params
    tokens = [*ids, *answer.tokens]
    padded_1T = np.array([tokens + [0] * (256 - len(tokens))])
    given = np.full((1, 256, *answer.routed_experts.shape[1:]), -1, np.int32)
    given[0, : len(tokens)] = answer.routed_experts
    count_1 = np.array([len(tokens)])
    free = score(params, model.config, padded_1T, count_1, return_routed_experts=True)
    assert answer.routed_experts.dtype == np.int32 and (answer.routed_experts[-1] == -1).all()
    np.testing.assert_array_equal(answer.routed_experts[:-1], free.routed_experts[0, : len(tokens) - 1])
    other = jax.tree.map(lambda x: x * 1.1 + 0.01, params)
    found = score(other, model.config, padded_1T, count_1, return_routed_experts=True).routed_experts
    assert (found != free.routed_experts).any()
    replayed = score(params, model.config, padded_1T, count_1, routed_experts=given)
    own = np.asarray(replayed.logprobs_BT)[0, len(ids) - 1 : len(tokens) - 1]
    np.testing.assert_allclose(own, answer.logprobs, atol=1e-4)
