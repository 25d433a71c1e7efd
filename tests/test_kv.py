"""Keys and values in 8 and 4 bits: what rounding them loses, and that the engine's identities hold."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.cache.quantized import KV_BITS, empty, quantize, widen
from xinfer_jax.generation.batches import padded
from xinfer_jax.generation.loop import READ
from xinfer_jax.model.layers import rotary_angles, rotate, turned
from xinfer_jax.weights.params import tree_bytes

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9])


@pytest.fixture(scope="module")
def model():
    return xj.load_model(dtype="float32")


@pytest.fixture(scope="module")
def shallow():
    return tiny.shallow(1, dtype="float32")


@pytest.mark.parametrize("name", KV_BITS)
def test_rounding_errs_by_half_a_step_at_most(name):
    x = np.random.RandomState(0).standard_normal((2, 3, 5, 16)).astype(np.float32) + 3
    bits = KV_BITS[name]
    held = quantize(jnp.array(x), empty(x.shape, name), jnp.array([5, 3]))
    assert held.shape == x.shape and held.name == name
    # Bytes.
    assert (
        held.values.shape[-1] + 2 * held.scale.shape[-1]
        == {"int8": 16 + 4, "int4": 8 + 4, "gear": 8 + 2 + 4 + 4 + 8}[name]
    )
    step = (x.max(-1) - x.min(-1)) / (2**bits - 1)
    if name != "gear":  # whose low-rank part trades a larger error here for smaller ones there
        # The offset near 3 has 11 bits.
        assert np.all(np.abs(widen(held) - x) <= 0.51 * step[..., None] + 2e-3)
    np.testing.assert_allclose(
        widen(quantize(jnp.zeros((1, 1, 1, 4)), empty((1, 1, 1, 4), name))), 0, atol=1e-3
    )


def test_gear_by_hand():
    """Outliers are exact, and the rest has lost no more than what four directions of the first tokens cannot
    say.
    """
    x = np.random.RandomState(1).standard_normal((1, 2, 40, 16)).astype(np.float32)
    x[..., 3] *= 8
    held = quantize(jnp.array(x), empty(x.shape, "gear"), jnp.array([30]))
    error = np.asarray(widen(held)) - x
    for at in (x.argmin(-1), x.argmax(-1)):
        np.testing.assert_allclose(np.take_along_axis(error, at[..., None], -1), 0, atol=8e-3)  # 11 bits
    apart = (np.arange(16) == x.argmin(-1)[..., None]) | (np.arange(16) == x.argmax(-1)[..., None])
    plain = np.asarray(widen(dataclasses.replace(held, basis=0 * held.basis)))
    lost = np.where(apart, 0, x - plain)
    directions = np.linalg.svd(lost[:, :, :30])[2][:, :, :4]
    left = np.where(apart, 0, lost - lost @ np.swapaxes(directions, 2, 3) @ directions)
    np.testing.assert_allclose(np.where(apart, 0, error), -left, atol=2e-3)
    again = quantize(jnp.array(x), held, jnp.array([0]))
    np.testing.assert_array_equal(again.basis, held.basis)


@pytest.fixture(scope="module")
def talks(model):
    """Eight conversations of eight turns: tokens [8, T], how many are real, and the model's own choices from
    full keys and values.
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
    tokens_BT, num_tokens_B = padded(rows, 256)
    return (
        tokens_BT,
        num_tokens_B,
        np.asarray(xj.forward(model.params, model.config, tokens_BT, None, num_tokens_B)[0].argmax(-1)),
    )


@pytest.mark.parametrize(
    "dtype, most, agree", [("int8", 0.29, 0.99), ("int4", 0.16, 0.95), ("gear", 0.31, 0.95)]
)
def test_bytes_and_agreement_on_what_the_model_knows(model, talks, dtype, most, agree):
    """Top-1, teacher-forced: the first 16 tokens at once, then one after the other."""
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


def test_what_gear_gains(model, talks):
    """The error of keys and values themselves, relative to their size: at least a third less than with 4 bits
    alone, if twice that of 8.
    """
    tokens_BT, num_tokens_B, _ = talks
    first, *others = model.params["layers"]  # whose keys are kept without their bias
    first = first | {"k": first["k"] | {"bias": 0 * first["k"]["bias"]}}
    params = model.params | {"layers": (first, *others)}
    caches = [xj.init_cache(model.config, 8, 256, kind) for kind in ("float32", *KV_BITS)]
    caches = [xj.prefill(params, model.config, tokens_BT, num_tokens_B, cache)[1] for cache in caches]
    T = int(num_tokens_B.min())
    # Later layers read what the first made.
    exact, *held = ([widen(x)[:, :, :T] for x in (cache.k[0], cache.v[0])] for cache in caches)
    errors = [
        np.mean([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(kind, exact, strict=True)])
        for kind in held
    ]
    print("relative error of int8, int4, gear:", errors)
    assert 2 * errors[0] < errors[2] < errors[1] * 2 / 3


