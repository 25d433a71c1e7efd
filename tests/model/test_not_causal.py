"""`is_causal: false` in config.json: attention sees the tokens after a token too, as in transformers."""

import copy

import numpy as np
import parity_cases as cases
import pytest
import tiny
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.families.writing import to_hf
from xinfer_jax.model.forward_parts import hidden_states

pytestmark = pytest.mark.oldest

# Latent attention is causal: tests/checkpoint/test_latent_files.py has the error.
CAUSAL = {
    name: case
    for name, case in cases.CASES.items()
    if case.continued_prompts and any(layer.attention for layer in case.config.layers)
}

LIVE = ("mistral-long-window", "gemma4-experts", "qwen3-next-sparse-step")


def not_causal(name):
    return copy.deepcopy(CAUSAL[name].hf) | dict(is_causal=False)


def test_a_token_sees_a_window_to_both_sides():
    """The window is the largest distance, as transformers has it; layers without one see all tokens."""
    hf = tiny.CONFIG | dict(model_type="mistral", num_hidden_layers=1, sliding_window=3, is_causal=False)
    config = from_hf(hf)
    params = random_params(config)
    ids = np.arange(3, 13)
    (hidden_BTD, _) = hidden_states(params, config, np.stack([ids, np.where(np.arange(10) == 5, 20, ids)]))
    changed = np.abs(hidden_BTD[0] - hidden_BTD[1]).max(-1) > 1e-6
    assert np.flatnonzero(changed).tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_configs_of_all_families():
    """Each attention layer sees later tokens, what is written means the same, and null is an error."""
    for name in CAUSAL:
        config = from_hf(not_causal(name))
        assert all(layer.attention is None or layer.attention.ahead for layer in config.layers), name
        assert from_hf(to_hf(config)) == config != CAUSAL[name].config, name
        assert from_hf(not_causal(name) | dict(is_causal=True)) == CAUSAL[name].config, name
    text = not_causal("mistral-window")
    for outer, inner in ((True, False), (False, True)):  # of a model that also sees, that of its text model
        wrapped = dict(model_type="mistral3", is_causal=outer, text_config=text | dict(is_causal=inner))
        assert bool(from_hf(wrapped).layers[0].attention.ahead) is not inner
    with pytest.raises(xj.InputError, match="is_causal must be true or false, got None"):
        from_hf(not_causal("llama3-new") | dict(is_causal=None))


def test_both_settings_of_gemma():
    """Its own one halves the window, and `is_causal` adds the token that the window itself does not count."""
    hf = cases.CASES["gemma3-bidirectional"].hf | dict(sliding_window=8)
    for settings, reach in ((dict(), 4), (dict(is_causal=False), 5)):
        mixers = [layer.attention for layer in from_hf(hf | settings).layers if layer.attention.window]
        assert mixers and all((mixer.window, mixer.ahead) == (2 * reach + 1, reach) for mixer in mixers)
    of_window = dict(use_bidirectional_attention=False, is_causal=False)
    assert {x.attention.ahead for x in from_hf(hf | of_window).layers if x.attention.window} == {8}


def test_what_needs_causal_attention_says_so():
    config = from_hf(tiny.CONFIG | dict(is_causal=False))
    params = random_params(config)
    calls = {
        "generation is": lambda: xj.generate(params, config, [[3, 4]]),
        "score is": lambda: xj.score(params, config, np.array([[3, 4]])),
        "a KV cache is": lambda: xj.init_cache(config, 1, 8),
    }
    for what, call in calls.items():
        with pytest.raises(xj.InputError, match=f"{what} not supported.*attention to later tokens"):
            call()


@pytest.mark.full
@pytest.mark.parametrize("name", LIVE)
def test_logits_are_those_of_transformers(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    hf = not_causal(name)
    config = from_hf(hf)
    tensors = cases.random_tensors(config, 5)
    ids = cases.prompts(CAUSAL[name])[1]
    (logits_BTV, _) = xj.forward(cases.params_from(config, tensors), config, np.array([ids]))
    wanted_TV = cases.hf_logits(cases.hf_model(hf, tensors), ids)
    np.testing.assert_allclose(logits_BTV[0], wanted_TV, rtol=0, atol=1e-4)
