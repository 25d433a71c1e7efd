"""The sampler against analytic distributions; keys; order of the processors; limits of settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xinfer_jax as xj
from xinfer_jax.backends.cpu import cpu_sampler
from xinfer_jax.ops.largest import argmax
from xinfer_jax.sampling import other_processors, processors, random_keys, sampler as sampling
from xinfer_jax.sampling.batched_settings import has_all_settings, settings_per_row
from xinfer_jax.sampling.context import init_context

pytestmark = pytest.mark.oldest

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)


def analytic(temperature=1.0, top_k=0, top_p=1.0):
    """The distribution computed by sorting, in float64."""
    logits = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-logits)
    if top_k:
        logits[order[top_k:]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()


def sampling_context(rows, seen, position=0):
    """A context without EOS ids and history."""
    count = len(seen)
    return init_context(rows, jnp.full(count, position), np.full((count, 1), -1, np.int32), seen)


sample_tokens = jax.jit(sampling.sample_tokens)  # one program for all settings


def draw(settings, count=40_000):
    rows = settings_per_row(settings, count, len(LOGITS))
    keys = random_keys.row_keys(jax.random.key(0), count)
    logits = jnp.broadcast_to(LOGITS, (count, len(LOGITS)))
    context = sampling_context(rows, np.zeros(logits.shape, bool), 7)
    return np.asarray(sample_tokens(logits, keys, rows, context)[0])


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.0),
        dict(temperature=0.5),
        dict(temperature=1.7, top_k=3),
        dict(temperature=1.0, top_p=0.8),
        dict(temperature=1.3, top_k=4, top_p=0.7),
    ],
    ids=str,
)
def test_frequencies_match_the_analytic_distribution(settings):
    drawn = np.bincount(draw(xj.SamplingConfig(**settings)), minlength=len(LOGITS))
    count = drawn.sum()
    probs = analytic(**settings)
    assert (drawn[probs == 0] == 0).all()
    kept = probs > 0
    chi2 = np.sum((drawn[kept] - count * probs[kept]) ** 2 / (count * probs[kept]))
    assert chi2 < 25  # 99.99 % point of chi-square with 5 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-10, 1e-3])
def test_tiny_temperatures_sample_the_argmax(temperature):
    assert (draw(xj.SamplingConfig(temperature=temperature)) == 0).all()


BITS = [1100871879, 2323218197, 1429913325, 2145028247]


def test_draws_are_the_same_on_every_jax_version():
    """Bits recorded on jax 0.10.2. CI runs this on the newest too. Those of candidates are their own."""
    row_key = jax.random.fold_in(jax.random.key(42), 3)
    key = jax.random.fold_in(jax.random.fold_in(row_key, 11), 0)
    np.testing.assert_array_equal(jax.random.bits(key, (4,), jnp.uint32), BITS)
    uniform = ((np.array(BITS, np.uint32) >> 9) + 0.5) * 2.0**-23
    noise, few = (
        jax.jit(random_keys.gumbel_noise)(row_key, 11, 0, np.array(at)) for at in ([0, 1, 2, 3], [3, 0, 2])
    )
    np.testing.assert_allclose(noise, -np.log(-np.log(uniform)), rtol=1e-5)
    np.testing.assert_array_equal(few, noise[np.array([3, 0, 2])])


def test_thresholds_survive_ties_infinities_and_signs():
    logits = jnp.array([[-jnp.inf, -2.0, -2.0, -5.0, -0.0, 0.0]])
    np.testing.assert_array_equal(
        np.isfinite(processors.top_k(logits, jnp.array([3])))[0], [False, True, True, False, True, True]
    )
    np.testing.assert_array_equal(
        np.isfinite(processors.top_k(-logits[:, 1:4], jnp.array([1])))[0], [False, False, True]
    )


def test_repetition_penalty_comes_before_temperature():
    """The order is the same as in transformers: 2.0 / 4 is less than 1.0."""
    rows = settings_per_row(xj.SamplingConfig(repetition_penalty=4.0), 1, len(LOGITS))
    seen = jnp.array([[True, False, False, False, False, False]])
    keys = random_keys.row_keys(jax.random.key(0), 1)
    assert sample_tokens(jnp.asarray(LOGITS)[None], keys, rows, sampling_context(rows, seen))[0][0] == 1


def test_keys_become_threefry_keys():
    """Keys of rbg, the same alone, in a batch and under vmap. Each word of their data counts. Old ones."""
    impl = "unsafe_rbg"
    words = lambda keys: jax.random.key_data(keys).tolist()  # noqa: E731
    data = np.arange(12, dtype=np.uint32).reshape(3, 4)
    keys = jax.random.wrap_key_data(data, impl=impl)
    each = random_keys.row_keys(keys, 3)
    assert str(each.dtype) == "key<fry>"
    assert words(each) == [words(random_keys.check_key(key, 1)) for key in keys]
    assert words(each) == words(jax.vmap(lambda key: random_keys.check_key(key, 1))(keys))
    assert words(random_keys.row_keys(data, 3)) == words(each)  # of old style
    changed = jax.random.wrap_key_data(data[0] ^ np.eye(4, dtype=np.uint32), impl=impl)
    assert len({*map(tuple, words(each)[:1] + words(random_keys.row_keys(changed, 4)))}) == 5
    assert words(random_keys.row_keys(keys[0], 2)) == words(random_keys.row_keys(each[0], 2))
    new, old = (random_keys.row_keys(key(5), 3) for key in (jax.random.key, jax.random.PRNGKey))
    assert words(new) == words(old)


@pytest.mark.parametrize(
    "settings,named",
    [
        (dict(temperature=-0.1), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.1), "top_p"),
        (dict(top_k=-1), "top_k"),
        (dict(repetition_penalty=0.0), "repetition_penalty"),
    ],
    ids=str,
)
def test_settings_out_of_range_raise_with_their_value(settings, named):
    with pytest.raises(xj.InputError, match=f"{named}.*got {list(settings.values())[0]!r}"):
        xj.SamplingConfig(**settings).validate()


def test_defaults_from_generation_config():
    qwen = dict(do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, pad_token_id=0)
    assert xj.SamplingConfig.from_hf(qwen) == xj.SamplingConfig(
        temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1
    )
    assert xj.SamplingConfig.from_hf({**qwen, "do_sample": False}) == xj.SamplingConfig(
        temperature=0.0, top_k=20, top_p=0.8, repetition_penalty=1.1
    )
    assert xj.SamplingConfig.from_hf({"temperature": 0.7}) == xj.SamplingConfig()
    # Transformers' defaults.
    assert xj.SamplingConfig.from_hf({"do_sample": True}) == xj.SamplingConfig(temperature=1.0, top_k=50)
    with pytest.raises(xj.InputError, match="num_beams=4"):
        xj.SamplingConfig.from_hf({"num_beams": 4})


def test_neutral_generation_config_gives_the_defaults():
    """Values that transformers writes for unused settings, and EOS ids outside the vocabulary."""
    neutral = dict(
        temperature=None, top_k=None, suppress_tokens=None, num_beams=1, num_beam_groups=1,
        diversity_penalty=0.0, epsilon_cutoff=0.0, eta_cutoff=0, encoder_repetition_penalty=1.0,
        encoder_no_repeat_ngram_size=0, bad_words_ids=None, sequence_bias=None, begin_suppress_tokens=[],
        forced_bos_token_id=None, min_length=0, guidance_scale=1, stop_strings=None, length_penalty=1.0,
        early_stopping=False, max_length=20, renormalize_logits=False, use_cache=True,
        transformers_version="5", eos_token_id=[5, None, -1, 10**30],
    )  # fmt: skip
    assert xj.SamplingConfig.from_hf(neutral) == xj.SamplingConfig()
    assert xj.SamplingConfig.from_hf({"suppress_tokens": []}) == xj.SamplingConfig()
    assert xj.SamplingConfig.from_hf({"suppress_tokens": [3]}).forbidden_token_ids == [3]


def test_n_grams_longer_than_the_rows_forbid_nothing():
    """It returns at once: the loop does not run up to n."""
    history_BS = jnp.array([[1, 1, 1, 1, 0, 0]] * 2)
    length_B = jnp.array([4, 4])
    size_B = jnp.array([2**31 - 1, 2], jnp.int32)
    got = other_processors.no_repeat_ngram(jnp.zeros((2, 6)), size_B, history_BS, length_B)
    np.testing.assert_array_equal(np.isneginf(got), [[False] * 6, [False, True] + [False] * 4])


def test_argmax_of_groups():
    """The lowest of equal numbers, the first NaN, at the end of a last group of few numbers."""
    size = cpu_sampler.LEAST + 77
    x = np.random.RandomState(0).standard_normal((7, size)).astype(np.float32)
    x[0, [900, -1]] = 9
    x[1, [901, -1]] = np.inf
    x[2] = -np.inf
    x[3, [5, 3]] = np.nan, -np.float32(np.nan)
    x[4, [5, 902]] = np.inf, np.nan
    x[5, -1] = 9
    x[6, -1] = np.nan
    assert "reduce_max" in str(jax.make_jaxpr(argmax)(x))  # by groups
    np.testing.assert_array_equal(jax.jit(argmax)(x), np.argmax(x, -1))
    np.testing.assert_array_equal(argmax(x), np.argmax(x, -1))


@pytest.mark.full
def test_sampling_from_candidates_equals_sampling_from_the_vocabulary():
    """Rows whose top-k is small, too large, off or tied with the last token; forbidden tokens; other
    settings.
    """
    rows = [
        xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8), xj.SamplingConfig(temperature=1.5, top_k=64),
        xj.SamplingConfig(temperature=1.0, top_k=65), xj.SamplingConfig(temperature=0.9, top_k=0, top_p=0.9),
        xj.SamplingConfig(), xj.SamplingConfig(temperature=2.0, top_k=3), xj.SamplingConfig(temperature=1.0,
        top_k=40, min_p=0.02), xj.SamplingConfig(temperature=1.0, top_k=40, typical_p=0.7),
    ]  # fmt: skip
    B = len(rows)
    V = 1000
    logits = np.random.RandomState(3).standard_normal((B, V)).astype(np.float32) * 3
    logits[0, 5:] = -np.inf  # leaves fewer than top-k
    logits[5] = np.minimum(logits[5], 0)  # half of all tie as the largest
    settings = settings_per_row(rows, B, V)
    keys = jax.random.split(jax.random.key(2), B)

    @jax.jit
    def both(keys, logits, settings, position):
        seen = np.zeros(logits.shape, bool)
        token, _, taken = sampling.sample_tokens(
            logits, keys, settings, sampling_context(settings, seen, position)
        )
        warped = sampling.warp_logits(logits, settings, jnp.max(logits, -1, keepdims=True))
        return token, taken, sampling.draw_tokens(warped, keys, settings, position, None, V), warped

    for position in range(20):
        at_B = jnp.full(B, position)
        token, taken, *want = both(keys, logits, settings, at_B)
        np.testing.assert_array_equal(token, want[0])
        np.testing.assert_array_equal(taken, want[1])
        for i in (0, 1, 5, 7):
            alone = (jax.tree.map(lambda x, i=i: x[i : i + 1], x) for x in (keys, logits, settings, at_B))
            for got, among in zip(both(*alone)[:2], (token, taken), strict=True):
                np.testing.assert_array_equal(got[0], among[i])


def test_a_config_is_a_pytree_of_what_is_set():
    """Settings that the caller has not set are not read under jit and vmap: an n-gram size of 0 is no number
    of the program.
    """
    config = xj.SamplingConfig(temperature=0.5)
    assert jax.tree.leaves(config) == [0.5] and jax.tree.leaves(xj.SamplingConfig()) == []
    doubled = jax.tree.map(lambda x: 2 * x, config)
    assert doubled == xj.SamplingConfig(temperature=1.0) and doubled.top_p == 1
    programs = []

    @jax.jit
    def settings(sampling):
        rows = settings_per_row(sampling, 2, 9)
        programs.append(has_all_settings(rows))
        return rows

    for temperature in (0.5, 0.0):
        rows = settings(xj.SamplingConfig(temperature=temperature))
        np.testing.assert_array_equal(rows.temperature, [temperature] * 2)
    settings(xj.SamplingConfig(temperature=0.5, top_k=3))
    settings(xj.SamplingConfig(min_p=0.5))
    assert programs == [False, False, True]
    each = jax.vmap(settings)(xj.SamplingConfig(temperature=jnp.array([0.5, 1.0, 2.0])))
    assert each.temperature.shape == (3, 2) and not has_all_settings(each)
