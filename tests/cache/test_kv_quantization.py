"""Keys and values in 8 and 4 bits: the quantization error, and the identities of the engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from quick import full_except
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.cache.stored_kv import cache_dtype_of, dequantize_kv
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.generation.batch_arrays import pad_prompts
from xinfer_jax.generation.loop import PREFILL
from xinfer_jax.mixers.key_bias import rope_bias_fn
from xinfer_jax.model.decoder import Inputs
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.weights.layers import apply_rope, rotary_angles
from xinfer_jax.weights.params import tree_bytes

pytestmark = pytest.mark.oldest

BITS = dict(int8=8, int4=4, gear=4)
PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9])
forward = jax.jit(xj.forward, static_argnums=1)
encode = jax.jit(lambda empty, x, first_B: empty.encode(x, first_B=first_B))
dequantize = jax.jit(dequantize_kv)


@pytest.fixture(scope="module")
def model():
    return xj.load_model(dtype="float32")


@pytest.fixture(scope="module")
def shallow():
    return tiny.shallow_model(1, dtype="float32")


@pytest.mark.parametrize("name", BITS)
def test_the_quantization_error_is_at_most_half_a_step(name):
    x = np.random.RandomState(0).standard_normal((2, 3, 5, 16)).astype(np.float32) + 3
    bits = BITS[name]
    quantized = encode(cache_dtype_of(name).empty(x.shape), x, np.array([5, 3]))
    assert quantized.shape == x.shape and quantized.name == name
    # Bytes.
    assert (
        quantized.values.shape[-1] + 2 * quantized.scale.shape[-1]
        == {"int8": 16 + 4, "int4": 8 + 4, "gear": 8 + 2 + 4 + 4 + 8}[name]
    )
    step = (x.max(-1) - x.min(-1)) / (2**bits - 1)
    if name != "gear":  # its low-rank part may make some errors larger
        # The offset near 3 has 11 bits.
        assert np.all(np.abs(dequantize(quantized) - x) <= 0.51 * step[..., None] + 2e-3)
    zeros = np.zeros((2, 3, 5, 16), np.float32)
    np.testing.assert_allclose(dequantize(encode(quantized, zeros, np.array([5, 3]))), 0, atol=1e-3)


@pytest.mark.full
def test_gear_equals_a_calculation_by_hand():
    """Outliers are exact. The rest loses what four directions of the first tokens cannot represent."""
    x = np.random.RandomState(1).standard_normal((1, 2, 40, 16)).astype(np.float32)
    x[..., 3] *= 8
    quantized = encode(cache_dtype_of("gear").empty(x.shape), x, np.array([30]))
    error = np.asarray(dequantize(quantized)) - x
    for at in (x.argmin(-1), x.argmax(-1)):
        np.testing.assert_allclose(np.take_along_axis(error, at[..., None], -1), 0, atol=8e-3)  # 11 bits
    apart = (np.arange(16) == x.argmin(-1)[..., None]) | (np.arange(16) == x.argmax(-1)[..., None])
    plain = np.asarray(dequantize(dataclasses.replace(quantized, basis=0 * quantized.basis)))
    lost = np.where(apart, 0, x - plain)
    directions = np.linalg.svd(lost[:, :, :30])[2][:, :, :4]
    left = np.where(apart, 0, lost - lost @ np.swapaxes(directions, 2, 3) @ directions)
    np.testing.assert_allclose(np.where(apart, 0, error), -left, atol=2e-3)
    again = encode(quantized, x, np.array([0]))
    np.testing.assert_array_equal(again.basis, quantized.basis)


@pytest.fixture(scope="module")
def talks(model):
    """Eight conversations of eight turns: tokens [8, T], how many are real, and the model's greedy tokens
    with float keys and values.
    """
    pairs = [
        ("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Norway", "Oslo"),
        ("Peru", "Lima"),
        ("Egypt", "Cairo"), ("Kenya", "Nairobi"), ("Cuba", "Havana"), ("Greece", "Athens"),
        ("Austria", "Vienna"),
    ]  # fmt: skip
    rows = []
    for first in range(8):
        messages = []
        for country, city in (pairs[(first + 3 * i) % len(pairs)] for i in range(4)):
            messages += [{"role": "user", "content": f"What is the capital of {country}?"}]
            messages += [{"role": "assistant", "content": f"The capital of {country} is {city}."}]
        rows.append(
            model.tokenizer.encode(model.tokenizer.apply_chat_template(messages, add_generation_prompt=False))
        )
    tokens_BT, num_tokens_B = pad_prompts(rows, 256)
    return (
        tokens_BT,
        num_tokens_B,
        np.asarray(forward(model.params, model.config, tokens_BT, None, num_tokens_B)[0].argmax(-1)),
    )


AGREEMENT = [("int8", 0.29, 0.99), ("int4", 0.16, 0.95), ("gear", 0.31, 0.95), ("float8_e4m3fn", 0.27, 0.97)]


@pytest.mark.parametrize("dtype, most, agree", full_except((), AGREEMENT, AGREEMENT[3:]))
def test_cache_bytes_and_top_1_agreement(model, talks, dtype, most, agree):
    """Top-1 agreement, teacher-forced: the first 16 tokens in one call, then one by one."""
    tokens_BT, num_tokens_B, want_BT = talks
    T = int(num_tokens_B.min())
    cache, whole = (xj.init_cache(model.config, 8, 256, kind) for kind in (dtype, "float32"))
    assert tree_bytes((cache.k, cache.v)) < most * tree_bytes((whole.k, whole.v))

    def step(cache, token_B):
        logits_BV, cache = xj.decode_step(model.params, model.config, token_B, cache)
        return cache, logits_BV.argmax(-1)

    @jax.jit
    def choices(cache, tokens_BT):
        cache = xj.prefill(model.params, model.config, tokens_BT[:, :16], jnp.full(8, 16), cache)[1]
        return jax.lax.scan(step, cache, tokens_BT[:, 16:].T)[1].T

    agreed = np.mean(np.asarray(choices(cache, tokens_BT[:, :T])) == want_BT[:, 16:T])
    print(f"{dtype}: {agreed:.1%} of {8 * (T - 16)}")
    assert agreed >= agree


@pytest.mark.full
def test_few_tokens_span_few_directions():
    """The other directions are zeros: rounding noise would choose them differently in each batch."""
    x = np.random.RandomState(0).standard_normal((1, 1, 8, 16)).astype(np.float32)
    for tokens in (2, 8):
        quantized = encode(cache_dtype_of("gear").empty(x.shape), x, np.array([tokens]))
        lengths = np.linalg.norm(quantized.basis[0, 0], axis=-1)
        np.testing.assert_allclose(np.sort(lengths), ([0] * 4 + [1] * min(tokens, 4))[-4:], atol=1e-5)


@pytest.fixture(scope="module")
def small_model():
    """One layer of random weights, which compiles fast."""
    config = xj.ModelConfig.from_hf(tiny.CONFIG | dict(num_hidden_layers=1, max_position_embeddings=1024))
    params = random_params(config)
    return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params), config


@pytest.mark.full
def test_gear_rows_do_not_depend_on_the_batch(small_model):
    """A prompt of several prefill chunks alone, and among others with shorter chunks, as on a GPU, and layer
    by layer.
    """
    params, config = small_model
    ids = np.random.RandomState(0).randint(0, 200, 700).tolist()
    options = xj.GenerateOptions(
        max_tokens=1, cache_dtype="gear", capacity=1024, logits=True, eos_token_ids=()
    )
    found = []
    for rows, chunk in ((1, 2048), (8, 512)):
        prompts = [ids, *[ids[:5]] * (rows - 1)]
        tokens = pad_prompts(prompts, 1024)
        cache = xj.init_cache(config, rows, 1024, "gear")
        out = PREFILL.keeping(params, config, Inputs(*tokens), NO_EXTRAS, cache, chunk, RunConfig())
        found.append(np.asarray(out.hidden)[0])
        found.append(xj.generate(params, config, prompts, options).logits[0][0])
    assert np.abs(found[0]).max() > 1
    for logits_V in found[1:]:
        np.testing.assert_allclose(logits_V, found[0], atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "gear"])
def test_quantized_caches_with_drafts_several_answers_and_prefix_files(shallow, dtype, tmp_path):
    """Draft tokens, several answers, a prefix in a file: the same tokens as with this cache alone."""
    model = shallow
    settings = xj.SamplingConfig(temperature=0.8)

    def run(prompts, **given):
        options = xj.GenerateOptions(
            **dict(max_tokens=8, sampling=settings, eos_token_ids=(), cache_dtype=dtype, capacity=64) | given
        )
        return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))

    first = run(PROMPTS, keep_prefix=True)
    assert run(PROMPTS, draft="lookup").tokens == first.tokens
    assert len(run(PROMPTS, n=2).tokens) == 4
    xj.save_prefix(model.params, model.config, first.prefix, tmp_path / "cache")
    prompts = [[*a, *b, 11] for a, b in zip(PROMPTS, first.tokens, strict=True)]
    loaded = xj.load_prefix(model.params, model.config, tmp_path / "cache")
    assert (
        run(prompts, prefix=loaded, capacity=None).tokens
        == run(prompts, prefix=first.prefix, capacity=None).tokens
    )


@pytest.mark.full
def test_rotating_the_key_bias_separately_equals_rotating_the_key():
    """Positions of whole strides and others, with yarn's factor applied once."""
    scaled = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    for extra in ({}, dict(rope_scaling=scaled)):
        config = xj.ModelConfig.from_hf(tiny.CONFIG | extra)
        K = config.num_key_value_heads
        H = config.head_dim
        position = jnp.array([[0, 1, 63, 64, 500, 8191]])
        bias_KH = 300 * np.random.RandomState(0).standard_normal((K, H)).astype(np.float32)
        angles = rotary_angles(config, position, jnp.zeros(1, jnp.int32))[0]
        want = apply_rope(jnp.broadcast_to(bias_KH, (1, 6, K, H)), *angles)
        got = rope_bias_fn(config, 0, jnp.array(bias_KH), 8192)(position)
        np.testing.assert_allclose(np.swapaxes(got, 1, 2), want, atol=0.5)  # angles of 8191 have 11 bits
        np.testing.assert_allclose(got[:, :, :3], np.swapaxes(want, 1, 2)[:, :, :3], atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, rope",
    [("int4", "default"), ("float8_e4m3fn", "default"), ("int8", "dynamic")],
)
def test_large_key_biases_cost_no_precision(shallow, dtype, rope):
    """The error of logits with a bias of 300 on every key stays near the error without a bias."""
    config = shallow.config
    if rope == "dynamic":
        config = dataclasses.replace(config, rope=dynamic(config))
    K = config.num_key_value_heads
    H = config.head_dim
    added_KH = np.zeros((K, H), np.float32)
    added_KH[:, H // 2 - 1] = 300
    added_KH[:, H - 2] = -300

    def worst(added_KH):
        k = shallow.params["layers"][0]["k"]
        layer = shallow.params["layers"][0] | {"k": k | {"bias": k["bias"] + added_KH.reshape(-1)}}
        params = shallow.params | {"layers": (layer,)}
        tokens_BT = jnp.arange(1, 41).reshape(2, 20)
        caches = [xj.init_cache(config, 2, 64, name) for name in ("float32", dtype)]
        exact, rounded = (xj.forward(params, config, tokens_BT, cache)[0] for cache in caches)
        return float(jnp.abs(exact - rounded).max())

    assert worst(added_KH) < 2 * worst(0 * added_KH)


def dynamic(config):
    """Dynamic RoPE with a factor whose stretch below the original maximum is 1 only up to rounding."""
    return dataclasses.replace(config.rope, rope_type="dynamic", factor=3.3)


@pytest.mark.full
def test_draft_tokens_beyond_the_end_do_not_change_dynamic_frequencies(small_model):
    """Up to the original maximum: the last passes verify more draft tokens than there are free slots."""
    params, config = small_model
    config = dataclasses.replace(config, rope=dynamic(config), max_position_embeddings=32)
    options = dict(max_tokens=12, eos_token_ids=(), logits=True)
    plain, guessed = (
        xj.generate(params, config, [list(range(20))], xj.GenerateOptions(**options, **draft))
        for draft in ({}, dict(draft="lookup", draft_tokens=8))
    )
    assert guessed.tokens == plain.tokens
    np.testing.assert_allclose(guessed.logits[0], plain.logits[0], atol=1e-4)


def test_unknown_cache_dtypes_raise(model):
    for dtype, named in (("int3", "int3"), ("float64", "float64")):
        with pytest.raises(xj.InputError, match=named):
            xj.generate(
                model.params, model.config, PROMPTS, xj.GenerateOptions(max_tokens=4, cache_dtype=dtype)
            )


@pytest.mark.full
def test_gear_rejects_heads_whose_outlier_index_does_not_fit_a_byte(model):
    """A head_dim of 320 raises InputError, and a head_dim of 256 works."""
    wide = xj.ModelConfig.from_hf(tiny.CONFIG | dict(head_dim=320))
    params = random_params(wide)
    named = "'gear' .* head_dim 320 exceeds 256: use 'int8' or 'int4'"
    with pytest.raises(xj.InputError, match=named):
        xj.generate(params, wide, PROMPTS, xj.GenerateOptions(max_tokens=4, cache_dtype="gear"))
    with pytest.raises(xj.InputError, match=named):
        xj.beam_search(params, wide, PROMPTS, cache_dtype="gear")
    with pytest.raises(xj.InputError, match=named):
        xj.init_cache(wide, 1, 64, "gear")
    with pytest.raises(xj.InputError, match="leaves nothing of head_dim 2: use 'int8'"):
        xj.init_cache(xj.ModelConfig.from_hf(tiny.CONFIG | dict(head_dim=2)), 1, 64, "gear")
    x = np.random.RandomState(0).standard_normal((1, 2, 8, 256)).astype(np.float32)
    x[..., 255] = 9
    error = np.asarray(dequantize(encode(cache_dtype_of("gear").empty(x.shape), x, np.array([8])))) - x
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(x) and np.abs(error[..., 255]).max() < 1e-2
