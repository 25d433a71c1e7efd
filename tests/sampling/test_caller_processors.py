"""Callers' functions in `decode_loop`: processors against settings, `sample`, `stop`, and mistakes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from quick import full_except
from small_models import build, prompts

import xinfer_jax as xj
from xinfer_jax.errors import InputError
from xinfer_jax.generation import functional

pytestmark = pytest.mark.oldest

B, N, V = 3, 8, 120
KEY = jax.random.key(7)
SAMPLED = xj.SamplingConfig(temperature=1.2, top_k=30, top_p=0.9)


@pytest.fixture(scope="module")
def decode():
    params, config = build("qwen2", num_hidden_layers=1)
    cache = xj.init_cache(config, B, 32)
    tokens_BT = np.array(prompts(6, 6, 6))
    logits_BV, cache = xj.prefill(params, config, tokens_BT, np.full(B, 6), cache)

    def call(sampling=SAMPLED, eos=(), **how):
        return xj.decode_loop(params, config, logits_BV, cache, KEY, sampling, np.array(eos, int), N, **how)

    return call


def add_bias(bias_BV, logits_BV, context):
    return logits_BV + bias_BV


def count(counts_BV, token_B, context):
    return counts_BV.at[jnp.arange(len(token_B)), token_B].add(1)


BIAS = xj.LogitsProcessor(None, add_bias)
PRESENCE = xj.LogitsProcessor(
    lambda penalty_B, context: dict(penalty=penalty_B, count=jnp.zeros(context.seen_BV.shape, int)),
    lambda state, logits_BV, context: logits_BV - state["penalty"][:, None] * (state["count"] > 0),
    lambda state, token_B, context: state | dict(count=count(state["count"], token_B, context)),
)


def keep(state, logits_BV, context):
    return logits_BV


IDENTITY = xj.LogitsProcessor(None, keep)


def same(one, other):
    for name in ("tokens_BT", "finished_B"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.logprobs_BT, other.logprobs_BT, rtol=1e-6)


@pytest.mark.full
def test_processors_equal_settings(decode):
    bias_BV = np.random.RandomState(0).standard_normal((B, V)).astype(np.float32) * 3
    bias = {i: float(bias_BV[0, i]) for i in range(V)}
    biased = xj.SamplingConfig(**vars(SAMPLED) | dict(logit_bias=bias))
    same(decode(processors=[(BIAS, bias_BV[:1].repeat(B, 0))]), decode(biased))
    penalized = xj.SamplingConfig(**vars(SAMPLED) | dict(presence_penalty=4.0))
    same(decode(processors=[(PRESENCE, 4.0)]), decode(penalized))
    same(decode(processors=[(IDENTITY, ())]), decode())


def test_last_processors_get_what_is_sampled_from(decode):
    """The filters have run. Recorded log-probabilities are those of what they return."""

    def keep_best(_, logits_BV, context):
        assert logits_BV.shape == (B, V)
        return jnp.where(logits_BV == logits_BV.max(-1, keepdims=True), logits_BV, -jnp.inf)

    got = decode(processors=[(xj.LogitsProcessor(None, keep_best, last=True), ())], logprobs=1)
    np.testing.assert_array_equal(got.tokens_BT, decode(xj.SamplingConfig()).tokens_BT)
    np.testing.assert_array_equal(got.alternatives.processed_logprobs_BT, 0)


@pytest.mark.full
def test_sample_in_place_of_the_draw(decode):
    best = decode(sample=lambda key_B, logits_BV, context: jnp.argmax(logits_BV, -1).astype(jnp.int32))
    same(best, decode(xj.SamplingConfig()))

    def draw(key_B, logits_BV, context):
        return jax.vmap(jax.random.categorical)(key_B, logits_BV).astype(jnp.int32)

    one, other = decode(sample=draw), decode(sample=draw)
    same(one, other)
    assert not np.array_equal(one.tokens_BT, decode().tokens_BT)


def test_stop_ends_rows(decode):
    """The first token counts. The token at which a row ends is its last."""
    want = np.asarray(decode().tokens_BT)
    stops_at = want[np.arange(B), [0, 2, 5]]
    got = decode(stop=lambda state: (state.token_B == stops_at) & (state.length_B > 0))
    first = [list(row).index(token) + 1 for row, token in zip(want, stops_at, strict=True)]
    np.testing.assert_array_equal(got.length_B, first)
    assert np.all(got.finished_B)
    for row, expected, n in zip(np.asarray(got.tokens_BT), want, first, strict=True):
        np.testing.assert_array_equal(row, np.where(np.arange(N) < n, expected, 0))


@pytest.mark.full
def test_arguments_are_traced(decode):
    """Other arguments compile nothing; vmap maps over them; in a caller's jit."""
    decode(processors=[(PRESENCE, 1.0)])
    before = functional._LOOP.keeping._cache_size()
    alone = [decode(processors=[(PRESENCE, penalty)]).tokens_BT for penalty in (0.5, 8.0)]
    alone.append(decode(processors=[(PRESENCE, np.float32([0.5, 8.0, 0.5]))]).tokens_BT)
    assert functional._LOOP.keeping._cache_size() == before
    mapped = jax.jit(jax.vmap(lambda penalty: decode(processors=[(PRESENCE, penalty)]).tokens_BT))
    np.testing.assert_array_equal(mapped(jnp.float32([0.5, 8.0])), alone[:2])
    np.testing.assert_array_equal(alone[2], [alone[0][0], alone[1][1], alone[0][2]])


