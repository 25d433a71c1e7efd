"""Tests of the parts that training adds to the forward pass: layers computed again, stacked layers, packed
texts, gradients of experts by tiles. Each equals the plain way, gradients included.
"""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except
from random_matrices import random_params
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.backends import expert_tiles

pytestmark = pytest.mark.oldest  # and on the newest with routes: test_routes.py

NAMES = ("qwen2-gqa-tied-old", "gpt-oss-published", "qwen3-next-sparse-step", "gemma4-shared-kv")
CHANGES = {  # two layers of one kind, the second of Gemma 4 with the keys of the first
    NAMES[0]: dict(num_hidden_layers=2),
    NAMES[1]: dict(num_hidden_layers=2, layer_types=["full_attention"] * 2),
    NAMES[2]: dict(num_hidden_layers=2, full_attention_interval=3, decoder_sparse_step=1, mlp_only_layers=[]),
    NAMES[3]: dict(num_hidden_layers=2, num_kv_shared_layers=1, layer_types=["full_attention"] * 2),
}
TEXTS = ([5, 9, 2, 7, 7, 3, 1], [8, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2])


def config_of(name, **changes):
    return cases.Case(cases.CASES[name].hf | CHANGES.get(name, {}) | changes).config


def loss(params, config, tokens_BT, num_tokens_B=None, **how):
    return xj.score(params, config, tokens_BT, num_tokens_B, **how).logprobs_BT.sum()


gradient = jax.jit(jax.grad(loss), static_argnums=1, static_argnames="remat")
score = jax.jit(xj.score, static_argnums=1)


@pytest.fixture(
    scope="module", params=full_except(NAMES[:1], NAMES, soak=NAMES[1:2])
)  # on the newest test_routes.py has it
def model(request):
    """Parameters, config and the plain gradient of the score of all texts."""
    config = config_of(request.param)
    params = cases.params_from(config, cases.random_tensors(config, 3))
    return params, config, gradient(params, config, *padded())


def assert_close(got, want, bound=1e-5):
    """Compares to a part of each array's largest number. If the array is one number, a sum of many that
    cancel, it compares to a part of 1.
    """
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        least = 1.0 if y.size == 1 else 0.1
        np.testing.assert_allclose(x, y, atol=bound * max(least, float(np.max(np.abs(y)))), rtol=0)


def padded():
    return cases.pad_prompts(TEXTS)


def packed():
    """All texts in one row, with padding after them."""
    tokens = np.array([[*sum(TEXTS, []), 0, 0, 0]], np.int32)
    ids = [i for i, text in enumerate(TEXTS) for _ in text]
    return tokens, np.array([[*ids, 9, 9, 9]], np.int32)


@pytest.mark.full  # stacked layers are computed again in the quick set
def test_layers_computed_again_give_equal_gradients(model):
    params, config, want = model
    assert_close(gradient(params, config, *padded(), remat="layer"), want)


def test_a_policy_stores_the_parts_of_a_layer_that_it_names():
    """A policy without a name stores nothing, as "layer" does. Fewer products are computed again if a part is
    stored.
    """
    config = config_of(NAMES[0])
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0)))

    def products_of(remat) -> int:
        return gradient.lower(params, config, *padded(), remat=remat).as_text().count("dot_general")

    def stored(*names: str) -> int:
        return products_of(jax.checkpoint_policies.save_only_these_names(*names))

    parts = ("qkv", "attention_out", "gate_up")
    products = [stored(part) for part in ("", *parts)]
    assert products[0] == products_of("layer") > products_of(None)
    assert all(fewer < products[0] for fewer in products[1:]) and stored(*parts) < min(products)


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_of_every_layer_have_names(name):
    config = config_of(name)
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0)))
    program = str(jax.make_jaxpr(xj.forward, static_argnums=1)(params, config, padded()[0]))
    assert program.count("name=attention_out") == program.count("name=mlp_out") >= 1


