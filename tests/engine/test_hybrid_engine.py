"""Engines of hybrid models: rows have recurrent states beside pages."""

import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.engine import page_tiers
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
    drafts = dict(draft="lookup", draft_tokens=3)
    for options in ({}, drafts, drafts | dict(host_pages=20)):
        with xj.Engine(model, rows=2, capacity=256, chunk=64, **options) as engine:
            requests = [engine.submit(prompt, OPTIONS) for prompt in prompts * 2]
            found.append([(row[0], row[2]) for row in answers(requests)])
    assert found[0] == found[1] == found[2] and any(reused for _, reused in found[0])


FEW_PAGES = dict(rows=2, capacity=256, chunk=64, pages=9)
SHORT = xj.GenerateOptions(max_tokens=3, eos_token_ids=())


@pytest.fixture(scope="module")
def many_prompts() -> list[list[int]]:
    """Three times as many pages, and twice as many snapshots, as the device has."""
    return [np.random.RandomState(seed).randint(0, cases.VOCAB, 190).tolist() for seed in range(8)]


@pytest.fixture(scope="module")
def computed(model, many_prompts) -> list[tuple]:
    """Their answers without host memory."""
    with xj.Engine(model, **FEW_PAGES) as engine:
        return answers([engine.submit(prompt, SHORT) for prompt in many_prompts])


def with_hits(computed: list[tuple], tokens: int) -> list[tuple]:
    return [(*row[:2], tokens) for row in computed]


def test_snapshots_come_back_from_host_memory(model, many_prompts, computed):
    engine = xj.Engine(model, **FEW_PAGES, host_pages=60)
    assert engine.shape.host_snapshots == 60 // 4
    assert answers([engine.submit(prompt, SHORT) for prompt in many_prompts]) == computed
    again = answers([engine.submit(prompt, SHORT) for prompt in many_prompts])
    assert again == with_hits(computed, 128)
    stats = engine.stats
    assert stats.hits == stats.host_hits == 8 * 128 and stats.pages_used == 0
    params = jax.tree.map(lambda x: x * 0.9, model.params)
    engine.update(params)  # nothing of the old weights is found
    (changed,) = answers([engine.submit(many_prompts[0], SHORT)])
    assert changed[:2] != computed[0][:2] and engine.stats.hits == stats.hits


@pytest.mark.full
@pytest.mark.parametrize("event", ["update", "preempt", "release"])
def test_a_row_that_has_loaded_a_part_of_its_pages(model, many_prompts, event, monkeypatch):
    """New weights, a preemption or a pause come after the first of two pages."""
    monkeypatch.setattr("xinfer_jax.engine.scheduler.COPIED_PAGES", 1)
    one_row = FEW_PAGES | dict(rows=1)
    engine = xj.Engine(model, **one_row, host_pages=60)
    computed = answers([engine.submit(prompt, SHORT) for prompt in many_prompts])
    request = engine.submit(many_prompts[0], SHORT)
    row = request.answers[0].row
    while not row.num_computed:
        engine.step()
    assert row.num_computed == 64 and len(row.host_pages) == 1
    if event == "update":
        params = jax.tree.map(lambda x: x * 0.9, model.params)
        engine.update(params)
        assert not row.host_pages and not row.num_computed  # its states are ahead of its pages
        with xj.Engine(xj.Model(params, model.config), **one_row) as other:
            computed = answers([other.submit(many_prompts[0], SHORT)])
    elif event == "preempt":
        urgent = engine.submit(many_prompts[1], SHORT, priority=20)
        assert answers([urgent])[0][:2] == computed[1][:2] and engine.stats.preemptions == 1
    else:
        engine.pause()
        engine.release_cache()
        engine.restore_cache()
        engine.resume()
    assert answers([request])[0][:2] == computed[0][:2]
    assert row.hits == (0 if event == "update" else 128)
    assert engine.stats.pages_used == 0


@pytest.mark.full
def test_snapshots_in_files(model, many_prompts, computed, tmp_path, monkeypatch):
    """A later engine finds pages and snapshots. A damaged file is a miss."""
    monkeypatch.setattr(page_tiers, "_CLOSE_SECONDS", 120)
    monkeypatch.setattr(page_tiers, "_FIRST_WAIT_SECONDS", 120)
    monkeypatch.setattr(page_tiers.PageTiers, "note_prefill", lambda *_: None)  # so that rows wait for files
    options = FEW_PAGES | dict(host_pages=60, page_directory=tmp_path / "pages")
    with xj.Engine(model, **options) as engine:
        assert answers([engine.submit(prompt, SHORT) for prompt in many_prompts]) == computed
    files = [path for path in (tmp_path / "pages").iterdir() if path.suffix == ".page"]
    assert len(files) == 8 * 2 * 2  # the pages and snapshots of two chunks
    with xj.Engine(model, **options) as engine:
        again = [row for prompt in many_prompts for row in answers([engine.submit(prompt, SHORT)])]
        assert again == with_hits(computed, 128) and engine.stats.file_hits == 8 * 128
    for path in files:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with xj.Engine(model, **options) as engine:
        assert answers([engine.submit(prompt, SHORT) for prompt in many_prompts]) == computed


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