def wrong_shape(_, logits_BV, context):
    return logits_BV[:, :-1]


def wrong_dtype(_, logits_BV, context):
    return logits_BV.astype(jnp.bfloat16)


def nothing(*_):
    return None


def takes_a_branch(_, logits_BV, context):
    return logits_BV if logits_BV[0, 0] > 0 else -logits_BV


KEPT = []


def keeps_a_tracer(_, logits_BV, context):
    jax.eval_shape(KEPT.append, logits_BV)
    return logits_BV + KEPT[-1]


def given(arguments=(), init=None, apply=add_bias, update=None):
    return dict(processors=[(xj.LogitsProcessor(init, apply, update), arguments)])


ONES = np.ones((B, V), np.float32)
MISTAKES = [
    (given(apply=wrong_shape), r"apply wrong_shape returned float32\[3, 119\], expected float32\[3, 120\]"),
    (given(apply=wrong_dtype), r"apply wrong_dtype returned bfloat16\[3, 120\], expected float32"),
    (given(apply=takes_a_branch), "apply takes_a_branch cannot be traced: Attempted boolean conversion"),
    (given(apply=keeps_a_tracer), "keeps_a_tracer: a function of yours uses a traced value of another call"),
    (given(apply=nothing), "apply nothing returned no array, expected float32"),
    (given(ONES, update=nothing), "update nothing returned no array"),
    (given([ONES], apply=keep, update=lambda *_: ONES), r"update .* in PyTreeDef\(\*\), expected float32"),
    (given(init=lambda *_: jnp.ones(2)), "init .* returned an array of shape .2,., expected 3 rows in front"),
    (given(ONES[:2]), r"processors: arguments of shape \(2, 120\), for 3 rows"),
    (given("abc"), "processors: arguments must be a pytree of numbers or arrays, got 'abc'"),
    (given({1, 2}), "processors: arguments must be a pytree of numbers or arrays, got {1, 2}"),
    (given([1.0, 2.0, 3.0]), "must be an array, as np.array makes of a list, got .1.0, 2.0, 3.0."),
    (given(2**40), "processors: arguments must be a pytree of numbers or arrays, got 1099511627776"),
    (
        dict(processors=BIAS),
        "processors must be a list of .LogitsProcessor, arguments of the rows., got an entry",
    ),
    (dict(sample=3), "sample must be a function with a hash, got 3"),
    (
        dict(sample=lambda _, logits_BV, __: logits_BV),
        r"sample .* returned float32\[3, 120\], expected int32",
    ),
    (dict(stop=lambda state: state.token_B), r"stop .* returned int32\[3\], expected bool\[3\]"),
    (dict(stop=3), "stop must be a function with a hash, got 3"),
]


