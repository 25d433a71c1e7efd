"""Engines of hybrid models: rows have recurrent states beside pages."""

import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.engine.pages import SnapshotPool

pytestmark = pytest.mark.oldest

OPTIONS = xj.GenerateOptions(60, eos_token_ids=())


@pytest.fixture(scope="module")
def model() -> xj.Model:
    config = cases.CASES["qwen3-5-tied"].config
    params = cases.params_from(config, cases.random_tensors(config, 3))
    return xj.Model(params, config, None, {}, None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two prompts with 128 common tokens, and another one."""
    random = np.random.RandomState(1)
    first, second, common, other = (random.randint(0, cases.VOCAB, n).tolist() for n in (10, 60, 128, 150))
    return [common + first, common + second, other]


def answers(engine: xj.Engine, prompts: list[list[int]]) -> list[tuple]:
    """Tokens and log-probabilities of the answers, all submitted at once; and how many tokens were reused."""
    requests = [engine.submit(prompt, OPTIONS, live=False) for prompt in prompts]
    return [
        (out.tokens[0], out.logprobs[0], out.stats.reused_tokens) for out in (r.result() for r in requests)
    ]


def test_bits_alone_equal_those_beside_others(model, prompts):
    """With rows that are preempted in any state, and with hits of the prefix cache; `==`, not about."""
    with xj.Engine(model, rows=3, capacity=256, pages=9, chunk=64) as engine:
        alone = []
        for prompt in prompts:
            engine.update(model.params)  # which empties the prefix cache
            alone += answers(engine, [prompt])
        assert [reused for *_, reused in alone] == [0, 0, 0]
        together = answers(engine, [*prompts, *prompts])
        assert engine.stats.preemptions > 0
        assert sum(reused for *_, reused in together) >= 128
        assert [row[:2] for row in together] == [row[:2] for row in [*alone, *alone]]
        scored = engine.submit(prompts[0], OPTIONS, prompt_logprobs=0)
        assert scored.result().tokens[0] == alone[0][0]
    exact = xj.score(model.params, model.config, prompts[:1])[0]
    found = [token.logprob for token in scored.prompt_logprobs]
    np.testing.assert_allclose(found[-len(exact) :], exact, atol=1e-3)
    out = xj.generate(model.params, model.config, prompts, OPTIONS)
    assert out.tokens == [row[0] for row in alone]


def test_snapshots_are_bounded():
    pool = SnapshotPool(2)
    assert [pool.add([b"a", b"b"]), pool.add([b"c"]), pool.add([b"b"])] == [0, 1, None]
    assert pool.find(b"a") == 0  # so the other one is replaced
    assert pool.add([b"d"]) == 1 and b"c" not in pool and b"b" in pool
    pool.remove([b"a", b"b"])
    assert b"a" not in pool and pool.find(b"d") == 1
    pool.clear()
    assert b"d" not in pool