def test_packed_texts_are_the_texts_alone(model):
    params, config, want = model
    (tokens_BT, num_tokens_B), (row_1T, ids_1T) = padded(), packed()
    alone_BT = score(params, config, tokens_BT, num_tokens_B).logprobs_BT
    together_1T = score(params, config, row_1T, segment_ids_BT=ids_1T).logprobs_BT
    at = 0
    for text, alone_T in zip(TEXTS, alone_BT, strict=True):
        np.testing.assert_allclose(
            together_1T[0, at : at + len(text) - 1], alone_T[: len(text) - 1], atol=1e-5
        )
        at += len(text)
        assert together_1T[0, at - 1] == 0  # what follows is another text's
    size = np.int32([sum(map(len, TEXTS))])
    got = gradient(params, config, row_1T, size, segment_ids_BT=ids_1T)
    assert_close(got, want, 1e-4)  # sums over tokens in another order; 4.5e-5 with jax 0.12


@pytest.mark.full
def test_packed_queries_are_scaled_by_positions_in_their_texts():
    """The model is Ministral 3, which scales its queries."""
    config = cases.Case(cases.CASES["ministral3-published"].hf | dict(num_hidden_layers=1)).config
    texts = TEXTS[2] * 2, TEXTS[0] * 3
    beta, length = config.layers[0].attention.query_scaling
    assert beta and length < len(texts[1])
    params = cases.params_from(config, cases.random_tensors(config, 3))
    ids_1T = np.repeat(np.arange(2), [*map(len, texts)])[None]
    alone_BT = score(params, config, *cases.pad_prompts(texts)).logprobs_BT
    together_1T = score(
        params, config, np.array([sum(texts, [])], np.int32), segment_ids_BT=ids_1T
    ).logprobs_BT
    size = len(texts[1]) - 1
    np.testing.assert_allclose(together_1T[0, -size:], alone_BT[1, :size], atol=1e-5)


@pytest.mark.full
def test_packed_texts_over_many_blocks():
    """Longer than blocks of queries and keys, and than those of the delta rule; with a window."""
    for name, layers in (
        ("qwen2-window-layer-types", ["sliding_attention"]),
        (NAMES[2], ["linear_attention"]),
    ):
        changes = dict(num_hidden_layers=1, layer_types=layers)
        config = cases.Case(cases.CASES[name].hf | changes).config
        params = cases.params_from(config, cases.random_tensors(config, 3))
        sizes = (300, 1, 450, 300)  # few lengths: few programs
        row_1T = np.random.default_rng(0).integers(0, config.vocab_size, (1, sum(sizes)), np.int32)
        ids_1T = np.repeat(np.arange(4), sizes)[None].astype(np.int32)
        hidden = jax.jit(xj.hidden_states, static_argnums=1)
        together_1TD, _ = hidden(params, config, row_1T, segment_ids_BT=ids_1T)
        for text in range(4):
            here = ids_1T[0] == text
            alone_1TD, _ = hidden(params, config, row_1T[:, here])
            np.testing.assert_allclose(together_1TD[:, here], alone_1TD, atol=5e-5)


def test_stacked_layers(model):
    params, config, want = model
    tokens_BT, num_tokens_B = padded()
    stacked = xj.params.stack_layers(params, config)
    if config.shares_kv:
        with pytest.raises(xj.InputError, match="another layer's keys cannot be stacked"):
            loss(stacked, config, tokens_BT)
        return
    want = xj.params.stack_layers(want, config)
    assert_close(gradient(stacked, config, tokens_BT, num_tokens_B, remat="layer"), want)
    in_a_list = params | dict(layers=[*params["layers"]])  # as some libraries restore tuples
    np.testing.assert_array_equal(loss(in_a_list, config, tokens_BT), loss(params, config, tokens_BT))
    with pytest.raises(xj.InputError, match="takes what unstack_layers returns"):
        xj.prefill(stacked, config, tokens_BT, num_tokens_B, xj.init_cache(config, len(TEXTS), 32))


