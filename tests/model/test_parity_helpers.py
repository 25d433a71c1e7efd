"""`xj.testing`: right models pass, wrong ones fail and say where."""

import sys

import jax
import jax.numpy as jnp
import pytest
import tiny

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]
TEXTS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("random"), with_tokenizer=False)


@pytest.fixture(scope="module")
def model(path) -> xj.Model:
    return xj.load_model(path)


def test_parity_with_transformers(path, model):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    assert xj.testing.assert_parity(path, tokens=TEXTS) < 1e-5
    final_norm = model.params["final_norm"]
    for wrong, message in (
        (1.001 * final_norm, r"the logit at \[\d, \d, \d+\] is"),
        (jnp.nan * final_norm, "inf"),
    ):
        other = xj.Model(model.params | dict(final_norm=wrong), model.config)
        with pytest.raises(AssertionError, match=message):
            xj.testing.assert_parity(path, tokens=TEXTS, model=other)


def test_parity_without_transformers(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(xj.InputError, match="pip install torch transformers"):
        xj.testing.assert_parity(path, tokens=TEXTS)


def test_rollouts_match_scores(model):
    stacked = xj.params.stack_layers(model.params, model.config)
    how = dict(prompts=TEXTS, max_tokens=6, temperature=0.7, remat="layer")
    assert xj.testing.assert_rollout_matches_score(stacked, model.config, **how) < 1e-5
    other = jax.tree.map(lambda x: 1.001 * x, stacked)
    with pytest.raises(
        AssertionError, match=r"log-probability at \[\d, \d+\] is -.*, by score -.* of all do"
    ):
        xj.testing.assert_rollout_matches_score(stacked, model.config, scored_by=other, **how)
