"""Attention weights against transformers', where torch is installed; sums, windows, gradients, mistakes."""

import jax
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except
from small_models import build, prompts

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.errors import InputError
from xinfer_jax.weights.layers import linear, norm_before

pytestmark = pytest.mark.oldest

NAMES = (
    "qwen2-gqa-tied-old", "qwen3-head-dim-tied", "mistral-window", "olmo2-bias-new", "gemma2-long-caps",
    "gemma3-two-ropes-new", "gpt-oss-published", "phi3-defaults", "granite-bias-llama3-new", "gemma4-experts",
)  # fmt: skip


@pytest.mark.parametrize("name", full_except((), NAMES, soak=NAMES[1:4]))
def test_they_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    case = cases.CASES[name]
    config = case.config
    tensors = cases.random_tensors(config, 1)
    model = cases.hf_model(case.hf, tensors)
    params = cases.params_from(config, tensors)
    ids = np.random.RandomState(0).randint(3, config.vocab_size, (2, 19))
    layers = [0, config.num_hidden_layers - 1]
    with torch.no_grad():
        want = model(torch.tensor(ids), use_cache=False, output_attentions=True).attentions
    got = xj.attention_weights(params, config, ids, layers)
    for layer in layers:
        np.testing.assert_allclose(got[layer], want[layer].numpy()[..., :19], atol=2e-5)


@pytest.mark.full
def test_rows_sum_to_one():
    """Of a text with padding; chosen heads; a window; and a gradient."""
    params, config = build("windows-nope-untied")
    tokens_BT = np.array(prompts(12, 12))
    every = xj.attention_weights(params, config, tokens_BT, [1], num_tokens_B=np.array([12, 7]))[1]
    assert every.shape == (2, 4, 12, 12)
    np.testing.assert_allclose(every[0].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(every[1, :, :7].sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(every, np.tril(every) - np.tril(every, -7))
    alone = xj.attention_weights(params, config, tokens_BT[1:, :7], [1], heads=[3, 0])[1]
    np.testing.assert_allclose(alone[0], every[1, np.array([3, 0]), :7, :7], rtol=1e-4, atol=1e-6)
    loss = lambda params: xj.attention_weights(params, config, tokens_BT, [1])[1][:, 0, 5, 2].sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(params)
    assert np.abs(gradient["layers"][1]["k"]["weight"]).max() > 0


SIMPLE = "seed-oss-out-bias-tied"


@pytest.mark.parametrize("name", full_except([SIMPLE], ["qwen2-window-late-layers", SIMPLE, "qwen3-5-tied"]))
def test_weighted_values_are_what_attention_adds(name):
    """To the residual stream, where the layer's MLP adds nothing: with biases, windows, and gates."""
    config = cases.CASES[name].config
    params = cases.params_from(config, cases.random_tensors(config, 1))
    tokens_BT = np.random.RandomState(0).randint(3, config.vocab_size, (2, 11))
    i = max(i for i in range(config.num_hidden_layers) if config.layers[i].attention)
    layer = params["layers"][i]
    layer = layer | dict(down=jax.tree.map(np.zeros_like, layer["down"]))
    params = params | dict(layers=(*params["layers"][:i], layer, *params["layers"][i + 1 :]))
    taps = {i - 1: xj.Tap(read=True), i: xj.Tap(read=True)}
    reads = xj.run_model(params, config, tokens_BT, taps=taps).reads
    (mixer,) = config.mixers(i)
    before = norm_before(layer, "attn_norm", config)
    (_, _, v_BTKH), gate_BTI = mixer.project(layer, reads[i - 1], before, RunConfig("xla"))
    weights_BNTT = xj.attention_weights(params, config, tokens_BT, [i])[i]
    groups = weights_BNTT.shape[1] // v_BTKH.shape[2]
    summed_BTNH = np.einsum("bnts,bsnh->btnh", weights_BNTT, np.repeat(v_BTKH, groups, 2))
    out_BTI = summed_BTNH.reshape(2, 11, -1)
    if gate_BTI is not None:
        out_BTI = out_BTI * jax.nn.sigmoid(gate_BTI)
    added_BTD = linear(out_BTI, layer["o"])
    assert np.abs(added_BTD).max() > 0.1
    np.testing.assert_allclose(added_BTD, reads[i] - reads[i - 1], atol=2e-5 * np.abs(reads[i]).max())


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [
        ([2], None, "layers: layer must be a whole number from 0 to 1, got 2"),
        (1, None, "layers and heads must be lists"),
        ([0], [4], "heads: head must be a whole number from 0 to 3, got 4"),
        ([0], 1, "layers and heads must be lists"),
    ],
)
def test_mistakes_are_named(layers, heads, message):
    params, config = build("qwen2")
    with pytest.raises(InputError, match=message):
        xj.attention_weights(params, config, np.array(prompts(5)), layers, heads)