@pytest.mark.full
@pytest.mark.parametrize(
    "name, kinds", [("moe-defaults", {}), (NAMES[1], dict(layer_types=["full_attention"]))]
)
def test_gradients_of_experts_by_tiles(name, kinds):
    """Tiles may have rows after their expert's last choice, and experts may have biases."""
    config = config_of(name, num_hidden_layers=1, **kinds)
    params = cases.params_from(config, cases.random_tensors(config, 3))
    tokens_BT, num_tokens_B = padded()
    results = []
    for is_tiled in (False, True):
        with (
            mock.patch.object(expert_tiles, "is_tiled", lambda *_, value=is_tiled: value),
            mock.patch.object(expert_tiles, "_rows", lambda *_: 4),
        ):
            jax.clear_caches()
            results.append(jax.jit(jax.grad(loss), static_argnums=1)(params, config, tokens_BT, num_tokens_B))
    jax.clear_caches()
    assert_close(*results)


def test_entropy_and_divergences_without_all_logits(model):
    params, config, _ = model
    tokens_BT, num_tokens_B = padded()
    other = jax.tree.map(lambda x: x * 1.1, params)
    forward = jax.jit(xj.forward, static_argnums=1)
    logits = [forward(x, config, tokens_BT, None, num_tokens_B)[0][:, :-1] for x in (params, other)]
    p, q = (jax.nn.log_softmax(x / 0.7) for x in logits)
    best_BTk, ids_BTk = jax.lax.top_k(q, 3)
    more_BTk = jnp.pad(best_BTk, [(0, 0), (0, 0), (0, 1)], constant_values=-jnp.inf)
    teacher = jnp.pad(ids_BTk, [(0, 0), (0, 0), (0, 1)]), more_BTk  # the last one counts nothing
    how = dict(temperature=0.7, entropy=True, chunk=2)
    of_all = jax.jit(
        lambda params, **trees: xj.score(params, config, tokens_BT, num_tokens_B, **how, **trees)
    )
    got = of_all(params, reference=other, teacher_topk=teacher)
    real_BT = np.arange(1, tokens_BT.shape[1]) < num_tokens_B[:, None]
    want = xj.types.Scores(
        jnp.take_along_axis(p, tokens_BT[:, 1:, None], -1)[..., 0],
        -(jnp.exp(p) * p).sum(-1),
        (jnp.exp(p) * (p - q)).sum(-1),
        (jnp.exp(best_BTk) * (best_BTk - jnp.take_along_axis(p, ids_BTk, -1))).sum(-1),
    )
    for x_BT, y_BT in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x_BT, np.where(real_BT, y_BT, 0), atol=2e-5)


def test_a_loss_of_ones_own_by_parts():
    config = config_of(NAMES[0], num_hidden_layers=1)
    params = cases.params_from(config, cases.random_tensors(config, 3))
    tokens_BT, _ = padded()

    def by_parts(params, chunk):
        hidden_BTD, _ = xj.hidden_states(params, config, tokens_BT)
        best = lambda logits_BCV, tokens_BC: logits_BCV.max(-1) * tokens_BC  # noqa: E731
        return xj.rollouts.map_logits(params, config, hidden_BTD, best, tokens_BT, chunk=chunk).sum()

    whole, parts = (jax.jit(jax.value_and_grad(partial(by_parts, chunk=c)))(params) for c in (None, 3))
    assert_close(parts, whole)


@pytest.mark.full
def test_what_does_not_go_together():
    config = cases.CASES["qwen2-gqa-tied-old"].config
    params = cases.params_from(config, cases.random_tensors(config, 3))
    row_1T, ids_1T = packed()
    for how, message in (
        (dict(segment_ids_BT=ids_1T[:, :-1]), "segment_ids_BT must be an array of integers of the shape"),
        (dict(segment_ids_BT=ids_1T, cache=xj.init_cache(config, 1, 64)), "do not go with a cache"),
        (dict(remat="all"), "remat must be None"),
        (dict(segment_ids_BT=ids_1T, impl="interpret"), "packed segments have no attention kernel"),
    ):
        with pytest.raises(xj.InputError, match=message):
            xj.forward(params, config, row_1T, **how)
    ids_1Tk, zeros_1Tk = np.full((1, row_1T.shape[1] - 1, 2), 1), np.zeros((1, row_1T.shape[1] - 1, 2))
    for how, message in (
        (dict(temperature=np.ones(3)), "temperature must be a number above 0, or one for each of 1 rows"),
        (dict(temperature=0), "temperature must be a number above 0"),
        (dict(temperature=None), "temperature must be a number above 0"),
        (dict(segment_ids_BT=ids_1T.tolist()), "segment_ids_BT must be an array of integers"),
        (dict(positions_BT=ids_1T[:, 1:]), "positions_BT must be an array of integers of the shape"),
        (dict(routed_experts=np.zeros((1, row_1T.shape[1], 1, 2), int)), "this model has none"),
        (dict(teacher_topk=(ids_1Tk, zeros_1Tk[..., :1])), "log-probabilities must be an array of floats"),
        (dict(teacher_topk=(ids_1Tk + 95, zeros_1Tk)), "teacher_topk: token id 96 is outside 0 … 95"),
    ):
        with pytest.raises(xj.InputError, match=message):
            xj.score(params, config, row_1T, **how)


