"""Attention weights against transformers', where torch is installed. Sums, windows, gradients, mistakes."""

import jax
import numpy as np
import parity_cases as cases
import pytest
from small_models import build, prompts

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.errors import InputError
from xinfer_jax.weights.layers import linear, norm_before

pytestmark = pytest.mark.oldest

# With caps, sinks, a rotated part of each head, a factor on scores; values that are keys.
NAMES = (
    "gemma2-long-caps", "gpt-oss-published", "phi3-partial-attention-factor", "granite-bias-llama3-new",
    "gemma4-experts",
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return build("windows-nope-untied")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
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
    got = jax.jit(lambda params: xj.attention_weights(params, config, ids, layers))(params)
    for layer in layers:
        np.testing.assert_allclose(got[layer], want[layer].numpy()[..., :19], atol=2e-5)


def test_rows_sum_to_one(model):
    """The text has padding. Chosen heads, a window, and a gradient are tested too."""
    params, config = model
    tokens_BT = np.array(prompts(12, 12))
    num_tokens_B = np.array([12, 7])

    def weights(params, tokens_BT, num_tokens_B=None, heads=None):
        return xj.attention_weights(params, config, tokens_BT, [1], heads, num_tokens_B=num_tokens_B)[1]

    def loss(params):
        every = weights(params, tokens_BT, num_tokens_B)
        return every[0, 0, 5, 2], every

    gradient, every = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert np.abs(gradient["layers"][1]["k"]["weight"]).max() > 0
    assert every.shape == (2, 4, 12, 12)
    np.testing.assert_allclose(every[0].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(every[1, :, :7].sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(every, np.tril(every) - np.tril(every, -7))
    alone = jax.jit(weights, static_argnames="heads")(params, tokens_BT[1:, :7], heads=(3, 0))
    np.testing.assert_allclose(alone[0], every[1, np.array([3, 0]), :7, :7], rtol=1e-4, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, changes",
    [
        ("qwen2-window-late-layers", dict(num_hidden_layers=2)),
        ("seed-oss-out-bias-tied", dict(num_hidden_layers=2)),
        ("qwen3-5-tied", dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])),
    ],
)
def test_weighted_values_are_what_attention_adds(name, changes):
    """Attention adds them to the residual stream. The layer's MLP adds nothing, and there are biases,
    windows, and gates.
    """
    config = cases.Case(cases.CASES[name].hf | changes).config
    params = cases.params_from(config, cases.random_tensors(config, 1))
    tokens_BT = np.random.RandomState(0).randint(3, config.vocab_size, (2, 11))
    i = max(i for i in range(config.num_hidden_layers) if config.layers[i].attention)
    layer = params["layers"][i]
    layer = layer | dict(down=jax.tree.map(np.zeros_like, layer["down"]))
    params = params | dict(layers=(*params["layers"][:i], layer, *params["layers"][i + 1 :]))
    taps = {i - 1: xj.Tap(read=True), i: xj.Tap(read=True)}
    reads = jax.jit(lambda params: xj.run_model(params, config, tokens_BT, taps=taps).reads)(params)
    (mixer,) = config.mixers(i)
    before = norm_before(layer, "attn_norm", config)
    (_, _, v_BTKH), gate_BTI = mixer.project(layer, reads[i - 1], before, RunConfig("xla"))
    weights_BNTT = jax.jit(lambda params: xj.attention_weights(params, config, tokens_BT, [i])[i])(params)
    groups = weights_BNTT.shape[1] // v_BTKH.shape[2]
    summed_BTNH = np.einsum("bnts,bsnh->btnh", weights_BNTT, np.repeat(v_BTKH, groups, 2))
    out_BTI = summed_BTNH.reshape(2, 11, -1)
    if gate_BTI is not None:
        out_BTI = out_BTI * jax.nn.sigmoid(gate_BTI)
    added_BTD = linear(out_BTI, layer["o"])
    assert np.abs(added_BTD).max() > 0.1
    np.testing.assert_allclose(added_BTD, reads[i] - reads[i - 1], atol=2e-5 * np.abs(reads[i]).max())


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [
        ([2], None, "layers: layer must be a whole number from 0 to 1, got 2"),
        (1, None, "layers and heads must be lists"),
        ([0], [4], "heads: head must be a whole number from 0 to 3, got 4"),
        ([0], 1, "layers and heads must be lists"),
    ],
)
def test_mistakes_are_named(model, layers, heads, message):
    with pytest.raises(InputError, match=message):
        xj.attention_weights(*model, np.array(prompts(5)), layers, heads)
