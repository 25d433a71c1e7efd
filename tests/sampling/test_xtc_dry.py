"""XTC and DRY against llama.cpp's rules in NumPy, and in all that samples."""

import runpy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import ROOT
from small_models import build
from test_candidates import context_of, random_logits, sampled

import xinfer_jax as xj
from xinfer_jax.sampling import sampler, xtc_dry
from xinfer_jax.sampling.batched_settings import has_all_settings, settings_per_row
from xinfer_jax.sampling.random_keys import DRAW_XTC, gumbel_noise

pytestmark = pytest.mark.oldest

V = 300  # more than the candidates


def happens(probability: float, key, position: int) -> bool:
    """Returns True if XTC removes tokens at a position. It computes the draw again."""
    noise = float(gumbel_noise(key, position, DRAW_XTC, jnp.zeros(1, int))[0])
    return np.exp(-np.exp(-noise)) < probability


def xtc_by_sorting(logits: np.ndarray, kept: np.ndarray, threshold: float) -> np.ndarray:
    """Returns the kept tokens that XTC leaves, by llama.cpp's loop over the sorted ones."""
    order = np.argsort(-logits, kind="stable")
    order = order[kept[order]]
    p = np.exp(logits[order].astype(np.float64) - logits[order[0]])
    p /= p.sum()
    last = max((i for i in range(len(p)) if p[i] >= threshold), default=0)
    left = np.zeros(len(logits), bool)
    left[order[last:]] = True
    return left


def test_xtc_equals_sorting_on_both_paths():
    """Random settings, of candidates (top_k) and of all tokens. The decision is read back with the same key.
    No probability is within rounding of a threshold.
    """
    rng = np.random.RandomState(0)
    B = 24
    rows = [
        xj.SamplingConfig(
            temperature=rng.choice([0.0, 0.7, 1.0, 2.0]), top_k=int(rng.choice([0, 40])),
            top_p=rng.choice([1.0, 0.9]), min_p=rng.choice([0, 0.01]),
            xtc_probability=rng.choice([0.0, 0.5, 1.0]), xtc_threshold=rng.choice([0.0, 0.05, 0.1, 0.3, 0.6]),
        )
        for _ in range(B)
    ]  # fmt: skip
    logits = rng.standard_normal((B, V)).astype(np.float32) * 3
    settings = settings_per_row(rows, B, V)
    off = settings_per_row(
        [
            xj.SamplingConfig(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)
            for r in rows
        ],
        B,
        V,
        True,
    )
    keys = jax.random.split(jax.random.key(1), B)
    choose = jax.jit(sampler.sample_tokens)
    changed = set()
    for position in range(4):
        context = context_of(settings, B, V)
        context.position_B[:] = position
        token, _, taken = choose(logits, keys, settings, context)
        _, _, without = choose(logits, keys, off, context)
        for i, row in enumerate(rows):
            want = np.asarray(without[i]).copy()
            left = xtc_by_sorting(logits[i], np.isfinite(want), row.xtc_threshold)
            acts = row.xtc_threshold <= 0.5 and happens(row.xtc_probability, keys[i], position)
            if row.temperature > 0 and acts:
                changed |= {row.top_k} if not left[np.isfinite(want)].all() else set()
                want[~left] = -np.inf
            np.testing.assert_array_equal(taken[i], want, str(row))
            noise = gumbel_noise(keys[i], position, 0, jnp.arange(V)) if row.temperature > 0 else 0
            assert token[i] == np.argmax(want + noise)
    assert changed == {0, 40}


def test_frequency_of_xtc():
    """The frequency is counted over positions and keys. A row's draw depends on no other row."""
    B = 2000
    row = dict(xtc_threshold=0.1, temperature=1.0)
    settings = settings_per_row(xj.SamplingConfig(**row, xtc_probability=np.full(B, 0.3)), B, 3)
    logits = jnp.tile(jnp.log(jnp.array([0.6, 0.35, 0.05])), (B, 1))
    keys = jax.random.split(jax.random.key(3), B)
    kept = jax.jit(lambda position: xtc_dry.xtc(logits, logits, settings, keys, position))
    first = np.isfinite(kept(np.full(B, 5)))
    assert first[:, 1:].all()
    other = np.isfinite(kept(np.full(B, 6)))
    assert all(abs(1 - x[:, 0].mean() - 0.3) < 4 * (0.21 / B) ** 0.5 for x in (first, other))
    both = np.mean(~first[:, 0] & ~other[:, 0])
    assert abs(both - 0.09) < 4 * (0.09 / B) ** 0.5


