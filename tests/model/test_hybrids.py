"""Hybrids: linear attention beside full attention. The recurrent state is a kind of cache: what is cached
equals what is not, however it is split; drafts are undone; what has no state is rejected.
"""

import dataclasses

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from layer_changes import with_mixer

import xinfer_jax as xj
from xinfer_jax.mixers.linear_attention import _Tokens, delta_rule, recurrent_step
from xinfer_jax.weights.layout import is_divisible

pytestmark = pytest.mark.oldest

NEW = 8
OPTIONS = xj.GenerateOptions(NEW, capacity=128)  # one capacity: one set of programs
CASE = cases.CASES["qwen3-5-tied"]  # linear, full, linear attention
MOE = cases.CASES["qwen3-5-moe-no-shared"]


@pytest.fixture(scope="module")
def model():
    """A small model, and its prompts (5, 23 and 77 tokens)."""
    return family_checks.small_model(CASE)


@pytest.fixture(scope="module")
def out(model):
    """What it generates."""
    return xj.generate(*model, dataclasses.replace(OPTIONS, keep_prefix=True))


@pytest.fixture(scope="module")
def logits(model):
    """A function: the logits of at most three rows, padded to 96 tokens, without a cache."""
    params, config, _ = model
    forward = jax.jit(xj.forward, static_argnames="config")

    def of(rows: list[list[int]]) -> np.ndarray:
        tokens_BT, num_tokens_B = cases.pad_prompts([*rows, [0] * 96][:3])
        tokens_BT = np.pad(tokens_BT, ((0, 0), (0, 96 - tokens_BT.shape[1])))
        return np.asarray(forward(params, config, tokens_BT, None, num_tokens_B)[0])

    return of


def random_tokens(T: int) -> tuple[_Tokens, jax.Array]:
    random = np.random.RandomState(0)
    q, k, v = (random.standard_normal((2, 3, T, width)).astype(np.float32) for width in (8, 8, 12))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -random.uniform(0, 0.2, (2, 3, T)).astype(np.float32)
    beta = random.uniform(0, 1, (2, 3, T)).astype(np.float32)
    return _Tokens(q, k, v, decay, beta), jnp.asarray(random.standard_normal((2, 3, 8, 12)), jnp.float32)


def single_steps(tokens: _Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(state, t):
        one, state = recurrent_step(jax.tree.map(lambda x: x[:, :, None], t), state)
        return state, one[:, :, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), tokens)
    state, outs = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(outs, 0, 2), state


