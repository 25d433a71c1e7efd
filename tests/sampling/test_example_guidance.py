"""The functions of `scripts/examples/guidance.py`: against those of transformers with random settings, and in
a loop against `forward`.
"""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import SCRIPTS
from small_models import build, prompts

import xinfer_jax as xj

pytestmark = [pytest.mark.oldest]
LENGTHS = np.array([7, 4])
NEW = 6
NO_END = np.array([], int)


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS / "examples")
    return importlib.import_module("guidance")


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


def log_softmax(x_BV):
    x_BV = x_BV - x_BV.max(-1, keepdims=True)
    return x_BV - np.log(np.exp(x_BV).sum(-1, keepdims=True))


@pytest.mark.parametrize("seed", range(3))
def test_guidance_of_transformers(examples, seed):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.generation.logits_process")
    draws = np.random.RandomState(seed)
    logits_BV = draws.standard_normal((6, 50)).astype(np.float32) * 3
    scale_B = np.repeat(draws.uniform(0, 3, 3), 2).astype(np.float32)
    got_BV = np.asarray(examples.guide(scale_B, logits_BV, None))
    np.testing.assert_array_equal(got_BV[::2], got_BV[1::2])
    for b in (0, 2, 4):
        toward, other = torch.tensor(logits_BV[[b, b + 1]]).split(1)
        out = SimpleNamespace(logits=other[:, None], get=lambda *_: None)
        ids = torch.zeros((1, 3), dtype=torch.long)
        processor = theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor(
            float(scale_B[b]), lambda *_, out=out, **__: out, ids
        )
        np.testing.assert_allclose(got_BV[b], processor(ids, toward)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_sequence_bias_of_transformers(examples, seed):
    """Texts of three tokens, in which sequences begin often; some are longer than the text."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.generation.logits_process")
    draws = np.random.RandomState(seed)
    B, V = 8, 20
    logits_BV = draws.standard_normal((B, V)).astype(np.float32)
    biases = {
        tuple(draws.randint(1, 4, draws.randint(1, 5)).tolist()): float(draws.normal()) for _ in range(20)
    }
    position_B = draws.randint(1, 7, B)
    history_BS = draws.randint(1, 4, (B, 8))
    context = SimpleNamespace(history_BS=jnp.array(history_BS), position_B=jnp.array(position_B))
    given = jax.tree.map(jnp.array, examples.sequence_biases(biases, B))
    got_BV = examples.sequence_bias(given, jnp.array(logits_BV), context)
    for b in range(B):
        processor = theirs.SequenceBiasLogitsProcessor([[list(ids), bias] for ids, bias in biases.items()])
        ids = torch.tensor(history_BS[b : b + 1, : position_B[b]])
        want_V = processor(ids, torch.tensor(logits_BV[b : b + 1]))[0]
        np.testing.assert_allclose(got_BV[b], want_V, rtol=1e-5, atol=1e-5)


def padded_prompts():
    return np.array([prompt + [0] * (7 - len(prompt)) for prompt in prompts(*LENGTHS)])


def logits_after(params, config, tokens_BN):
    """float32 [B, N, V]: the logits from which each new token is chosen, of each row alone."""
    rows = []
    for prompt_T, n, new_N in zip(padded_prompts(), LENGTHS, tokens_BN, strict=True):
        text_T = np.concatenate([prompt_T[:n], new_N])[None]
        rows.append(xj.forward(params, config, text_T)[0][0, n - 1 : -1])
    return np.array(rows)


def test_pairs_are_guided_to_one_token(examples, model):
    """Rows of other lengths: greedy ones by the formula, drawn ones the same."""
    params, config = model
    cache = xj.init_cache(config, 2, 32)
    logits_BV, cache = xj.prefill(params, config, padded_prompts(), LENGTHS, cache)
    how = dict(processors=[(xj.Processor(None, examples.guide), np.float32(1.7))])

    def decode(temperature, **more):
        settings = jax.random.key(0), xj.SamplingConfig(temperature), NO_END, NEW
        loop = params, config, logits_BV, cache, *settings
        return np.asarray(xj.decode_loop(*loop, **how, **more).tokens_BT)

    tokens_BN = decode(0.0)
    toward_NV, other_NV = log_softmax(logits_after(params, config, tokens_BN))
    want_N = (other_NV + 1.7 * (toward_NV - other_NV)).argmax(-1)
    np.testing.assert_array_equal(tokens_BN, [want_N] * 2)
    drawn_BN = decode(2.0, sample=examples.draw_for_pairs)
    np.testing.assert_array_equal(drawn_BN[0], drawn_BN[1])
    assert (drawn_BN != tokens_BN).any()


def test_contrastive_decoding(examples, model):
    """Each token has the largest difference among plausible ones; the loop ends with the rows."""
    params, config = model
    amateur = dataclasses.replace(config, num_hidden_layers=1, layers=config.layers[:1])
    models = (params, config), (params | dict(layers=params["layers"][:1]), amateur)
    trees, configs = zip(*models, strict=True)
    given = trees, configs, padded_prompts(), LENGTHS
    tokens_BN = np.asarray(examples.contrastive_tokens(*given, np.array([-5]), size=NEW))
    expert, other = (log_softmax(logits_after(*each, tokens_BN)) for each in models)
    plausible = expert >= expert.max(-1, keepdims=True) + np.log(0.1)
    np.testing.assert_array_equal(tokens_BN, np.where(plausible, expert - other, -np.inf).argmax(-1))
    assert (tokens_BN != expert.argmax(-1)).any()
    ends = np.unique(tokens_BN[:, 1])
    ended_BN = np.asarray(examples.contrastive_tokens(*given, np.resize(ends, 2), size=NEW))
    first = 1 + np.isin(tokens_BN, ends).argmax(-1).max()
    np.testing.assert_array_equal(ended_BN, np.where(np.arange(NEW) < first, tokens_BN, -1))
