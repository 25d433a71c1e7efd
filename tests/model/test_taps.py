"""Taps: what they read against a layer after the other, edits and their gradients, mistakes."""

import dataclasses
import re

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import build, prompts

import xinfer_jax as xj
from xinfer_jax.errors import InputError

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def model():
    params, config = build("qwen2")
    return params, config, np.array(prompts(7, 7))


def add(hidden_BTD, vector_D):
    return hidden_BTD + vector_D


def test_reads_are_the_residual_stream(model):
    """The embeddings. Each layer's output, from which the rest of the model gives the same hidden states."""
    params, config, tokens_BT = model
    taps = {layer: xj.Tap(read=True) for layer in (-1, 0, 1)}
    hidden_BTD, _, _, reads = xj.run_model(params, config, tokens_BT, taps=taps)
    np.testing.assert_array_equal(hidden_BTD, xj.hidden_states(params, config, tokens_BT)[0])
    assert [*reads] == [-1, 0, 1]
    np.testing.assert_allclose(reads[-1], xj.embed_tokens(params, config, tokens_BT), rtol=1e-6)
    normed = reads[1] / jnp.sqrt(jnp.mean(reads[1] ** 2, -1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(normed * params["final_norm"], hidden_BTD, rtol=1e-5, atol=1e-5)
    last = {0: xj.Tap(read=True, edit=lambda x, given: given, args=reads[0] * 0 + 1)}
    changed_BTD, _, _, after = xj.run_model(params, config, tokens_BT, taps=last)
    np.testing.assert_array_equal(after[0], np.ones_like(reads[0]))
    assert not np.allclose(changed_BTD, hidden_BTD)
    patched = {0: xj.Tap(reads[0], lambda x, given: given)}
    other_BT = tokens_BT[::-1].copy()
    np.testing.assert_allclose(
        xj.hidden_states(params, config, other_BT, taps=patched)[0], hidden_BTD, rtol=1e-5, atol=1e-5
    )


@pytest.mark.full
def test_reads_after_attention(model):
    """The layer's MLP of what is read, in NumPy, gives the layer's output; with edits too."""
    params, config, tokens_BT = model
    vector_D = np.random.RandomState(0).standard_normal(config.hidden_size).astype(np.float32)
    taps = {(layer, after): xj.Tap(read=True) for layer in (0, 1) for after in ("attention", "layer")}
    taps[0, "attention"] = xj.Tap(vector_D, add, read=True)
    hidden_BTD, _, _, reads = xj.run_model(params, config, tokens_BT, taps=taps)
    assert [*reads] == [(0, "attention"), (0, "layer"), (1, "attention"), (1, "layer")]
    for layer in (0, 1):
        x_BTD = np.asarray(reads[layer, "attention"])
        matrices = params["layers"][layer]
        gate, up, down = (np.asarray(matrices[name]["weight"]) for name in ("gate", "up", "down"))
        normed_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        normed_BTD = normed_BTD * np.asarray(matrices["mlp_norm"])
        gated = normed_BTD @ gate.T
        want = x_BTD + (gated / (1 + np.exp(-gated)) * (normed_BTD @ up.T)) @ down.T
        np.testing.assert_allclose(reads[layer, "layer"], want, rtol=1e-4, atol=1e-4)
    plain = {(0, "attention"): xj.Tap(read=True)}
    same_BTD, _, _, before = xj.run_model(params, config, tokens_BT, taps=plain)
    np.testing.assert_allclose(before[0, "attention"] + vector_D, reads[0, "attention"], rtol=1e-6)
    np.testing.assert_allclose(same_BTD, xj.hidden_states(params, config, tokens_BT)[0], rtol=1e-5, atol=1e-5)
    assert not np.allclose(same_BTD, hidden_BTD)


def test_an_identity_is_no_other_program(model):
    params, config, tokens_BT = model

    def text(taps):
        lowered = jax.jit(lambda params: xj.forward(params, config, tokens_BT, taps=taps)[0]).lower(params)
        return re.sub("loc.*", "", lowered.as_text())

    assert text({-1: xj.Tap(), 1: xj.Tap(edit=lambda x, _: x)}) == text(None)


def test_gradients_of_a_steering_vector(model):
    """The gradient of a loss through the layers after the tap, which are computed again, equals finite
    differences. vmap runs over vectors.
    """
    params, config, tokens_BT = model

    def loss(vector_D):
        taps = {(1, "attention"): xj.Tap(vector_D, add)}
        logits_BTV, _ = xj.forward(params, config, tokens_BT, taps=taps, remat="layer")
        return jax.nn.log_softmax(logits_BTV)[:, -1, 5].mean()

    loss = jax.jit(loss)
    vector_D = jnp.array(np.random.RandomState(0).standard_normal(config.hidden_size), np.float32)
    direction_D = np.random.RandomState(1).standard_normal(config.hidden_size).astype(np.float32)
    slope = float(jax.grad(loss)(vector_D) @ direction_D)
    step = 1e-2
    numeric = float(loss(vector_D + step * direction_D) - loss(vector_D - step * direction_D)) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=2e-2)
    many = jnp.stack([vector_D, 2 * vector_D])
    np.testing.assert_allclose(jax.vmap(loss)(many), [loss(v) for v in many], rtol=1e-5)


@pytest.mark.full
def test_taps_with_a_cache_and_packing(model):
    """The reads of a token after the others equal the reads of the whole text."""
    params, config, tokens_BT = model
    keys = (0, "attention"), (0, "layer")
    taps = {key: xj.Tap(jnp.ones(config.hidden_size), add, read=True) for key in keys}
    whole = xj.run_model(params, config, tokens_BT, taps=taps).reads
    cache = xj.init_cache(config, 2, 16)
    _, cache, _, first = xj.run_model(params, config, tokens_BT[:, :4], cache, taps=taps)
    rest = xj.run_model(params, config, tokens_BT[:, 4:], cache, taps=taps).reads
    packed_BT = tokens_BT.reshape(1, -1)
    segment_ids_BT = np.repeat([[0, 1]], 7, 1)
    packed = xj.run_model(params, config, packed_BT, segment_ids_BT=segment_ids_BT, taps=taps).reads
    for key in keys:
        got = np.concatenate([first[key], rest[key]], 1)
        np.testing.assert_allclose(got, whole[key], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(packed[key].reshape(got.shape), whole[key], rtol=1e-4, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Unhashable:
    array: object = dataclasses.field(default_factory=lambda: np.ones(2))

    def __call__(self, x, _):
        return x + self.array.sum()


def half(x, _):
    return x[:, :, ::2]


def no_array(x, _):
    return None


def in_python(x, _):
    return x if x.sum() > 0 else -x


LAYERS = r"taps: layer \(-1: the embeddings\) must be a whole number from -1 to 1, got "
MISTAKES = [
    ({2: xj.Tap()}, LAYERS + "2"),
    ({"0": xj.Tap()}, LAYERS + "'0'"),
    ({True: xj.Tap()}, LAYERS + "True"),
    ({0: add}, "taps must be xj.Tap by layer"),
    ([xj.Tap()], "taps must be xj.Tap by layer"),
    ({-1: xj.Tap(), (0, "layer"): xj.Tap()}, r'must be of one kind: in taps write 3 as \(3, "layer"\)'),
    ({(-1, "attention"): xj.Tap()}, "must be a whole number from 0 to 1, got -1"),
    ({(0, "mlp"): xj.Tap()}, r"a key is a layer, .*, got \(0, 'mlp'\)"),
    ({0: xj.Tap(edit=half)}, r"edit half after layer 0 returned float32\[2, 7, 24\], expected float"),
    ({0: xj.Tap(edit=no_array)}, "edit no_array after layer 0 returned no array, expected"),
    ({0: xj.Tap(add)}, "a Tap has args without edit, which takes them: <function add"),
]


@pytest.mark.parametrize(("taps", "message"), MISTAKES)
def test_mistakes_are_named(model, taps, message):
    with pytest.raises(InputError, match=message):
        xj.forward(*model, taps=taps)


def test_taps_that_read_need_run_model(model):
    """A number as argument has the type of the hidden states, whatever their dtype is."""
    params, config, tokens_BT = model
    for call in (xj.forward, xj.hidden_states):
        message = f"{call.__name__} returns no hidden states that taps read: use run_model"
        with pytest.raises(InputError, match=message):
            call(*model, taps={0: xj.Tap(read=True)})
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    taps = {0: xj.Tap(2.0, lambda x, factor: x * factor)}
    hidden_BTD, _ = xj.hidden_states(half, config, tokens_BT, taps=taps)
    out = xj.run_model(half, config, tokens_BT, taps=taps)
    np.testing.assert_array_equal(hidden_BTD, out.hidden)
    assert out.reads == {} and out.routed_experts is None and out.cache is None


def test_taps_of_score(model):
    """An edit changes log-probabilities as it does those of `forward`. None reads."""
    params, config, tokens_BT = model
    taps = {0: xj.Tap(jnp.ones(config.hidden_size), add)}
    logits_BTV, _ = xj.forward(params, config, tokens_BT, taps=taps)
    want = jax.nn.log_softmax(logits_BTV)[np.arange(2)[:, None], np.arange(6), tokens_BT[:, 1:]]
    np.testing.assert_allclose(
        xj.score(params, config, tokens_BT, taps=taps).logprobs_BT, want, rtol=1e-5, atol=1e-5
    )
    gradient = jax.jit(
        jax.grad(lambda taps: xj.score(params, config, tokens_BT, taps=taps).logprobs_BT.sum())
    )(taps)
    assert np.abs(gradient[0].args).max() > 0
    with pytest.raises(InputError, match="score returns no hidden states that taps read: use run_model"):
        xj.score(params, config, tokens_BT, taps={0: xj.Tap(read=True)})
    with pytest.raises(InputError, match="taps must be xj.Tap by layer"):
        xj.score(params, config, tokens_BT, taps=[add])


@pytest.mark.full
def test_taps_of_prefill_and_the_loop(model):
    """Greedy tokens of a steered model are those of `forward` with the tap."""
    params, config, tokens_BT = model
    direction_D = jnp.array(np.random.RandomState(0).standard_normal(config.hidden_size) * 3, np.float32)
    B, T = tokens_BT.shape

    @jax.jit
    def steered(vector_D):
        taps = {0: xj.Tap(vector_D, add)}
        cache = xj.init_cache(config, B, 32)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, np.full(B, T), cache, taps=taps)
        how = jax.random.key(0), xj.SamplingConfig(), np.array([], int), 6
        return xj.decode_loop(params, config, logits_BV, cache, *how, taps=taps)

    got = steered(direction_D)
    text_BT = np.concatenate([tokens_BT, got.tokens_BT], 1)
    forward = jax.jit(lambda taps: xj.forward(params, config, text_BT, taps=taps)[0])
    logits_BTV = forward({0: xj.Tap(direction_D, add)})
    np.testing.assert_array_equal(logits_BTV[:, T - 1 : -1].argmax(-1), got.tokens_BT)
    plain = steered(0 * direction_D)
    assert not np.array_equal(plain.tokens_BT, got.tokens_BT)
    each = jax.vmap(lambda vector_D: steered(vector_D).tokens_BT)(jnp.stack([direction_D, 0 * direction_D]))
    np.testing.assert_array_equal(each, [got.tokens_BT, plain.tokens_BT])
    cache = xj.init_cache(config, B, 32)
    with pytest.raises(InputError, match="prefill returns no hidden states that taps read: use run_model"):
        xj.prefill(params, config, tokens_BT, np.full(B, T), cache, taps={0: xj.Tap(read=True)})


@pytest.mark.full
def test_taps_of_generate_and_streams(model):
    """Tokens are those of `decode_loop`. Other arguments compile nothing. An identity changes nothing. What
    does not combine is rejected by name.
    """
    params, config, tokens_BT = model
    direction_D = np.random.RandomState(0).standard_normal(config.hidden_size).astype(np.float32) * 3
    prompts = [tokens_BT[0].tolist(), tokens_BT[1, :4].tolist()]
    B, T = tokens_BT.shape

    def run(edit, vector_D, call=xj.generate, new=6, **how):
        taps = {(0, "attention"): xj.Tap(vector_D, edit), (0, "layer"): xj.Tap(), (1, "layer"): xj.Tap()}
        options = xj.GenerateOptions(max_tokens=new, eos_token_ids=(), **dict(taps=taps) | how)
        return call(params, config, prompts, options)

    got = run(add, direction_D)
    taps = {(0, "attention"): xj.Tap(direction_D, add)}
    cache = xj.init_cache(config, B, 32)
    logits_BV, cache = xj.prefill(params, config, tokens_BT, np.array([T, 4]), cache, taps=taps)
    how = jax.random.key(0), xj.SamplingConfig(), np.array([], int), 6
    want = xj.decode_loop(params, config, logits_BV, cache, *how, taps=taps)
    np.testing.assert_array_equal(got.tokens, want.tokens_BT)
    np.testing.assert_allclose(got.logprobs, want.logprobs_BT, rtol=1e-5, atol=1e-5)
    assert [list(ids) for ids in run(add, direction_D, xj.stream)] == np.transpose(got.tokens).tolist()
    with compiling.programs() as seen:
        plain = run(add, 0 * direction_D)
    assert not seen
    none = run(add, direction_D, taps=None)
    assert plain.tokens == none.tokens != got.tokens
    kept = run(add, direction_D, taps=None, keep_prefix=True).prefix
    for how, message in (
        (dict(prefix=kept), "taps do not combine with prefix: leave out prefix or taps"),
        (dict(keep_prefix=True), "taps do not combine with keep_prefix"),
        (dict(taps={0: xj.Tap(read=True)}), "generate returns no hidden states that taps"),
        (dict(taps={5: xj.Tap()}), LAYERS + "5"),
    ):
        with pytest.raises(InputError, match=message):
            run(add, direction_D, **how)
    with pytest.raises(InputError, match="edit half after layer .0, 'attention'. returned"):
        run(half, None)
    with pytest.raises(InputError, match="edit in_python cannot be traced: Attempted boolean conversion of"):
        run(in_python, None)
    with pytest.raises(InputError, match="row 0, step 0: .* is nan: an edit of taps .*; or the weights"):
        run(add, direction_D * np.nan)
    kept_tracers = []

    def keeps_a_tracer(hidden_BTD, args):
        jax.eval_shape(kept_tracers.append, hidden_BTD)
        return hidden_BTD + kept_tracers[-1]

    with pytest.raises(
        InputError, match="keeps_a_tracer: a function of yours uses a traced value of another"
    ):
        run(keeps_a_tracer, direction_D)


@pytest.mark.parametrize("how", [dict(edit=3), dict(edit=Unhashable()), dict(read="no")], ids=str)
def test_a_tap_has_a_function(how):
    ((name, _),) = how.items()
    with pytest.raises(InputError, match=f"{name} of a Tap must be "):
        xj.Tap(**how)


def test_stacked_layers_have_no_taps(model):
    params, config, tokens_BT = model
    stacked = xj.params.stack_layers(params, config)
    with pytest.raises(InputError, match="taps need layers that are not stacked"):
        xj.run_model(stacked, config, tokens_BT, taps={0: xj.Tap(read=True)})