def test_few_tokens_choose_few_directions():
    """Which others there are would be rounding's choice, another in every batch."""
    x = np.random.RandomState(0).standard_normal((1, 1, 8, 16)).astype(np.float32)
    for tokens in (2, 8):
        held = quantize(jnp.array(x), empty(x.shape, "gear"), jnp.array([tokens]))
        lengths = np.linalg.norm(held.basis[0, 0], axis=-1)
        np.testing.assert_allclose(np.sort(lengths), ([0] * 4 + [1] * min(tokens, 4))[-4:], atol=1e-5)


@pytest.fixture(scope="module")
def small():
    """One layer of random weights: programs compile in a fraction of the time."""
    config = xj.from_hf(tiny.CONFIG | dict(num_hidden_layers=1, max_position_embeddings=1024))
    params = xj.init_params(config, jax.random.key(0), "float32")
    return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params), config


def test_gear_rows_do_not_depend_on_the_batch(small):
    """A prompt of several prefill chunks alone, and among others with shorter chunks, as a GPU cuts them; and
    layer by layer.
    """
    params, config = small
    ids = np.random.RandomState(0).randint(0, 200, 700).tolist()
    options = xj.GenerateOptions(1, cache_dtype="gear", capacity=1024, logits=True, eos_token_ids=())
    found = []
    for rows, chunk in ((1, 2048), (8, 512)):
        prompts = [ids, *[ids[:5]] * (rows - 1)]
        tokens = padded(prompts, 1024)
        cache = xj.init_cache(config, rows, 1024, "gear")
        found.append(np.asarray(READ.keeping(params, config, *tokens, cache, None, chunk)[0])[0])
        found.append(xj.generate(params, config, prompts, options).logits[0][0])
    assert np.abs(found[0]).max() > 1
    for logits_V in found[1:]:
        np.testing.assert_allclose(logits_V, found[0], atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "int4", "gear"])
def test_a_row_of_a_batch_is_the_row_alone_and_streamed(shallow, dtype):
    model = shallow
    keys = jax.random.split(jax.random.key(3), 2)
    options = xj.GenerateOptions(10, xj.SamplingConfig(temperature=0.8), (), cache_dtype=dtype)
    batch = xj.generate(model.params, model.config, PROMPTS, options, key=keys)
    assert (
        batch.stats.cache_bytes
        < xj.generate(model.params, model.config, PROMPTS, xj.GenerateOptions(10)).stats.cache_bytes / 2
    )
    for i in range(2):
        steps = xj.stream(model.params, model.config, PROMPTS[i : i + 1], options, key=keys[i : i + 1])
        assert [ids[0] for ids in steps] == batch.tokens[i]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "gear", "bfloat16"])
def test_with_every_other_way(shallow, dtype, tmp_path):
    """Guesses, several answers, a prefix kept in a file: the same tokens as with this cache alone."""
    model = shallow
    settings = xj.SamplingConfig(temperature=0.8)

    def run(prompts, **given):
        options = xj.GenerateOptions(
            **dict(max_new_tokens=8, sampling=settings, eos_token_ids=(), cache_dtype=dtype, capacity=64)
            | given
        )
        return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))

    first = run(PROMPTS, keep_prefix=True)
    assert run(PROMPTS, draft="lookup").tokens == first.tokens
    assert len(run(PROMPTS, n=2).tokens) == 4
    xj.save_prefix(tmp_path / "cache", first.prefix, model.params, model.config)
    prompts = [[*a, *b, 11] for a, b in zip(PROMPTS, first.tokens, strict=True)]
    loaded = xj.load_prefix(tmp_path / "cache", model.params, model.config)
    assert (
        run(prompts, prefix=loaded, capacity=None).tokens
        == run(prompts, prefix=first.prefix, capacity=None).tokens
    )