@pytest.mark.full
def test_blocks_equal_single_steps_and_so_do_their_gradients():
    args = random_tokens(150)

    def run(form):
        out, vjp = jax.vjp(form, *args)
        return out, vjp(jax.tree.map(jnp.cos, out))

    found, expected = (jax.jit(run, static_argnums=0)(form) for form in (delta_rule, single_steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0], expected[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found[1], expected[1])


@pytest.mark.full
def test_weak_decays_between_strong_ones_lose_no_digits():
    tokens, state = random_tokens(128)
    tokens = tokens._replace(decay_BNT=-np.exp(40 * -tokens.decay_BNT - 4))
    for a, b in zip(jax.jit(delta_rule)(tokens, state), jax.jit(single_steps)(tokens, state), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.full
def test_equal_keys_lose_no_digits():
    (q, k, v, _, beta, _), state = random_tokens(128)
    k = np.broadcast_to(k[:, :, :1], k.shape)
    args = _Tokens(q, k, v, np.zeros_like(beta), np.ones_like(beta)), 0 * state
    for a, b in zip(jax.jit(delta_rule)(*args), jax.jit(single_steps)(*args), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_cached_equals_uncached_however_it_is_split(model, logits):
    params, config, prompts = model
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    cache = xj.init_cache(config, 3, 128, "int8")
    assert cache.layers[0].state.dtype == np.float32 and cache.dtype == "int8"
    cache = xj.init_cache(config, 3, 128)
    logits_BTV = logits(prompts)
    found = {}
    for first, end in ((0, 40), (40, 76), (76, 77)):
        count_B = np.clip(num_tokens_B - first, 0, end - first)
        logits_BV, cache = xj.prefill(params, config, tokens_BT[:, first:end], count_B, cache)
        found |= {i: logits_BV[i] for i in np.flatnonzero(count_B)}
    for i, n in enumerate(num_tokens_B):
        np.testing.assert_allclose(found[i], logits_BTV[i, n - 1], atol=1e-4)
    assert cache.length_B.tolist() == num_tokens_B.tolist()
    with pytest.raises(xj.InputError, match="row 0 cannot go back from 5 to 4 tokens: its linear-attention"):
        xj.truncate(cache, [4, 23, 77])
    assert xj.truncate(cache, [0, 23, 77]).length_B.tolist() == [0, 23, 77]


@pytest.mark.full
def test_streams_and_beams(model, out, logits):
    params, config, prompts = model
    streamed = [*xj.stream(params, config, prompts, OPTIONS)]
    assert [[*row] for row in zip(*streamed, strict=True)] == out.tokens
    prompts = prompts[:2]
    beams = xj.beam_search(params, config, prompts, num_beams=2, length_penalty=0.0, max_new_tokens=NEW)
    rows = [prompt + best for prompt, (best, *_) in zip(prompts, beams.sequences, strict=True)]
    logprobs_BTV = np.asarray(jax.nn.log_softmax(logits(rows), -1))
    for i, (prompt, (score, *_)) in enumerate(zip(prompts, beams.scores, strict=True)):
        first = len(prompt)
        exact = sum(logprobs_BTV[i, t - 1, rows[i][t]] for t in range(first, first + NEW))
        np.testing.assert_allclose(score, exact, atol=1e-3)


@pytest.mark.full
def test_drafts_are_undone(model, out):
    params, config, prompts = model
    rows = [*zip(prompts, out.tokens, strict=True)]
    rows += rows[:1]  # calls are padded to four rows
    tail = jnp.array([prompt[-5:] + tokens for prompt, tokens in rows])
    first_B1 = jnp.array([[len(prompt) - 5] for prompt, _ in rows])

    def half_right(history_BS, length_B, count):  # of two draft tokens the second is wrong
        at_BT = jnp.minimum(length_B[:, None] - first_B1 + jnp.arange(count), 4 + NEW)
        return (jnp.take_along_axis(tail, at_BT, 1) + jnp.arange(count)) % cases.VOCAB

    options = dataclasses.replace(OPTIONS, draft=half_right, draft_tokens=2, keep_prefix=True)
    drafted = xj.generate(params, config, prompts, options)
    assert drafted.tokens == out.tokens and min(drafted.stats.acceptance) > 0.3
    longer = [p + t + [1] for p, t in zip(prompts, out.tokens, strict=True)]
    again = xj.generate(params, config, longer, dataclasses.replace(OPTIONS, prefix=drafted.prefix))
    assert again.tokens == xj.generate(params, config, longer, OPTIONS).tokens
    assert again.stats.reused_tokens == sum(map(len, prompts)) + 3 * (NEW - 1)


@pytest.mark.full
def test_prefixes_reach_to_their_state(model, out, tmp_path):
    params, config, prompts = model
    xj.save_prefix(tmp_path / "prefix", out.prefix, params, config)
    prefix = xj.load_prefix(tmp_path / "prefix", params, config)
    longer = [p + t + [1, 2] for p, t in zip(prompts, out.tokens, strict=True)]
    assert prefix.shared(longer).tolist() == [len(p) + NEW - 1 for p in prompts]
    assert prefix.shared([p[:-1] + [0, 0] for p in longer]).tolist() == [len(p) + NEW - 1 for p in prompts]
    assert prefix.shared([p[:4] + [0] for p in longer]).tolist() == [0, 0, 0]
    options = dataclasses.replace(OPTIONS, prefix=prefix)
    expected = xj.generate(params, config, longer, OPTIONS).tokens
    assert xj.generate(params, config, longer, options).tokens == expected


def published(hf: dict, tensors: dict[str, np.ndarray]) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and tensors of a text model as they are published: nested, with others beside."""
    text = {k: v for k, v in hf.items() if k not in ("architectures", "tie_word_embeddings")}
    outer = dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", text_config=text,
        vision_config={}, tie_word_embeddings=False,
    )  # fmt: skip
    renamed = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    others = {"model.visual.patch_embed.bias": np.zeros(3), "mtp.fc.weight": np.zeros((2, 2))}
    return outer, renamed | {name: x.astype(np.float32) for name, x in others.items()}


def test_published_names_and_what_is_not_read(tmp_path):
    config = MOE.config
    stored = cases.fuse_tensors(config, cases.random_tensors(config, 3))
    outer, tensors = published(MOE.hf, {n: np.ascontiguousarray(t) for n, t in stored.items()})
    path = tiny.write(tmp_path, outer, weights=tensors, with_tokenizer=False)
    loaded = xj.load_model(path, dtype="float32")
    assert loaded.load_stats.skipped == ("model.visual.* (1)", "mtp.* (1)")
    assert loaded.config == config and loaded.config.eos_token_ids == (2,)
    params = cases.params_from(config, cases.random_tensors(config, 3))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    tensors["model.language_model.layers.0.linear_attn.A_log"][1] = np.nan
    tiny.write(tmp_path, outer, weights=tensors, with_tokenizer=False)
    with pytest.raises(xj.InputError, match="linear_attn.A_log holds NaN"):
        xj.load_model(path, dtype="float32")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layer_types=["linear_attention", "mamba", "mamba"]), "layer type 'mamba' is not supported"),
        (dict(linear_num_value_heads=5), "linear_num_value_heads 5 is not a multiple of"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be at least 2"),
        (dict(attn_output_gate=False), "attn_output_gate False is not supported"),
        (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype 'bfloat16' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.from_hf(CASE.hf | change)


def test_null_is_as_absent():
    absent = dict(attn_output_gate=None, mamba_ssm_dtype=None)
    assert xj.from_hf(CASE.hf | absent) == CASE.config


def test_meshes_divide_the_heads_of_linear_attention():
    """Not only their widths: three heads of width 12 have 36 numbers, which two devices divide."""
    odd = with_mixer(CASE.config, num_key_heads=3, num_value_heads=6)
    assert is_divisible(CASE.config, 2) and not is_divisible(odd, 2)


def test_rejected_draft_models_and_caches(model):
    params, config, prompts = model
    draft = xj.Model(params, config)
    with pytest.raises(
        xj.InputError, match="draft model is not supported .*'qwen3_5_text', which has linear"
    ):
        xj.generate(params, config, prompts, xj.GenerateOptions(NEW, draft=draft))
    other = with_mixer(config, num_value_heads=8)
    with pytest.raises(xj.InputError, match=r"states of \(8, 12, 12\).* for a model of .*\(2, 12, 12\)"):
        xj.decode_step(params, config, np.zeros(1, np.int32), xj.init_cache(other, 1, 8))
