"""Keys and values in 8 and 4 bits: what rounding them loses, and that the engine's identities hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xinfer_jax as xj
from xinfer_jax.kv import quantize, widen

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9])


@pytest.fixture(scope="module")
def model():
    return xj.load_model(dtype="float32")


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_errs_by_half_a_step_at_most(bits):
    x = np.random.RandomState(0).standard_normal((2, 3, 5, 16)).astype(np.float32) + 3
    held = quantize(jnp.array(x), bits)
    assert held.shape == x.shape and held.values.nbytes == x.size * bits // 8
    step = (x.max(-1) - x.min(-1)) / (2**bits - 1)
    assert np.all(np.abs(widen(held) - x) <= 0.51 * step[..., None] + 2e-3)  # the offset near 3 has 11 bits
    np.testing.assert_allclose(widen(quantize(jnp.zeros((1, 1, 1, 4)), bits)), 0, atol=1e-3)


@pytest.mark.parametrize("dtype, most, agree", [("int8", 0.27, 0.99), ("int4", 0.15, 0.9)])
def test_bytes_and_agreement_on_what_the_model_knows(model, dtype, most, agree):
    """Top-1, teacher-forced, one token after the other over a conversation of eight turns."""
    messages = []
    for country, city in (("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Japan", "Tokyo")):
        messages += [{"role": "user", "content": f"What is the capital of {country}?"}]
        messages += [{"role": "assistant", "content": f"The capital of {country} is {city}."}]
    ids = jnp.array([model.tokenizer.encode(model.tokenizer.apply_chat_template(messages, add_generation_prompt=False))])
    full = np.asarray(xj.forward(model.params, model.config, ids)[0][0])
    cache = xj.init_cache(model.config, 1, 256, dtype)
    whole = xj.init_cache(model.config, 1, 256, "float32")
    size = [sum(leaf.nbytes for leaf in jax.tree.leaves((c.k, c.v))) for c in (cache, whole)]
    assert size[0] < most * size[1] * (1 + 4 / model.config.head_dim * 4)

    def step(cache, token):
        logits_BV, cache = xj.decode_step(model.params, model.config, token[None], cache)
        return cache, logits_BV[0].argmax()

    chosen = jax.jit(lambda cache, ids: jax.lax.scan(step, cache, ids)[1])(cache, ids[0])
    assert np.mean(np.asarray(chosen) == full.argmax(-1)) >= agree


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_row_of_a_batch_is_the_row_alone_and_streamed(model, dtype):
    keys = jax.random.split(jax.random.key(3), 2)
    options = xj.GenerateOptions(10, xj.SamplingConfig(temperature=0.8), cache_dtype=dtype)
    batch = xj.generate(model.params, model.config, PROMPTS, options, key=keys)
    assert batch.stats.cache_bytes < xj.generate(model.params, model.config, PROMPTS, xj.GenerateOptions(10)).stats.cache_bytes / 2
    for i in range(2):
        steps = xj.stream(model.params, model.config, PROMPTS[i : i + 1], options, key=keys[i : i + 1])
        assert [ids[0] for ids in steps] == batch.tokens[i]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_with_every_other_way(model, dtype, tmp_path):
    """Guesses, several answers, a prefix kept in a file: the same tokens as with this cache alone."""
    settings = xj.SamplingConfig(temperature=0.8)

    def run(prompts, **given):
        options = xj.GenerateOptions(**dict(max_new_tokens=8, sampling=settings, cache_dtype=dtype, capacity=64) | given)
        return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))

    first = run(PROMPTS, keep_prefix=True)
    assert run(PROMPTS, draft="lookup").tokens == first.tokens
    assert len(run(PROMPTS, n=2).tokens) == 4
    xj.save_prefix(tmp_path / "cache", first.prefix, model.params, model.config)
    prompts = [[*a, *b, 11] for a, b in zip(PROMPTS, first.tokens, strict=True)]
    loaded = xj.load_prefix(tmp_path / "cache", model.params, model.config)
    assert run(prompts, prefix=loaded, capacity=None).tokens == run(prompts, prefix=first.prefix, capacity=None).tokens


def test_refused(model):
    for dtype, named in (("int3", "int3"), ("float64", "float64")):
        with pytest.raises(xj.InputError, match=named):
            xj.generate(model.params, model.config, PROMPTS, xj.GenerateOptions(4, cache_dtype=dtype))
