"""A prefix that later calls reuse, in memory and in files."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.cache.prefix import make_prefix

pytestmark = pytest.mark.oldest

FIRST = ([1, 2, 3, 4, 5], [7, 8, 9])
MORE = ([11, 12], [13, 14, 15, 16])


@pytest.fixture(scope="module")
def model():
    return tiny.shallow_model(dtype="float32")


def run(model, prompts, **given) -> xj.types.GenerateOutput:
    options = xj.GenerateOptions(
        **dict(max_tokens=8, sampling=xj.SamplingConfig(temperature=0.8), eos_token_ids=()) | given
    )
    return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))


def next_prompts(out: xj.types.GenerateOutput, first=FIRST) -> list[list[int]]:
    return [[*a, *b, *c] for a, b, c in zip(first, out.tokens, MORE, strict=True)]


@pytest.mark.parametrize(
    "given",
    [{},
        *(pytest.param(slow, marks=pytest.mark.full) for slow in (dict(draft="lookup"), dict(n=2),
            dict(quantize="int8")))],
    ids=["plain", "draft", "n", "int8"],
)  # fmt: skip
def test_a_call_with_a_prefix_equals_one_without(model, given):
    if quantize := given.get("quantize"):
        model = tiny.shallow_model(quantize=quantize)
        given = {}
    first = run(model, FIRST, keep_prefix=True, capacity=64)
    prompts = next_prompts(first)
    again = run(model, prompts, prefix=first.prefix, keep_prefix=True, **given)
    fresh = run(model, prompts, capacity=64, **given)
    assert again.tokens == fresh.tokens and again.prefix.cache.capacity == 64
    # The last token of an answer was sampled, and is not in the cache.
    assert again.stats.reused_tokens == sum(map(len, FIRST)) + 2 * 7
    assert [len(row) for row in again.prefix.tokens] == np.asarray(again.prefix.cache.length_B).tolist()


def test_tokens_that_differ_are_prefilled_again(model):
    first = run(model, FIRST, keep_prefix=True, capacity=64)
    prompts = next_prompts(first)
    prompts[0][3] = 99
    again = run(model, prompts, prefix=first.prefix)
    assert again.stats.reused_tokens == 3 + len(FIRST[1]) + 7
    assert again.tokens == run(model, prompts, capacity=64).tokens
    same = run(model, FIRST, prefix=first.prefix)  # the last token is prefilled again for its logits
    assert same.tokens == first.tokens and same.stats.reused_tokens == 4 + 2


@pytest.mark.full
def test_a_saved_prefix_loads_with_the_same_bits(model, tmp_path):
    first = run(model, FIRST, keep_prefix=True, capacity=64)
    xj.save_prefix(model.params, model.config, first.prefix, tmp_path / "cache.safetensors")
    loaded = xj.load_prefix(model.params, model.config, tmp_path / "cache.safetensors", capacity=96)
    assert loaded.tokens == first.prefix.tokens and loaded.cache.capacity == 96
    assert (
        run(model, next_prompts(first), prefix=loaded).tokens
        == run(model, next_prompts(first), prefix=first.prefix).tokens
    )
    other = model.params | dict(final_norm=model.params["final_norm"] * 2)
    changed = dataclasses.replace(model.config, rms_norm_eps=1e-3)
    for params, config in ((other, model.config), (model.params, changed)):
        with pytest.raises(xj.InputError, match="was saved with another model"):
            xj.load_prefix(params, config, tmp_path / "cache.safetensors")
    with pytest.raises(xj.InputError, match="more than the capacity 4"):
        xj.load_prefix(model.params, model.config, tmp_path / "cache.safetensors", capacity=4)
    with pytest.raises(xj.InputError, match="cannot be read"):
        xj.load_prefix(model.params, model.config, tmp_path / "nothing")


@pytest.mark.full
def test_options_that_do_not_fit_the_prefix_raise(model):
    prefix = run(model, FIRST, keep_prefix=True, capacity=32).prefix
    for prompts, given, named in (
        (FIRST[:1], {}, "1 prompts for a prefix of 2 rows"),
        (FIRST, dict(capacity=64), "capacity=64, but the prefix has a cache of 32"),
        (FIRST, dict(max_tokens=30), "exceeds the capacity of the prefix 32"),
        (FIRST, dict(use_cache=False), "prefix needs the cache"),
    ):
        with pytest.raises(xj.InputError, match=named):
            run(model, prompts, prefix=prefix, **given)
    with pytest.raises(xj.InputError, match="keep_prefix with best_of=2"):
        run(model, FIRST, keep_prefix=True, best_of=2)


@pytest.mark.full
def test_a_prefix_with_fewer_rows_than_its_cache(model, tmp_path):
    """A cache of four rows of which the prefix has three: the fourth is neither used nor saved."""
    params = model.params
    config = model.config
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], [11, 12]]
    tokens_BT = np.array([[*row, 0, 0, 0][:5] for row in (*prompts, [1] * 5)])
    cache = xj.prefill(params, config, tokens_BT, np.array([5, 3, 2, 4]), xj.init_cache(config, 4, 64))[1]
    prefix = make_prefix(params, config, prompts, [[6], [6], []], cache)
    assert prefix.cache.length_B.tolist() == [5, 3, 1, 0]
    prefix.check(params, config)
    assert prefix.shared([[1, 2, 3, 9], [7, 8, 9, 6], [11, 12]]).tolist() == [3, 3, 1]
    with pytest.raises(xj.InputError, match="4 prompts for a prefix of 3 rows"):
        prefix.shared([[1]] * 4)
    xj.save_prefix(params, config, prefix, tmp_path / "cache")
    loaded = xj.load_prefix(params, config, tmp_path / "cache")
    assert loaded.tokens == prefix.tokens and loaded.cache.length_B.tolist() == [5, 3, 1]
    np.testing.assert_array_equal(loaded.cache.v[0][:, :, :5], prefix.cache.v[0][:3, :, :5])
    first = xj.types.Prefix(prefix.tokens[:2], prefix.cache)
    with pytest.raises(xj.InputError, match=r"has 5, 3 tokens .* holds 5, 3, 1"):
        first.check(params, config)
