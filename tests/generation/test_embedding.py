"""`embed_texts`: vectors pooled from hidden states."""

import dataclasses

import compiling
import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.embedding import TextEncoder

pytestmark = pytest.mark.oldest

TEXTS = ("Hello", "What is the capital of France?", "a", "The capital of Spain is Madrid. " * 6)


@pytest.fixture(scope="module")
def model():
    return tiny.shallow_model(1, dtype="float32")


def test_embeddings_are_pooled_hidden_states(model):
    (plain_ND, unit_ND) = (xj.embed_texts(model, TEXTS, pooling="mean", normalize=x) for x in (False, True))
    assert plain_ND.dtype == np.float32 and plain_ND.shape == (len(TEXTS), model.config.hidden_size)
    np.testing.assert_allclose(unit_ND, plain_ND / np.linalg.norm(plain_ND, axis=1, keepdims=True), atol=1e-5)
    hidden_states = jax.jit(xj.hidden_states, static_argnums=1)
    for got_D, text in zip(plain_ND, TEXTS, strict=True):
        ids = model.tokenizer.encode(text)
        tokens_BT = np.array([ids + [0] * (64 - len(ids))])  # one program for all lengths
        hidden_TD = np.asarray(hidden_states(model.params, model.config, tokens_BT)[0][0])[: len(ids)]
        np.testing.assert_allclose(got_D, hidden_TD.mean(0), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "loaded, bound",
    [
        (dict(dtype="float32"), 1e-5),
        (dict(quantize="int8"), 1e-4),
        (dict(quantize="int4"), 1e-4),
    ],
)
def test_a_vector_does_not_depend_on_other_texts(loaded, bound):
    model = tiny.shallow_model(1, **loaded)
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    together_ND = xj.embed_texts(model, [*TEXTS, *ids])
    np.testing.assert_allclose(np.linalg.norm(together_ND, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(together_ND[: len(TEXTS)], together_ND[len(TEXTS) :], atol=bound)
    for text, together_D in zip(TEXTS, together_ND, strict=False):
        np.testing.assert_allclose(xj.embed_texts(model, [text])[0], together_D, atol=bound)


@pytest.mark.full
def test_embeddings_over_a_mesh_with_one_program(model):
    mesh = jax.make_mesh((1,), ("model",))
    params = jax.device_put(model.params, xj.params.shardings(model.config, mesh))
    over = dataclasses.replace(model, params=params)
    np.testing.assert_allclose(xj.embed_texts(over, TEXTS), xj.embed_texts(model, TEXTS), atol=1e-5)


@pytest.mark.full
def test_many_texts_are_several_batches_and_compile_nothing_within_a_bucket(model):
    ids = np.random.RandomState(0).randint(0, 200, (300, 9))
    first_ND = xj.embed_texts(model, [row[: 3 + i % 7] for i, row in enumerate(ids)])
    with compiling.programs() as seen:
        again_ND = xj.embed_texts(model, [row[: 3 + i % 7] for i, row in enumerate(ids[:299])])
        fewer_ND = xj.embed_texts(model, ids[:170])
    assert not seen
    np.testing.assert_allclose(again_ND, first_ND[:299], atol=1e-5)
    np.testing.assert_allclose(fewer_ND[6], first_ND[6], atol=1e-5)


@pytest.mark.parametrize(
    "texts, more, named",
    [
        ("Hello", {}, r"texts must be a list .* got 'Hello': give \[text\]"),
        ([], {}, "no texts: give at least one"),
        ([1, 2, 3], {}, "text 0 must be a text or a list of token ids, got 1"),
        (["Hello", ""], {}, "text 1 has no tokens"),
        (["Hello", []], {}, "text 1 has no tokens"),
        (["Hello", [1, 10**6]], {}, "text 1 holds token id 1000000"),
        (["Hello", [1] * 3000], {}, "text 1 has 3000 tokens, which exceeds the context limit"),
        (["a" * 10**6], {}, "text 0 has at least .* tokens .*, which exceeds"),
        (["Hello"], dict(pooling="cls"), "pooling must be one of mean, last, first, got 'cls'"),
        (["Hello"], dict(normalize=1), "normalize must be True or False, got 1"),
    ],
)
def test_bad_arguments_of_embed_texts_raise(model, texts, more, named):
    with pytest.raises(xj.InputError, match=named):
        xj.embed_texts(model, texts, **more)


def test_a_text_that_spells_an_image_is_rejected(model):
    config = dataclasses.replace(model.config, placeholder_ids={1917: "image_token_id"})
    with_images = dataclasses.replace(model, config=config)
    with pytest.raises(xj.InputError, match="text 1.* image_token_id in config.json"):
        xj.embed_texts(with_images, ["a", "<|endoftext|>"])
    assert len(TextEncoder(with_images, "query: ").encode("a text", "<|endoftext|>")) > 5
    with pytest.raises(xj.InputError, match="prompt must be a text, got 3"):
        xj.embed_texts(model, ["a"], prompt=3)


def test_text_needs_a_tokenizer_and_ids_do_not(model):
    without = dataclasses.replace(model, tokenizer=None)
    assert xj.embed_texts(without, [[1, 2, 3]]).shape == (1, model.config.hidden_size)
    with pytest.raises(xj.InputError, match="text 0: this checkpoint has no tokenizer.json"):
        xj.embed_texts(without, ["Hello"])


@pytest.mark.full
def test_hidden_states_that_are_not_finite_raise(model):
    weight = np.array(model.params["embed"]["weight"])
    weight[7] = np.nan
    broken = dataclasses.replace(model, params=model.params | {"embed": {"weight": weight}})
    assert np.isfinite(xj.embed_texts(broken, [[1, 2]])).all()
    with pytest.raises(xj.InputError, match="text 1: its hidden states are not finite: the weights"):
        xj.embed_texts(broken, [[1, 2], [1, 7]])