@pytest.mark.parametrize(("how", "message"), MISTAKES)
def test_mistakes_are_named(decode, how, message):
    with pytest.raises(InputError) as error:
        decode(**how)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


@pytest.mark.parametrize("how", [dict(init=3), dict(apply=None), dict(update=3), dict(last="x")], ids=str)
def test_a_processor_has_functions(how):
    ((name, value),) = how.items()
    with pytest.raises(InputError, match=f"{name} of a LogitsProcessor must be .*, got {value!r}"):
        xj.LogitsProcessor(**dict(init=None, apply=add_bias) | how)


@pytest.mark.full
def test_each_function_has_keys_of_its_own(decode):
    """Each position has its own keys too."""

    def draw(key_B):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, V))(key_B)

    def record(state, token_B, context):
        at_B = context.num_generated_B
        return jnp.asarray(state).at[jnp.arange(B), at_B].set(draw(context.key_B))

    recorder = xj.LogitsProcessor(lambda _, context: jnp.zeros((B, N), int), IDENTITY.apply, record)
    got = decode(processors=[(recorder, ()), (recorder, ())], sample=lambda key_B, *_: draw(key_B))
    of_functions = [*got.context.callers.states, got.tokens_BT]
    for numbers_BN in of_functions:
        assert len(np.unique(numbers_BN)) > B * N / 2
    for i in range(3):
        assert (np.asarray(of_functions[i]) == np.asarray(of_functions[i - 1])).sum() < B * N / 4


def force(_, logits_BV, context):
    return logits_BV.at[:, 5].set(jnp.inf).at[:, 0].set(jnp.nan)


def only_forbidden(_, logits_BV, context):
    return jnp.where(jnp.arange(V) == 5, logits_BV, -jnp.inf)


def no_number(_, logits_BV, context):
    return logits_BV * jnp.nan


OTHERS = [xj.SamplingConfig(temperature=1.0, min_p=0.1), xj.SamplingConfig()]


@pytest.mark.full
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sampling", full_except([SAMPLED], [SAMPLED, *OTHERS], soak=OTHERS), ids=str)
def test_numbers_that_are_not_finite(decode, sampling, last):
    """+inf forces a token. A row keeps its logits where no token that is allowed is left. NaN is a mistake,
    but where a token is forbidden already.
    """
    forbidden = dataclasses.replace(sampling, forbidden_token_ids=(0, 5))
    without = dataclasses.replace(sampling, forbidden_token_ids=(0,))
    broken = [(IDENTITY, ()), (xj.LogitsProcessor(None, no_number, last=last), ())]
    forced = [(xj.LogitsProcessor(None, force, last=last), ())]
    done = decode(sampling, processors=broken)
    assert np.all(np.asarray(done.tokens_BT) == -2) and np.all(np.isnan(done.logprobs_BT))
    if last:
        assert np.all(np.asarray(decode(without, processors=forced).tokens_BT) == 5)
        assert not np.isin(decode(forbidden, processors=forced).tokens_BT, [0, 5]).any()
    given = [(xj.LogitsProcessor(None, only_forbidden, last=last), ())]
    same(decode(forbidden, processors=given), decode(forbidden))