def test_a_bias_turned_later_is_the_key_turned():
    """By whole strides of positions and the rest, with yarn's factor on both once."""
    scaled = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    for extra in ({}, dict(rope_scaling=scaled)):
        config = xj.from_hf(tiny.CONFIG | extra)
        K = config.num_key_value_heads
        H = config.head_dim
        position = jnp.array([[0, 1, 63, 64, 500, 8191]])
        bias_KH = 300 * np.random.RandomState(0).standard_normal((K, H)).astype(np.float32)
        angles = rotary_angles(config, position, jnp.zeros(1, jnp.int32))[0]
        want = rotate(jnp.broadcast_to(bias_KH, (1, 6, K, H)), *angles)
        got = turned(config, 0, jnp.array(bias_KH), 8192)(position)
        np.testing.assert_allclose(np.swapaxes(got, 1, 2), want, atol=0.5)  # angles of 8191 have 11 bits
        np.testing.assert_allclose(got[:, :, :3], np.swapaxes(want, 1, 2)[:, :, :3], atol=1e-3)


@pytest.mark.parametrize("dtype, rope", [("int8", "default"), ("int4", "default"), ("int8", "dynamic")])
def test_large_biases_of_keys_cost_nothing(shallow, dtype, rope):
    """Numbers of 300 on every key: the error of logits stays near that without them."""
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
    """Dynamic RoPE of a factor whose stretch below the original maximum is 1 only up to rounding."""
    return dataclasses.replace(config.rope, rope_type="dynamic", factor=3.3)


def test_draft_tokens_past_the_end_leave_dynamic_frequencies_as_they_are(small):
    """Up to the original maximum: the last passes verify more draft tokens than there is room for."""
    params, config = small
    config = dataclasses.replace(config, rope=dynamic(config), max_position_embeddings=32)
    options = dict(max_new_tokens=12, eos_token_ids=(), logits=True)
    plain, guessed = (
        xj.generate(params, config, [list(range(20))], xj.GenerateOptions(**options, **draft))
        for draft in ({}, dict(draft="lookup", draft_tokens=8))
    )
    assert guessed.tokens == plain.tokens
    np.testing.assert_allclose(guessed.logits[0], plain.logits[0], atol=1e-4)


def test_refused(model):
    for dtype, named in (("int3", "int3"), ("float64", "float64")):
        with pytest.raises(xj.InputError, match=named):
            xj.generate(model.params, model.config, PROMPTS, xj.GenerateOptions(4, cache_dtype=dtype))


def test_gear_refuses_heads_whose_places_fit_no_byte(model):
    """Of 320 numbers; 256 are kept right."""
    wide = xj.from_hf(tiny.CONFIG | dict(head_dim=320))
    params = xj.init_params(wide, jax.random.key(0), "float32")
    named = "'gear' .* head_dim 320 exceeds its 256: use 'int8' or 'int4'"
    with pytest.raises(xj.InputError, match=named):
        xj.generate(params, wide, PROMPTS, xj.GenerateOptions(4, cache_dtype="gear"))
    with pytest.raises(xj.InputError, match=named):
        xj.beam_search(params, wide, PROMPTS, cache_dtype="gear")
    with pytest.raises(xj.InputError, match=named):
        xj.init_cache(wide, 1, 64, "gear")
    with pytest.raises(xj.InputError, match="head_dim 2 leaves none: use 'int8'"):
        xj.init_cache(xj.from_hf(tiny.CONFIG | dict(head_dim=2)), 1, 64, "gear")
    x = np.random.RandomState(0).standard_normal((1, 2, 8, 256)).astype(np.float32)
    x[..., 255] = 9
    error = np.asarray(widen(quantize(jnp.array(x), empty(x.shape, "gear"), jnp.array([8])))) - x
    assert np.linalg.norm(error) < 0.2 * np.linalg.norm(x) and np.abs(error[..., 255]).max() < 1e-2


@pytest.mark.slow
def test_what_large_biases_of_keys_do_is_measured(tmp_path):
    """They are kept apart: no format errs more with them than without."""

    def run(*flags):
        command = [sys.executable, Path(__file__).parents[1] / "scripts/measure_kv.py", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    tiny.write_json(tmp_path / "config.json", tiny.CONFIG | dict(head_dim=16))
    done = run(f"--config={tmp_path}", "--layers=1", "--rows=1", "--tokens=32", "--biases=0,100")
    assert done.returncode == 0, done.stderr
    error = {
        (row["bias"], row["cache"]): row["attention"]
        for row in json.loads(done.stdout.splitlines()[-1])["rows"]
    }
    assert error[0, "int8"] < 0.02
    for name in KV_BITS:
        assert 0.8 * error[0, name] < error[100, name] < 1.25 * error[0, name]
    refused = run("--biases=1,x")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
