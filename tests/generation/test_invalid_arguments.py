"""Invalid arguments of every type, and errors that are known only after sampling; each names its cause."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation.output_checks import check_overflow

pytestmark = pytest.mark.oldest

CONFIG = from_hf(tiny.UNTIED | dict(num_hidden_layers=1, vocab_size=64, eos_token_id=63))
PROMPT = [5, 6]
BEAMS = dict(ids=[PROMPT, [7, 8, 9]], num_beams=2, max_tokens=4)  # one program for all


@pytest.fixture(scope="module")
def params():
    return xj.init_params(CONFIG, jax.random.key(3), "float32")


def run(params, prompts=(PROMPT,), key=None, **given) -> xj.types.GenerateOutput:
    options = xj.GenerateOptions(**dict(max_tokens=2, capacity=4) | given)
    return xj.generate(params, CONFIG, prompts, options, key=key)


def test_images_in_a_prompt_are_rejected_in_words(params):
    """All functions that take prompts raise, before anything is traced. Other ids of the whole model are
    text.
    """
    text = tiny.UNTIED | dict(num_hidden_layers=1, vocab_size=64, model_type="qwen3_vl_text")
    ids = dict(image_token_id=9, video_token_id=10, vision_start_token_id=11, vision_end_token_id=12)
    config = from_hf(dict(model_type="qwen3_vl", text_config=text) | ids)
    assert config.placeholder_ids == {9: "image_token_id", 10: "video_token_id", 11: "vision_start_token_id"}
    assert from_hf(tiny.UNTIED).placeholder_ids == {}
    config = dataclasses.replace(CONFIG, placeholder_ids=config.placeholder_ids)
    assert config == CONFIG and hash(config) == hash(CONFIG)
    model = xj.Model(params, config)
    options = xj.GenerateOptions(max_tokens=2, capacity=4)
    calls = [
        (10, "prompt 1 .*video", lambda: xj.generate(params, config, [PROMPT, [5, 10]], options)),
        (9, "prompt 0 .*image", lambda: next(xj.stream(params, config, [[9]], options))),
        (9, "completion 0 .*image", lambda: xj.score_completions(params, config, [PROMPT], [[9, 11]])),
        (
            11,
            "prompt 0 .*vision_start",
            lambda: xj.beam_search(params, config, [11], num_beams=2, max_tokens=2),
        ),
        (9, "text 0 .*image", lambda: xj.embed_texts(model, [[5, 9]])),
    ]
    for token, name, call in calls:
        (who, kind) = name.split(" .*")
        wanted = f"{who} holds token id {token}, which is {kind}_token_id in config.json: only text is served"
        with pytest.raises(xj.InputError, match=wanted):
            call()


# --- numbers that are not finite ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(params):
    """A model whose second step is NaN: the embedding of the first token that it samples."""
    first = run(params).tokens[0][0]
    assert first not in PROMPT
    weight = params["embed"]["weight"].at[first].set(jnp.nan)
    return params | {"embed": params["embed"] | {"weight": weight}}


NOT_FINITE = (
    "row 0, step 1: the log-probability of token .* is nan: the weights or activations contain NaN or inf"
)


@pytest.mark.full
@pytest.mark.parametrize("given", [{}, dict(draft="lookup"), dict(use_cache=False)], ids=str)
def test_a_token_that_is_not_finite_is_an_error(broken, given):
    with pytest.raises(xj.InputError, match=NOT_FINITE):
        run(broken, **given)
    if not given:
        with pytest.raises(xj.InputError, match=NOT_FINITE):
            list(xj.stream(broken, CONFIG, [PROMPT], xj.GenerateOptions(max_tokens=2, capacity=4)))


def spoiled(params, value, dtype="float32"):
    norm = params["final_norm"].at[3].set(value)
    return jax.tree.map(lambda x: x.astype(dtype), params | {"final_norm": norm})


@pytest.mark.full
def test_alternatives_raise_for_values_that_are_not_finite(params):
    with pytest.raises(xj.InputError, match="row 0, step 0: .*contain NaN or inf"):
        run(spoiled(params, jnp.nan), logprobs=2)


@pytest.mark.full
def test_the_error_names_the_row_and_step_that_are_not_finite(params):
    """The row and the step are those of the prompt alone, however long the search of the others takes."""
    sequences = xj.beam_search(params, CONFIG, **BEAMS).sequences
    chosen = next(ids[0] for ids in sequences[1] if all(ids[0] not in row for row in sequences[0]))

    def without(token, ids):
        weight = params["embed"]["weight"].at[token].set(jnp.nan)
        broken = params | {"embed": params["embed"] | {"weight": weight}}
        return xj.beam_search(broken, CONFIG, **BEAMS | dict(ids=ids)).sequences

    other, breaks = BEAMS["ids"]
    message = "the scores are nan: .*contain NaN or inf"
    for token, ids, where in (
        (40, [PROMPT, [7, 40]], "row 1, step 0"),
        (40, [[40, 7], PROMPT], "row 0, step 0"),
        (chosen, [other, breaks], "row 1, step 1"),
        (chosen, [breaks, other], "row 0, step 1"),
        (chosen, [breaks, breaks], "row 0, step 1"),
    ):
        with pytest.raises(xj.InputError, match=f"{where}: {message}"):
            without(token, ids)
    assert without(40, BEAMS["ids"]) == sequences and all(sequences)  # no beam takes token 40


@pytest.mark.full
def test_what_overflows_float16_names_another_dtype(params):
    with pytest.raises(xj.InputError, match="row 0, step 0: .*65504: use dtype bfloat16 or float32"):
        run(spoiled(params, 1e6, "float16"))


@pytest.mark.full
def test_a_cache_that_overflowed_is_an_error(params):
    prefix = run(params, keep_prefix=True).prefix
    cache = dataclasses.replace(prefix.cache, overflow_B=jnp.array([True]))
    with pytest.raises(xj.InputError, match="all of which fit the cache"):
        run(params, prefix=dataclasses.replace(prefix, cache=cache))
    with pytest.raises(xj.InputError, match="row 0 outgrew its cache of 4 tokens: raise capacity"):
        check_overflow(SimpleNamespace(capacity=4), cache)


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [
        dict(allowed_token_ids=[9], no_repeat_ngram_size=1),
        dict(allowed_token_ids=[9], no_repeat_ngram_size=1, temperature=1.0),
        dict(allowed_token_ids=[9], min_tokens=2),
    ],
    ids=str,
)
def test_settings_that_leave_no_token_are_an_error(params, given):
    message = "row 0, step .: the settings leave no token"
    if "min_tokens" in given:
        message = "min_tokens 2 forbids .*allowed_token_ids has no others"
    with pytest.raises(xj.InputError, match=message):
        run(
            params, sampling=xj.SamplingConfig(**given), key=jax.random.key(0), max_tokens=3,
            capacity=None, eos_token_ids=[9] if "min_tokens" in given else (),
        )  # fmt: skip


# --- speculation in a small cache ---------------------------------------------------------------------------


@pytest.mark.full
def test_draft_tokens_need_no_more_capacity_than_the_answer(params):
    speculated = run(params, draft="lookup", draft_tokens=3)
    assert speculated.tokens == run(params).tokens
    assert 0 <= speculated.stats.acceptance[0] <= 1


BAD_DRAFTS = {
    "float": (lambda h, n, k: jnp.zeros((1, k)), r"int32 ids of the shape \[1, 3\], got float32 of \[1, 3\]"),
    "shape": (lambda h, n, k: jnp.zeros((1, k + 1), int), r"got int32 of \[1, 4\]"),
    "nothing": (lambda h, n, k: None, "got None"),
    "arguments": (lambda h: h, "the draft function cannot be traced: TypeError"),
    "class": (dict, "cannot be traced"),
    "directory": (
        "/tmp",
        "a model from load_model, a head from load_draft, 'lookup', 'mtp', or a function, got '/tmp'",
    ),
    "number": (5, "draft must be a model"),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_bad_drafts_raise(params, name):
    draft, message = BAD_DRAFTS[name]
    with pytest.raises(xj.InputError, match=message):
        run(params, draft=draft)


@pytest.mark.full
def test_draft_tokens_outside_the_vocabulary_are_not_accepted(params):
    def outside(history_BS, length_B, count):
        return jnp.where(length_B[:, None] % 2 == 0, 10**6, -5)

    assert run(params, draft=outside, draft_tokens=1).tokens == run(params).tokens


# --- types --------------------------------------------------------------------------------------------------

BAD_OPTIONS = {
    "max_tokens": (0, -1, 2**40, 1.5, True, "3", None, np.array([3])),
    "capacity": (0, -3, "3", 1.5, True),
    "n": (0, True, "2", None, 2**40),
    "best_of": (0, "2"),
    "logprobs": (True, -1, 1.0, "1", 65),
    "draft_tokens": (0, 17, 100_000, True, "3"),
    "eos_token_ids": (5, "5", 1.5, [[5]], [5.0], ["5"], [True], [-1], [64], [2**70], b"a", {5: 1}),
    "stop_token_ids": (5, "5", None, np.array([5.0]), np.array([[5]]), [64]),
    "use_cache": ("false", 0, None),
    "keep_prefix": ("no",),
    "logits": (1,),
    "prefix": ("x", {}),
    "impl": (5, "fast", ["xla"]),
    "cache_dtype": (5, ["int8"], "int3", True),
    "sampling": ({}, "x", xj.SamplingConfig, [xj.SamplingConfig(), {}]),
}


@pytest.mark.parametrize(
    "name, value", [(n, v) for n, values in BAD_OPTIONS.items() for v in values], ids=repr
)
def test_bad_options_raise(params, name, value):
    with pytest.raises(xj.InputError, match=name.removeprefix("cache_")):
        run(params, **{"capacity": None, name: value})


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(max_tokens=3), r"prompt of 2 tokens \+ max_tokens 3 exceeds the capacity 4"),
        (dict(max_tokens=255, capacity=None), "context limit 256"),
        (dict(sampling=xj.SamplingConfig(temperature=0.5)), "needs a PRNG key"),
        (dict(sampling=[xj.SamplingConfig()] * 4), "4 sampling settings for 1 prompts"),
        (dict(stop_strings=("x",)), "stop_strings need text"),
        (dict(n=3, best_of=2), "best_of must be a whole number from 3 to 65536, got 2"),
    ],
)
def test_options_that_do_not_fit_raise(params, given, message):
    """A stream raises before its first token is asked for."""
    options = xj.GenerateOptions(**dict(max_tokens=2, capacity=4) | given)
    for call in (xj.generate, xj.stream):
        with pytest.raises(xj.InputError, match=message):
            call(params, CONFIG, [PROMPT], options)


def test_ids_in_any_collection(params):
    want = run(params)
    for ids in ([7], (7,), {7}, range(7, 8), np.array([7]), jnp.array([7]), [np.int8(7)]):
        assert run(params, eos_token_ids=ids, stop_token_ids=ids).tokens == want.tokens
    for prompts in (np.array([PROMPT]), jnp.array([PROMPT]), [tuple(PROMPT)], (range(5, 7),)):
        assert run(params, prompts).tokens == want.tokens


BAD_PROMPTS = (
    "ab", ["ab"], [5, 6], np.array([5, 6]), [[True]], [[1.0]], [[2**31]], [[2**70]], [[-1]], [[[5]]], [[]],
    [], None, 5, {5: 6}, [{5, 6}], [b"a"], [[None]], np.zeros((1, 2, 2), int), [np.array([1.5])],
    (p for p in [[5]]), [(i for i in [5])],
)  # fmt: skip


@pytest.mark.parametrize("prompts", BAD_PROMPTS, ids=map(str, range(len(BAD_PROMPTS))))
def test_bad_prompts_raise(params, prompts):
    with pytest.raises(xj.InputError, match="prompt"):
        run(params, prompts)


BAD_KEYS = (
    0, "x", True, [0, 1], np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(3, np.uint32),
    np.zeros((3, 2), np.uint32), np.uint32(1),
)  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_bad_keys_raise(params, key):
    with pytest.raises(xj.InputError, match="^keys? "):
        run(params, key=key, sampling=xj.SamplingConfig(temperature=0.7))


BAD_SETTINGS = {
    "temperature": ("0.7", True, None, 1j, 1e39, [], [0.5, True], [[0.5]], np.array([0.5, None]), [0.5] * 3),
    "top_k": ("5", 1.5, 2**70, np.array(["5"])),
    "top_p": (np.array([[0.5]]), np.nan),
    "presence_penalty": (1e39, "1"),
    "repetition_penalty": (1e-40, np.inf),
    "min_p": (False,),
}


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in BAD_SETTINGS.items() for v in vs], ids=repr)
def test_bad_settings_raise(params, name, value):
    for given in (xj.SamplingConfig(**{name: value}), [xj.SamplingConfig(**{name: value})]):
        with pytest.raises(xj.InputError, match=name):
            run(params, key=jax.random.key(0), sampling=given)


# --- the doors ----------------------------------------------------------------------------------------------

TOKENS = np.array([PROMPT], np.int32)
COUNT = np.array([2], np.int32)
BAD_PREFILLS = {
    "a list": (dict(tokens_BT=[PROMPT]), "tokens_BT must be an array of integers"),
    "one row": (dict(tokens_BT=TOKENS[0]), r"shape \[rows, tokens\], got int32 of \[2\]"),
    "floats": (dict(tokens_BT=TOKENS * 1.0), "got float64"),
    "nothing": (dict(tokens_BT=TOKENS[:, :0]), "has no tokens"),
    "outside": (dict(tokens_BT=TOKENS + 60), "token id 65 is outside 0 … 63"),
    "counts": (
        dict(num_tokens_B=np.array([2, 2])),
        r"num_tokens_B must be .* shape \[1\], got int64 of \[2\]",
    ),
    "too many": (dict(num_tokens_B=np.array([3])), "num_tokens_B: 3 is outside 0 … 2"),
    "no cache": (dict(cache=None), "cache must come from init_cache, got None"),
    "rows": (dict(cache=xj.init_cache(CONFIG, 2, 8)), "a cache of 2 rows for 1"),
    "capacity": (dict(cache=xj.init_cache(CONFIG, 1, 1)), "2 tokens exceed the cache's capacity 1"),
    "layers": (
        dict(cache=xj.init_cache(from_hf(tiny.CONFIG), 1, 8)),
        "a cache of 2 layers, 2 key heads of width 8 for a model of 1 layers, 2 key heads of width 8",
    ),
    "impl": (dict(impl="fast"), "impl must be"),
}


@pytest.mark.parametrize("name", BAD_PREFILLS)
def test_bad_arguments_of_prefill_raise(params, name):
    given, message = BAD_PREFILLS[name]
    call = dict(tokens_BT=TOKENS, num_tokens_B=COUNT, cache=xj.init_cache(CONFIG, 1, 8)) | given
    with pytest.raises(xj.InputError, match=message):
        xj.prefill(params, CONFIG, **call)


@pytest.mark.parametrize(
    "token_B, rows, message",
    [
        ([5], 1, "token_B must be an array of integers"),
        (TOKENS, 1, r"shape \[rows\], got int32 of \[1, 2\]"),
        (np.array([0.5]), 1, "got float64"),
        (np.array([5]), 2, "a cache of 2 rows for 1"),
    ],
)
def test_bad_arguments_of_decode_step_raise(params, token_B, rows, message):
    with pytest.raises(xj.InputError, match=message):
        xj.decode_step(params, CONFIG, token_B, xj.init_cache(CONFIG, rows, 8))


BAD_LOOPS = {
    **{
        f"new {value!r}": (dict(max_tokens=value), "max_tokens must be a whole number of at least 1")
        for value in (0, 1.5, True, "3", jnp.array(2.0))
    },
    "new of rows": (dict(max_tokens=np.array([3, 3])), "max_tokens must be an array of integers"),
    **{
        f"size {value!r}": (dict(output_size=value), "output_size must be a whole number of at least 1")
        for value in (0, 1.5)
    },
    "logits": (dict(logits_BV=np.zeros((1, 63), np.float32)), r"floats of the shape \[rows, 64\]"),
    "rows": (dict(cache=xj.init_cache(CONFIG, 2, 8)), "a cache of 2 rows for 1"),
    "capacity": (dict(max_tokens=10), "9 tokens exceed the cache's capacity 8"),
    "key": (dict(row_key_B=0), "key must come from"),
    "settings": (dict(sampling_B={}), "sampling must be"),
    "a setting": (dict(sampling_B=xj.SamplingConfig(temperature="0.7")), "temperature must be"),
    "eos": (dict(eos_ids=5), "eos_ids must be an array of integers"),
    "eos outside": (dict(eos_ids=np.array([64])), "token id 64 is outside"),
    "seen": (
        dict(seen_BV=np.zeros((1, 63), bool)),
        r"seen_BV must be an array of bools of the shape \[1, 64\]",
    ),
    "history": (dict(history_BS=np.zeros(8, int)), "history_BS must be"),
}


def loop(params, **given):
    call = dict(
        logits_BV=np.zeros((1, 64), np.float32), cache=xj.init_cache(CONFIG, 1, 8),
        row_key_B=np.zeros(2, np.uint32), sampling_B=xj.SamplingConfig(), eos_ids=[], max_tokens=4,
    )  # fmt: skip
    return xj.decode_loop(params, CONFIG, **call | given)


@pytest.mark.parametrize("name", BAD_LOOPS)
def test_bad_arguments_of_decode_loop_raise(params, name):
    given, message = BAD_LOOPS[name]
    with pytest.raises(xj.InputError, match=message):
        loop(params, **given)


def test_decode_loop_checks_shapes_in_a_trace(params):
    for given in (jnp.zeros(2, int), jnp.zeros(())):
        with pytest.raises(xj.InputError, match="max_tokens must be"):
            jax.eval_shape(lambda new: loop(params, max_tokens=new, output_size=4).tokens_BT, given)


@pytest.mark.full
def test_a_cache_survives_unless_it_is_donated(params):
    cache = xj.init_cache(CONFIG, 1, 4)
    kept, _ = xj.prefill(params, CONFIG, TOKENS, COUNT, cache)
    again, after = xj.prefill(params, CONFIG, TOKENS, COUNT, cache, donate=True)
    np.testing.assert_array_equal(kept, again)
    assert cache.k[0].is_deleted() and not after.k[0].is_deleted()
    with pytest.raises(xj.InputError, match="the cache was donated"):
        xj.prefill(params, CONFIG, TOKENS, COUNT, cache)


# --- beams --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_beam_search_stats(params):
    found = xj.beam_search(params, CONFIG, **BEAMS)
    stats = found.stats
    assert (stats.rows, stats.prompt_tokens, stats.decode_steps) == (2, 5, 3)
    assert stats.generated_tokens == sum(len(rows[0]) for rows in found.sequences) == 8
    assert stats.decode_tokens == 6 and stats.decode_tokens_per_second > 0
    assert stats.weight_bytes > 0 and stats.peak_bytes > 0
    # Keys and values of two beams a prompt: 2 x [2 prompts x 2 beams, 2 heads, 32 slots, width 8] in float32.
    assert stats.cache_bytes == 2 * 4 * 2 * 32 * 8 * 4
    assert stats.total_seconds >= stats.prefill_seconds + stats.decode_seconds > 0