@pytest.mark.full
def test_processors_beside_a_grammar_and_donated():
    """A grammar's tokens are the only ones, whatever a processor prefers."""
    model = tiny.shallow_model()
    params, config, tok = model.params, model.config, model.tokenizer
    ids = tok.encode("The capital of Spain is")
    cache = xj.init_cache(config, 1, 32)
    logits_BV, cache = xj.prefill(params, config, np.array([ids]), np.array([len(ids)]), cache)
    bias_BV = np.zeros((1, config.vocab_size), np.float32)
    bias_BV[0, tok.encode(" Rome")] = np.inf
    settings = KEY, xj.SamplingConfig(temperature=1.0), np.array(config.eos_token_ids), 8
    how = dict(
        grammar=xj.grammar.compile_dfa(" (Madrid|Havana)", tok), processors=[(BIAS, bias_BV)], donate=True
    )
    got = xj.decode_loop(params, config, logits_BV, cache, *settings, **how)
    text = tok.decode(np.asarray(got.tokens_BT)[0, : got.length_B[0] - 1].tolist())
    assert text in (" Madrid", " Havana") and got.finished_B.all()


@pytest.mark.full
def test_generate_and_stream_take_processors(decode):
    """Arguments of each prompt, for all its answers; with the prompts' tokens; both ways to decode."""
    params, config = build("qwen2")
    ids = prompts(6, 4)
    both = dict(sampling=SAMPLED, eos_token_ids=(), n=2)

    def run(call=xj.generate, new=N, **how):
        options = xj.GenerateOptions(max_tokens=new, **both | how)
        return call(params, config, ids, options, key=KEY)

    penalty_B = np.float32([30.0, 9.0])
    wanted = [xj.SamplingConfig(**vars(SAMPLED) | dict(presence_penalty=float(x))) for x in penalty_B]
    given = [(PRESENCE, penalty_B)]
    want = run(sampling=wanted)
    assert run(processors=given).tokens == want.tokens
    long = run(processors=given, new=80).tokens  # in one program
    assert long == run(sampling=wanted, new=80).tokens != run(new=80).tokens
    streamed = run(xj.stream, processors=given)
    assert [list(step) for step in zip(*want.tokens, strict=True)] == [list(step) for step in streamed]

    def only_history(_, logits_BV, context):
        of_prompt_BV = context.history_BS[:, :4, None] == jnp.arange(V)
        return jnp.where(of_prompt_BV.any(1), logits_BV, -jnp.inf)

    answers = run(processors=[(xj.LogitsProcessor(None, only_history), ())]).tokens
    assert all(set(answer) <= set(ids[i // 2][:4]) for i, answer in enumerate(answers))
    nan = xj.LogitsProcessor(None, lambda nan_B, logits_BV, context: logits_BV + nan_B[:, None])
    for how, message in (
        (dict(processors=[(PRESENCE, np.ones(3))]), "arguments of shape .3,., for 2 rows"),
        (
            dict(processors=[*given, (nan, np.float32([0, np.nan]))]),
            "row 2, step 0: apply .*lambda.* of a processor returned nan",
        ),
    ):
        with pytest.raises(InputError, match=message):
            run(**dict(processors=given) | how)


@pytest.mark.full
def test_beams_take_processors():
    """Their states follow the beams: one with counts of tokens equals the setting."""
    params, config = build("qwen2")
    how = dict(num_beams=3, max_tokens=6, eos_token_ids=[5], key=KEY)

    def search(sampling=SAMPLED, **more):
        return xj.beam_search(params, config, prompts(6, 4), sampling=sampling, **how | more)

    want = search(xj.SamplingConfig(**vars(SAMPLED) | dict(presence_penalty=-4.0)))
    got = search(processors=[(PRESENCE, np.float32([-4.0, -4.0]))])
    assert got.sequences == want.sequences != search().sequences
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
    nan = xj.LogitsProcessor(None, lambda nan_B, logits_BV, context: logits_BV + nan_B[:, None])
    with pytest.raises(InputError, match="row 1, step 0: the scores are nan: .*; or apply .*lambda.* of a"):
        search(processors=[(nan, np.float32([0, np.nan]))])