@pytest.mark.full
def test_gradients_through_a_cache():
    """The gradients of a prompt and the tokens after it equal the gradients of one forward pass. Keys fill
    three blocks, and a ring.
    """
    config = xj.ModelConfig.from_hf(
        QWEN | dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)
    )
    params = random_params(config)
    tokens_BT = np.random.default_rng(0).integers(2, config.vocab_size, (2, 60)).astype(np.int32)

    def in_parts(params):
        cache = xj.init_cache(config, 2, 600, "float32")
        first_BV, cache = xj.prefill(params, config, tokens_BT[:, :31], np.int32([31, 31]), cache)
        more_BTV, _ = xj.forward(params, config, tokens_BT[:, 31:], cache)
        return jnp.concatenate([first_BV[:, None], more_BTV], 1)

    def at_once(params):
        return xj.forward(params, config, tokens_BT)[0][:, 30:]

    gradients = [jax.jit(jax.grad(lambda p, f=f: jnp.sin(f(p)).sum()))(params) for f in (in_parts, at_once)]
    assert_close(*gradients, 3e-5)


@pytest.mark.full
def test_loops_that_end_with_their_rows_have_no_gradient():
    config = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "float32"))
    tokens_BT = np.ones((1, 520), np.int32)

    def chunked(params):
        cache = xj.init_cache(config, 1, 1024)
        return xj.prefill(params, config, tokens_BT, np.int32([520]), cache)[0].sum()

    def decoded(params, score):
        cache = xj.init_cache(config, 1, 16)
        logits_BV, cache = xj.prefill(params, config, tokens_BT[:, :5], np.int32([5]), cache)
        keys = jax.random.split(jax.random.key(0), 1)
        out = xj.decode_loop(params, config, logits_BV, cache, keys, xj.SamplingConfig(), [], 3)
        return score(params, config, out.tokens_BT).logprobs_BT.sum() if score else out.logprobs_BT.sum()

    for f, want in (
        (chunked, "prefill in chunks of 512 has no reverse-mode gradient: give forward the cache"),
        (partial(decoded, score=None), "decode_loop has no reverse-mode gradient: compute .* by score"),
    ):
        with pytest.raises(xj.InputError, match=want):
            jax.eval_shape(jax.grad(jax.jit(f)), params)
    jax.eval_shape(jax.grad(partial(decoded, score=xj.score)), params)  # tokens are no function of params


@pytest.mark.full
def test_final_norm_decides_the_dtype_of_activations():
    """A float32 tree that is cast under jit has float32 gradients, near those in float32."""
    config = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1))
    master = random_params(config)
    tokens_BT = np.random.default_rng(0).integers(2, config.vocab_size, (2, 9)).astype(np.int32)

    def cast(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    want, got = (
        jax.jit(jax.grad(lambda p, f=f: xj.score(f(p), config, tokens_BT).logprobs_BT.sum()))(master)
        for f in (lambda params: params, cast)
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == np.float32 and np.linalg.norm(x - y) < 0.05 * np.linalg.norm(y)
    for params, norm in ((cast(master), master), (master, cast(master))):
        mixed = params | dict(final_norm=norm["final_norm"])
        hidden_BTD, _ = jax.eval_shape(lambda p: xj.hidden_states(p, config, tokens_BT), mixed)
        assert hidden_BTD.dtype == mixed["final_norm"].dtype
        assert jax.eval_shape(lambda p: xj.score(p, config, tokens_BT).logprobs_BT, mixed).dtype == np.float32
