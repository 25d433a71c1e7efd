"""Engines of hybrid models: rows have recurrent states beside pages."""

import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.host_pages import HostPages
from xinfer_jax.engine.pages import PagePool
from xinfer_jax.engine.row import PrefillChunk, Row
from xinfer_jax.engine.scheduler import Scheduler
from xinfer_jax.engine.shape import engine_shape

pytestmark = pytest.mark.oldest

OPTIONS = xj.GenerateOptions(max_tokens=60, eos_token_ids=())


@pytest.fixture(
    scope="module",
    params=[
        "qwen3-5-tied",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                "lfm2-moe-published-tied",
                "mamba2-groups",
                "nemotron-h-published",
                "granite-hybrid-published",
                "falcon-h1-norm-after-gate-bias",
                "bamba-published",
            )
        ),
    ],
)
def model(request) -> xj.Model:
    config = cases.CASES[request.param].config
    params = cases.params_from(config, cases.random_tensors(config, 3))
    return xj.Model(params, config)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two prompts with 128 common tokens, and another one."""
    random = np.random.RandomState(1)
    first, second, common, other = (random.randint(0, cases.VOCAB, n).tolist() for n in (10, 60, 128, 150))
    return [common + first, common + second, other]


def answers(requests: list[xj.types.Request]) -> list[tuple]:
    """Tokens and log-probabilities of the answers, and how many tokens were reused."""
    outs = [request.result() for request in requests]
    return [(out.tokens[0], out.logprobs[0], out.stats.reused_tokens) for out in outs]


@pytest.mark.full
def test_bits_alone_equal_those_beside_others(model, prompts):
    """Rows are preempted while they prefill and while they decode, for a row of higher priority and by time
    slices, and the prefix cache has hits. All numbers are `==`, not only close.
    """
    engine = xj.Engine(model, rows=2, capacity=256, chunk=64)
    alone = []
    for prompt in prompts:
        engine.update(model.params)  # which empties the prefix cache
        alone += answers([engine.submit(prompt, OPTIONS)])
    assert [reused for *_, reused in alone] == [0, 0, 0]
    for running in (1, 2):  # the row that is preempted prefills, or decodes
        engine.update(model.params)
        requests = [engine.submit(prompt, OPTIONS) for prompt in prompts[:2]]
        while engine.stats.running < running or engine.stats.running + engine.stats.prefilling < 2:
            engine.core._pacing.step_seconds = 1.0  # so that a step decodes one token
            engine.step()
        requests += [engine.submit(prompts[2], OPTIONS, priority=20)]  # preempts another
        assert [row[:2] for row in answers(requests)] == [row[:2] for row in alone]
    assert engine.stats.preemptions == 2
    engine.core.scheduler.time_slice = 1e-9
    requests = [engine.submit(prompt, OPTIONS, client=str(i)) for i, prompt in enumerate(prompts)]
    assert [row[:2] for row in answers(requests)] == [row[:2] for row in alone]
    assert engine.stats.preemptions > 9
    again = answers([engine.submit(prompt, OPTIONS) for prompt in prompts])
    assert [row[:2] for row in again] == [row[:2] for row in alone]
    assert [row[2] for row in again] == [128, 128, 128]
    scored = engine.submit(prompts[0], OPTIONS, prompt_logprobs=0)
    assert scored.result().tokens[0] == alone[0][0]
    engine.close()
    exact = xj.score(model.params, model.config, np.array(prompts[:1])).logprobs_BT[0]
    found = [token.logprob for token in scored.prompt_logprobs]
    np.testing.assert_allclose(found[-len(exact) :], exact, atol=1e-3)


@pytest.mark.soak
def test_draft_tokens_next_to_others(model, prompts):
    """Greedy tokens with prompt look-up are those without, and the prefix cache has the same hits."""
    found = []
    for options in ({}, dict(draft="lookup", draft_tokens=3)):
        with xj.Engine(model, rows=2, capacity=256, chunk=64, **options) as engine:
            requests = [engine.submit(prompt, OPTIONS) for prompt in prompts * 2]
            found.append([(row[0], row[2]) for row in answers(requests)])
    assert found[0] == found[1] and any(reused for _, reused in found[0])


def test_snapshots_with_draft_slots_fit_host_memory(model):
    """Also of a model whose parameters are NumPy arrays. No two arrays share a buffer, since programs donate
    them.
    """
    params = jax.tree.map(np.asarray, model.params)
    options = EngineOptions(rows=2, capacity=256, chunk=64, pages=9, host_pages=4, draft="lookup")
    shape = engine_shape(xj.Model(params, model.config), options)
    states = shape.empty_states(model.config, shape.snapshots)
    leaves = jax.tree.leaves(states)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    host = HostPages(shape.host_snapshots, states)
    first = jax.tree.map(lambda x: x[:1] + 1, states)
    host.save(np.array([2]), first)
    jax.tree.map(np.testing.assert_array_equal, host.load(np.array([2]), states), first)


def test_snapshots_are_bounded():
    pool = PagePool(3)
    assert [pool.add([b"a", b"b"]), pool.add([b"c"]), pool.add([b"b"])] == [1, 2, 0]
    pool.touch(pool.find([b"a"]))  # so the other one is replaced
    assert pool.add([b"d"]) == 2 and pool.find([b"c"]) == [] and pool.find([b"b"]) == [1]
    pool.remove([b"a", b"b"])
    assert pool.find([b"a"]) == [] and pool.find([b"d"]) == [2]
    pool.clear_cache()
    assert pool.find([b"d"]) == []


def test_a_long_prompt_keeps_early_snapshots():
    """A prompt of 20 chunks keeps the snapshots after chunks 1, 5 and 20. A prompt that leaves it after chunk
    7 adds one there.
    """
    scheduler = Scheduler(1, 64, 2048, 64, snapshots=PagePool(5))

    def hits(ids: list[int]) -> int:
        row = Row(ids, 1)
        scheduler.submit(row)
        while not row.is_prefilled:
            for action in scheduler.schedule():
                if isinstance(action, PrefillChunk):
                    scheduler.record_prefill(action)
        scheduler.end(row)
        return row.hits // 64

    long = [*range(20 * 64 + 1)]
    first, second = ([*range(7 * 64), *[other] * 30] for other in (-1, -2))
    assert [hits(long), hits(first), hits(second), hits(long)] == [0, 5, 7, 20]
