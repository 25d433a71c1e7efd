"""The processors of `scripts/examples/logits_processors.py`, with random settings: against those of
transformers, and against NumPy after llama.cpp and mlx-lm.
"""

import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import SCRIPTS

pytestmark = [pytest.mark.oldest]
B, V, S = 6, 50, 24
ROWS = np.arange(B)


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "examples")
    return importlib.import_module("logits_processors")


def random_logits(seed):
    logits_BV = np.random.RandomState(seed).standard_normal((B, V)).astype(np.float32) * 3
    logits_BV[0, 7:] = -np.inf
    return logits_BV


def softmax(x_V):
    probability_V = np.exp(x_V - x_V.max())
    return probability_V / probability_V.sum()


@pytest.mark.parametrize("seed", range(3))
def test_those_of_transformers(examples, seed):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.generation.logits_process")
    draws = np.random.RandomState(seed)
    logits_BV = random_logits(seed)
    eos = [3, 9]
    number = draws.randint(1, 12)
    ids = torch.zeros((1, number + 5), dtype=torch.long)
    context = SimpleNamespace(num_generated_B=np.full(B, number), eos_BE=np.tile(eos, (B, 1)))
    size, start, factor = float(draws.uniform(1e-3, 0.2)), draws.randint(0, 8), float(draws.uniform(1, 1.6))
    decay = dict(start=np.full(B, start), factor=np.full(B, factor, np.float32))
    pairs = [
        (examples.epsilon, np.full(B, size, np.float32), theirs.EpsilonLogitsWarper(size)),
        (examples.eta, np.full(B, size, np.float32), theirs.EtaLogitsWarper(size)),
        (examples.longer_ends, decay, theirs.ExponentialDecayLengthPenalty((start, factor), eos, 5)),
    ]
    for ours, settings, other in pairs:
        want = other(ids.repeat(B, 1), torch.tensor(logits_BV)).numpy()
        np.testing.assert_allclose(ours(settings, logits_BV, context), want, rtol=1e-5, err_msg=ours.__name__)


@pytest.mark.parametrize("seed", range(3))
def test_xtc_and_top_n_sigma(examples, seed):
    draws = np.random.RandomState(seed)
    logits_BV = random_logits(seed)
    n_B, threshold_B = draws.uniform(0.2, 2, B), draws.uniform(0.01, 0.4, B)
    for happens in (0, 1):
        context = SimpleNamespace(key_B=jax.random.split(jax.random.key(seed), B))
        settings = dict(probability=np.full(B, happens), threshold=threshold_B)
        got_BV = np.asarray(examples.xtc(settings, logits_BV, context))
        for b in ROWS:
            probability_V = softmax(logits_BV[b])
            above = [v for v in np.argsort(-probability_V) if probability_V[v] > threshold_B[b]]
            want_V = logits_BV[b].copy()
            want_V[above[: -1 if happens else 0]] = -np.inf
            np.testing.assert_array_equal(got_BV[b], want_V)
    got_BV = np.asarray(examples.top_n_sigma(n_B.astype(np.float32), logits_BV, None))
    for b in ROWS:
        finite = logits_BV[b][np.isfinite(logits_BV[b])]
        kept_V = logits_BV[b] >= finite.max() - n_B[b] * finite.std()
        np.testing.assert_array_equal(got_BV[b], np.where(kept_V, logits_BV[b], -np.inf))


@pytest.mark.parametrize("seed", range(3))
def test_dry(examples, seed):
    """Texts of three tokens, which repeat often."""
    draws = np.random.RandomState(seed)
    logits_BV = random_logits(seed)
    length_B = draws.randint(1, S + 1, B)
    history_BS = draws.randint(0, 3, (B, S))
    multiplier_B, base_B = draws.uniform(0.5, 2, (2, B)).astype(np.float32)
    settings = dict(multiplier=multiplier_B, base=base_B, allowed_length=draws.randint(1, 4, B))
    context = SimpleNamespace(history_BS=jnp.array(history_BS), position_B=jnp.array(length_B))
    got_BV = np.asarray(examples.dry(settings, jnp.array(logits_BV), context))
    for b in ROWS:
        text = history_BS[b, : length_B[b]].tolist()
        want_V = logits_BV[b].copy()
        for v in range(V):
            lengths = [0]
            for i in range(1, len(text)):
                if text[i] == v:
                    lengths.append(next((k for k in range(i) if text[i - 1 - k] != text[-1 - k]), i))
            if (longest := max(lengths)) >= settings["allowed_length"][b]:
                excess = longest - settings["allowed_length"][b]
                want_V[v] -= settings["multiplier"][b] * settings["base"][b] ** excess
        np.testing.assert_allclose(got_BV[b], want_V, rtol=1e-4)
