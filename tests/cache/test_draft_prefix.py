"""Prefixes with draft heads: a call that goes on from a prefix drafts and accepts as one without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import HEADS, draft_case
from quick import full_except

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

# All prompts have at most 16 tokens, and all calls keep a prefix, so they share their programs.
FIRST = ([5, 9, 20], [8, 1, 6, 4], [7], [3, 3, 1])
MORE = ([11], [13, 14], [2, 3], [6])
CAPACITY = 64
MOST = 10


def run(case, prompts, **given):
    settings = dict(max_tokens=MOST, draft=case.draft, keep_prefix=True, eos_token_ids=())
    capacity = {} if "prefix" in given else dict(capacity=CAPACITY)
    model = case.model
    return xj.generate(model.params, model.config, prompts, xj.GenerateOptions(**settings | capacity | given))


def first_call(case):
    """Returns the result of a call whose first row ends after some tokens."""
    eos = run(case, FIRST).tokens[0][4:5]
    first = run(case, FIRST, eos_token_ids=eos)
    assert len(first.tokens[0]) < MOST
    return first


def next_prompts(out, before=FIRST):
    return [[*a, *b, *c] for a, b, c in zip(before, out.tokens, MORE, strict=True)]


def assert_equal(out, fresh):
    assert out.tokens == fresh.tokens
    assert out.stats.accepted == fresh.stats.accepted and out.stats.passes == fresh.stats.passes
    assert_close(out.prefix, fresh.prefix)


def assert_close(prefix, fresh):
    """Compares what the head goes on from: features and keys and values of all tokens."""
    assert prefix.tokens == fresh.tokens
    one, other = prefix.draft, fresh.draft
    leaves = [(one.features.features_BSX, other.features.features_BSX)]
    if one.cache is not None:
        layers = (jax.tree.leaves(draft.cache.layers) for draft in (one, other))
        by_slot = (tuple(jnp.swapaxes(x, 1, 2) for x in pair) for pair in zip(*layers, strict=True))
        leaves += by_slot
    for row, tokens in enumerate(prefix.tokens):
        for found, wanted in leaves:
            used = np.s_[row, : len(tokens)]
            bound = 1e-5 * np.abs(wanted[used]).max()  # programs of different shapes agree to it
            np.testing.assert_allclose(found[used], wanted[used], rtol=0, atol=bound)


@pytest.mark.parametrize("name", full_except((), HEADS, soak={*HEADS} - {"mtp"}))
def test_drafts_equal_those_without_a_prefix(name):
    case = draft_case(name)
    first = first_call(case)
    prompts = next_prompts(first)
    again = run(case, prompts, prefix=first.prefix)
    assert again.stats.reused_tokens == sum(map(len, first.prefix.tokens))
    assert_equal(again, run(case, prompts))


@pytest.mark.parametrize("name", full_except((), HEADS, soak=HEADS))
def test_any_part_of_a_prefix_is_reused(name):
    """Prompts share the beginning of a prompt or of an answer, or nothing. A prefix follows a prefix."""
    case = draft_case(name)
    first = first_call(case)
    _, second, _, last = first.tokens
    cut = [[*FIRST[0][:2], 1, 2, 3], [*FIRST[1], *second[:4], 2, 3], [9, 9], [*FIRST[3], *last]]
    again = run(case, cut, prefix=first.prefix)
    reused = 0 if name == "mtp-hybrid" else 2 + 8 + 3  # a state cannot go back
    assert again.stats.reused_tokens >= reused
    assert_equal(again, run(case, cut))
    longer = next_prompts(again, cut)
    assert_equal(run(case, longer, prefix=again.prefix), run(case, longer))


@pytest.mark.soak
def test_several_answers_and_sampled_tokens():
    case = draft_case("mtp")
    first = first_call(case)
    prompts = next_prompts(first)
    assert_equal(run(case, prompts, prefix=first.prefix, n=2), run(case, prompts, n=2))


@pytest.mark.soak
def test_a_stream_that_is_stopped_keeps_the_prefix_of_its_tokens():
    case = draft_case("mtp")
    options = xj.GenerateOptions(
        draft="mtp", max_tokens=40, eos_token_ids=(), keep_prefix=True, capacity=CAPACITY
    )
    model = case.model
    stream = xj.stream(model.params, model.config, FIRST, options)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.stop()
    prompts = next_prompts(stream.output)
    assert_equal(run(case, prompts, prefix=stream.output.prefix), run(case, prompts))


def test_files(tmp_path):
    case = draft_case("mtp")
    model = case.model
    given = model.params, model.config
    path = tmp_path / "prefix"
    first = first_call(case)
    xj.save_prefix(*given, first.prefix, path)
    loaded = xj.load_prefix(*given, path, draft="mtp")
    assert loaded.tokens == first.prefix.tokens
    pairs = zip(first.prefix.draft.cache.layers, loaded.draft.cache.layers, strict=True)
    used = np.s_[1, : len(loaded.tokens[1])]
    for saved, read in pairs:
        np.testing.assert_array_equal(saved.k[1][:, used[1]], read.k[1][:, used[1]])
    features = (prefix.draft.features.features_BSX[used] for prefix in (first.prefix, loaded))
    np.testing.assert_array_equal(*features)
    prompts = next_prompts(first)
    assert_equal(run(case, prompts, prefix=loaded), run(case, prompts, prefix=first.prefix))
    plain = xj.load_prefix(*given, path, capacity=48)
    assert plain.draft is None
    with pytest.raises(xj.InputError, match="the prefix has no data of a draft head: make it by a call with"):
        run(case, prompts, prefix=plain)
    xj.save_prefix(*given, plain, tmp_path / "plain")
    with pytest.raises(xj.InputError, match="has no data of this draft head: save a prefix of a call with"):
        xj.load_prefix(*given, tmp_path / "plain", draft="mtp")


def test_a_prefix_of_another_head_raises():
    case = draft_case("mtp")
    first = run(case, FIRST)
    head = case.model.params["draft_head"]
    other = head | dict(proj=jax.tree.map(lambda x: 2 * x, head["proj"]))
    changed = case._replace(model=xj.Model(case.model.params | dict(draft_head=other), case.model.config))
    prompts = next_prompts(first)
    with pytest.raises(xj.InputError, match="has data of another draft head"):
        run(changed, prompts, prefix=first.prefix)
    # The head is no part of the model that a prefix belongs to, and calls without a head need none.
    ignored = run(changed, prompts, prefix=first.prefix, draft=None)
    assert ignored.stats.reused_tokens and ignored.prefix.draft is None
    assert dataclasses.replace(first.prefix, draft=None).shared(prompts).tolist() == [
        len(row) for row in first.prefix.tokens
    ]