def example(name: str):
    return runpy.run_path(str(ROOT / "scripts" / "examples" / "logits_processors.py"))[name]


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


CALL = dict(max_tokens=12, eos_token_ids=())


def generated(model, prompts, sampling, **options):
    params, config = model
    given = xj.GenerateOptions(**CALL | options, sampling=sampling)
    return xj.generate(params, config, prompts, given, key=jax.random.key(4)).tokens


PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 9, 9], [11, 12, 13, 14, 11, 12, 13, 14, 11, 12]]


@pytest.mark.full
def test_settings_equal_the_examples(model, monkeypatch):
    """XTC always happens here, and DRY has no breakers and no window."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "examples")
    pairs = [
        (xj.SamplingConfig(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.004),
        xj.SamplingConfig(temperature=1.0),
         (xj.LogitsProcessor(None, example("xtc"), last=True), dict(probability=1.0, threshold=0.004))),
        (xj.SamplingConfig(dry_multiplier=0.8), xj.SamplingConfig(),
         (xj.LogitsProcessor(None, example("dry")), dict(multiplier=0.8, base=1.75, allowed_length=2))),
    ]  # fmt: skip
    for setting, plain, processor in pairs:
        got = generated(model, PROMPTS, setting)
        assert got == generated(model, PROMPTS, plain, processors=[processor])
        assert got != generated(model, PROMPTS, plain)


def penalties_of(tokens, s: xj.SamplingConfig) -> dict[int, float]:
    """DRY's penalty of each token by llama.cpp's rule, one occurrence after the other."""
    if s.dry_penalty_last_n >= 0:
        tokens = tokens[max(len(tokens) - s.dry_penalty_last_n, 0) :]
    breakers = set(s.dry_sequence_breakers or ())
    since = next((i for i, t in enumerate(reversed(tokens)) if t in breakers), len(tokens))
    longest: dict[int, int] = {}
    for at in range(1, len(tokens)):  # the token that follows
        n = 0
        while n < min(at, since) and tokens[at - 1 - n] == tokens[len(tokens) - 1 - n]:
            n += 1
        longest[tokens[at]] = max(n, longest.get(tokens[at], 0))
    return {
        t: s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length)
        for t, n in longest.items()
        if n >= s.dry_allowed_length and t not in breakers and s.dry_multiplier
    }


def dry(logits_BV, settings, history_BS, length_B):
    """The logits after DRY, in rows that have these tokens."""
    return xtc_dry.dry(logits_BV, settings, SimpleNamespace(history_BS=history_BS, position_B=length_B))


def test_dry_equals_the_rule():
    """Random rows of few tokens, of all lengths; windows, breakers, allowed lengths from 0."""
    rng = np.random.RandomState(0)
    B, S = 64, 40
    history = rng.randint(0, 3, (B, S)).astype(np.int32)
    history[:8] = np.tile(np.arange(4), S // 4)
    length = rng.randint(0, S + 1, B).astype(np.int32)
    length[:8] = S
    rows = [
        xj.SamplingConfig(
            dry_multiplier=rng.choice([0.0, 0.8, 2.0]), dry_base=rng.choice([1.0, 1.2, 1.75]),
            dry_allowed_length=int(rng.choice([0, 1, 2, 5])),
            dry_penalty_last_n=int(rng.choice([-1, 0, 1, 9, 100])),
            dry_sequence_breakers=([], None, [2], [1, 70])[i % 4],
        )
        for i in range(B)
    ]  # fmt: skip
    settings = settings_per_row(rows, B, 80)
    got = jax.jit(dry)(np.ones((B, 80), np.float32), settings, history, length)
    want = np.zeros((B, 80))
    for i, row in enumerate(rows):
        for token, penalty in penalties_of(history[i, : length[i]].tolist(), row).items():
            want[i, token] = penalty
    np.testing.assert_allclose(1 - np.asarray(got), want, rtol=1e-5, atol=1e-5)
    assert (want > 1000).any() and (want.max(-1) > 0).sum() > 10


def test_penalties_of_dry_do_not_overflow():
    """A long repetition by a large base: finite; of -inf: -inf. At most 256 tokens above the length count. A
    multiplier too small for float32 is no penalty.
    """
    S = 600
    rows = [
        xj.SamplingConfig(dry_multiplier=1e30, dry_base=1e30),
        xj.SamplingConfig(dry_multiplier=1.0, dry_base=1.01),
        xj.SamplingConfig(dry_multiplier=1e-40, dry_base=1e30),
    ]
    settings = settings_per_row(rows, 3, 5)
    logits = np.array([[1, 2, -np.inf, 4, 5]] * 3, np.float32)
    for token in (2, 3):
        got = np.asarray(dry(logits, settings, np.full((3, S), token, np.int32), np.full(3, S, np.int32)))
        want = logits.copy()
        want[:, token] -= 1e30, 1.01**256, 0
        np.testing.assert_allclose(got, want, rtol=1e-5)


BOTH = dict(xtc_probability=0.6, xtc_threshold=0.01, dry_multiplier=1.5, dry_allowed_length=1)
OTHERS = [
    xj.SamplingConfig(temperature=1.0, top_k=20, **BOTH, dry_sequence_breakers=[13]),
    xj.SamplingConfig(temperature=1.2, **BOTH), xj.SamplingConfig(dry_multiplier=2.0, dry_penalty_last_n=8),
]  # fmt: skip


@pytest.mark.full
def test_forms_of_devices_draw_the_same():
    """CPUs in groups, GPUs' one branch, and a mesh, which samples from all tokens."""
    logits = random_logits(6, V)
    rows = [
        *OTHERS,
        xj.SamplingConfig(temperature=1.0, top_k=20, xtc_probability=1.0),
        xj.SamplingConfig(),
        OTHERS[0],
    ]
    for one, other in zip(sampled(rows, logits, True), sampled(rows, logits, False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.full
def test_settings_that_are_off_change_nothing():
    """Unset settings leave the plain structure. Settings that are off the bits."""
    for off in (
        xj.SamplingConfig(temperature=1.0),
        xj.SamplingConfig(temperature=1.0, xtc_probability=0.0, dry_multiplier=0.0, dry_base=1.75),
    ):
        assert not has_all_settings(settings_per_row(off, 2, V))
    logits = random_logits(2, V)
    plain = xj.SamplingConfig(temperature=1.0, min_p=0.01)
    for off in (
        dict(xtc_probability=1.0, xtc_threshold=0.51),
        dict(dry_multiplier=1.0, dry_penalty_last_n=0),
    ):
        rows = xj.SamplingConfig(temperature=1.0, min_p=0.01, **off)
        for one, other in zip(
            sampled([rows] * 2, logits, False), sampled([plain] * 2, logits, False), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_invalid_settings():
    for bad, message in (
        (dict(xtc_probability=1.1), "xtc_probability must be from 0"),
        (dict(xtc_threshold=-0.1), "xtc_threshold must be from 0 to 1"),
        (dict(dry_multiplier=-1.0), "dry_multiplier must be from 0"),
        (dict(dry_base=0.9), "dry_base must be from 1"),
        (dict(dry_allowed_length=1.5), "dry_allowed_length must be a whole number"),
        (dict(dry_penalty_last_n=-2), "dry_penalty_last_n must be -1"),
        (dict(dry_sequence_breakers="\n"), "dry_sequence_breakers must be a list of token ids"),
        (dict(dry_sequence_breakers=[V]), f"outside the vocabulary of {V}"),
        (dict(dry_sequence_breakers=np.zeros((2, V), bool)), "dry_sequence_breakers must be a list"),
    ):
        with pytest.raises(xj.InputError, match=message):
            settings_per_row(xj.SamplingConfig(**{"min_p": 0.1} | bad), 1, V)


def test_beams_reject_xtc(model):
    params, config = model
    with pytest.raises(xj.InputError, match="xtc_probability does not combine with beams"):
        xj.beam_search(params, config, [5, 6], sampling=xj.SamplingConfig(xtc_probability=0.1))


def test_breakers_of_rows():
    """Ids, or bool [B, V], also traced. Broadcast where no row has any."""
    rows = [xj.SamplingConfig(min_p=0.1), xj.SamplingConfig(dry_sequence_breakers=[3, 5])]
    made = settings_per_row(rows, 2, 9).dry_sequence_breakers
    assert np.argwhere(made).tolist() == [[1, 3], [1, 5]]
    again = jax.jit(lambda s: settings_per_row(s, 2, 9).dry_sequence_breakers)
    np.testing.assert_array_equal(again(xj.SamplingConfig(min_p=0.1, dry_sequence_breakers=made)), made)
    assert settings_per_row(rows[0], 64, 9).dry_sequence_breakers.strides[0] == 0
    listed = again(xj.SamplingConfig(min_p=0.1, dry_sequence_breakers=[3, 5]))
    np.testing.assert_array_equal(listed, made[[1, 1]])
