"""Grammars by llguidance: answers are valid, masks are those of a slow reference, and other rows keep their
tokens and bits.
"""

import dataclasses
import json
import re

import grammar_cases
import grammar_inputs
import jax
import numpy as np
import pytest
from grammar_cases import CAPACITY, TEXTS
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.errors import NoTokenLeftError
from xinfer_jax.generation import batch_generator
from xinfer_jax.generation.validation import validate_call
from xinfer_jax.grammar.compiler import vocabulary_of
from xinfer_jax.grammar.grammars import with_tokenizer
from xinfer_jax.grammar.matcher import CompiledGrammar
from xinfer_jax.sampling.random_keys import DRAW_TOKEN, gumbel_noise

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="the extra `test` is not installed")

PROMPTS = [[5, 9, 200], [7, 8], [40]]
KEYS = jax.random.split(jax.random.key(4), 3)
HOT = xj.SamplingConfig(temperature=1.5)


@pytest.fixture(scope="module")
def model():
    return grammar_cases.random_model()


@pytest.fixture(scope="module")
def engine(model):
    with xj.Engine(model, rows=4, capacity=CAPACITY, pages=9, chunk=64) as engine:
        yield engine


def options(model, grammar, **more):
    return xj.GenerateOptions(max_tokens=24, capacity=CAPACITY, grammar=bound(model, grammar), **more)


def bound(model, grammar):
    """The tokenizer's. "choice" is an automaton on the device, "lark" the same texts by masks of the host."""
    if grammar == "choice":
        grammar = xj.grammar.choice(TEXTS)
    elif grammar == "lark":
        grammar = xj.grammar.lark(f"start: {' | '.join(map(json.dumps, TEXTS))}")
    return with_tokenizer(grammar, model.tokenizer)


def decode(model, ids):
    ids = [i for i in ids if i not in model.config.eos_token_ids]
    return model.tokenizer.decode(ids, skip_special_tokens=False)


def reference(model, prompt, key, sampling, allowed):
    """Tokens and log-probabilities of one row: a step computes the row anew, masks its logits, and draws."""
    forward = jax.jit(xj.forward, static_argnums=1)
    ids = [*prompt]
    logprobs = []
    while len(ids) < len(prompt) + 24:
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, : len(ids)] = ids
        logits_V = np.asarray(forward(model.params, model.config, tokens)[0][0, len(ids) - 1])
        masked_V = np.where(allowed(ids[len(prompt) :]), logits_V, -np.inf)
        if sampling.temperature:
            noise_V = gumbel_noise(key, len(ids), DRAW_TOKEN, np.arange(len(logits_V)))
            masked_V = masked_V / sampling.temperature + noise_V
        ids.append(int(np.argmax(masked_V)))
        logprobs.append(float(jax.nn.log_softmax(logits_V)[ids[-1]]))
        if ids[-1] in model.config.eos_token_ids:
            return ids[len(prompt) :], logprobs
    raise AssertionError(f"no end in {ids}")


@pytest.mark.parametrize(
    ("grammar", "sampling"),
    full_except([("choice", HOT)], [("lark", xj.SamplingConfig()), ("lark", HOT), ("choice", HOT)]),
)
def test_a_row_is_the_row_decoded_alone_with_masked_logits(model, engine, grammar, sampling):
    """The rows of `generate`, of `stream` and of the engine are compared."""
    allowed = lambda ids: grammar_cases.allowed_in_choice(model, TEXTS, ids)  # noqa: E731
    want = [reference(model, p, key, sampling, allowed) for p, key in zip(PROMPTS, KEYS, strict=True)]
    given = options(model, grammar, sampling=sampling)
    out = xj.generate(model.params, model.config, PROMPTS, given, key=KEYS)
    stream = xj.stream(model.params, model.config, PROMPTS, given, key=KEYS)
    assert [*stream] and stream.output.tokens == out.tokens
    own = xj.GenerateOptions(max_tokens=24, sampling=sampling, grammar=bound(model, grammar))
    served = [engine.submit(p, own, key=key[None]) for p, key in zip(PROMPTS, KEYS, strict=True)]
    assert out.tokens == [ids for ids, _ in want] and set(out.finish_reason) == {"stop"}
    for row, (_, logprobs) in zip(out.logprobs, want, strict=True):
        np.testing.assert_allclose(row, logprobs, atol=2e-5)
    assert [request.result().tokens[0] for request in served] == out.tokens
    assert all(decode(model, ids) in TEXTS for ids in out.tokens)


@pytest.mark.full
@pytest.mark.oldest
def test_the_whole_model_and_drafts_sample_the_same(model):
    """The whole model as one program, prompt look-up in `generate` and in an engine, greedy and sampled."""
    cases = (4, "lark", HOT), (1, "choice", xj.SamplingConfig())
    for rows, grammar, sampling in cases:
        given = options(model, grammar, sampling=sampling)
        want = xj.generate(model.params, model.config, PROMPTS, given, key=KEYS)
        call = validate_call(model.params, model.config, PROMPTS, given, KEYS)
        whole = batch_generator.BatchGenerator(call, decodes_whole=True)
        whole.start()
        whole.decode(24)
        drafted = dataclasses.replace(given, draft="lookup", draft_tokens=2)
        drafts = xj.generate(model.params, model.config, PROMPTS, drafted, key=KEYS)
        for got in (whole.output(), drafts):
            assert got.tokens == want.tokens
            for row, logprobs in zip(got.logprobs, want.logprobs, strict=True):
                np.testing.assert_allclose(row, logprobs, atol=2e-5)
        shape = dict(rows=rows, capacity=CAPACITY, pages=9, chunk=64)
        engine = xj.Engine(model, draft="lookup", draft_tokens=2, **shape)
        own = xj.GenerateOptions(max_tokens=24, sampling=sampling, grammar=bound(model, grammar))
        assert [out.tokens[0] for out in engine.generate(PROMPTS, own, key=KEYS)] == want.tokens
        repeats = (
            xj.grammar.lark("start: /(abc|abd){12}/")
            if grammar == "lark"
            else xj.grammar.regex("(abc|abd){12}")
        )
        long = xj.GenerateOptions(max_tokens=60, sampling=sampling, grammar=repeats)
        (out,) = engine.generate([[5]], long, key=KEYS[0])
        assert out.stats.acceptance[0] > 0 and re.fullmatch("(abc|abd){12}", decode(model, out.tokens[0]))


@pytest.mark.full
def test_other_rows_keep_their_tokens_and_bits(model, engine):
    """The rows run next to constrained rows in one batch and in the engine, greedy and sampled."""
    sampling = [HOT, xj.SamplingConfig(), HOT]
    chosen = bound(model, "lark")
    outs = [
        xj.generate(model.params, model.config, PROMPTS, options(model, grammar, sampling=sampling), key=KEYS)
        for grammar in ([None, None, chosen], [chosen, None, chosen])
    ]
    assert outs[0].tokens[1] == outs[1].tokens[1] and outs[0].logprobs[1] == outs[1].logprobs[1]
    assert outs[0].tokens[2] == outs[1].tokens[2] and outs[0].logprobs[2] == outs[1].logprobs[2]
    assert outs[0].tokens[0] != outs[1].tokens[0]
    constrained = xj.GenerateOptions(max_tokens=24, sampling=HOT, grammar=xj.grammar.regex(r"\d{20}"), n=2)
    by_masks = dataclasses.replace(constrained, grammar=xj.grammar.lark("start: /[0-9]{20}/"))
    alone, beside = [], []
    for found, others in ((alone, 0), (beside, 1)):
        more = [engine.submit([3], constrained, key=KEYS[0]) for _ in range(others)]
        masked = [engine.submit([3], by_masks, key=KEYS[0]) for _ in range(others)]
        for prompt, one, key in zip(PROMPTS, sampling, KEYS, strict=True):
            request = engine.submit(prompt, xj.GenerateOptions(max_tokens=24, sampling=one), key=key)
            found.append((request.result().tokens, request.result().logprobs))
        texts = [decode(model, ids) for request in more for ids in request.result().tokens]
        assert all(re.fullmatch(r"\d{20}", text) for text in texts) and len({*texts}) == len(texts)
        assert [request.result().tokens for request in masked] == [
            request.result().tokens for request in more
        ]
    assert alone == beside


@pytest.mark.full
def test_preempted_rows_continue_their_grammars(model, engine):
    """Rows that lose their slots to urgent ones continue with the same tokens."""
    long = xj.GenerateOptions(max_tokens=100, sampling=HOT, grammar=xj.grammar.lark("start: /[a-c]{70}/"))
    prompts = [*zip(PROMPTS, KEYS, strict=True)] * 2
    alone = [engine.submit(prompt, long, key=key).result().tokens for prompt, key in prompts]
    before = engine.stats.preemptions
    requests = [engine.submit(prompt, long, key=key) for prompt, key in prompts[:4]]
    next(iter(requests[3]))
    requests += [engine.submit(prompt, long, key=key, priority=20) for prompt, key in prompts[4:]]
    assert [request.result().tokens for request in requests] == alone
    assert engine.stats.preemptions > before
    assert all(re.fullmatch("[a-c]{70}", decode(model, ids)) for (ids,) in alone)


def test_answers_are_valid(model, engine):
    """JSON for a schema, and texts for a regular expression; greedy and hot."""
    ended = []
    for i, schema in enumerate(grammar_inputs.schemas(12)):
        for sampling in (xj.SamplingConfig(), HOT):
            grammar = xj.grammar.json_schema(schema)
            given = xj.GenerateOptions(max_tokens=CAPACITY - 8, sampling=sampling, grammar=grammar)
            request = engine.submit(PROMPTS[i % 3], given, key=jax.random.key(i))
            ended.append((request, lambda text, schema=schema: jsonschema.validate(json.loads(text), schema)))
    for i, pattern in enumerate(grammar_inputs.regexes(24)):
        given = xj.GenerateOptions(max_tokens=CAPACITY - 8, sampling=HOT, grammar=xj.grammar.regex(pattern))
        request = engine.submit(PROMPTS[i % 3], given, key=jax.random.key(i))
        check = lambda text, pattern=pattern: re.fullmatch(pattern, text, re.ASCII) or pytest.fail(pattern)  # noqa: E731
        ended.append((request, check))
    count = 0
    for request, check in ended:
        out = request.result()
        if out.finish_reason == ["stop"]:
            check(decode(model, out.tokens[0]))
            count += 1
    print(f"{count} of {len(ended)} answers ended within {CAPACITY - 8} tokens")
    assert count > 0.8 * len(ended)


@pytest.mark.full
def test_processors_and_a_grammar_together(model, engine):
    """Stop ids, biases and log-probabilities. What leaves no token is an error."""
    biased = xj.SamplingConfig(logit_bias={i: -np.inf for i in model.tokenizer.encode("y")})
    out = engine.submit(
        [5], xj.GenerateOptions(max_tokens=24, sampling=biased, grammar=xj.grammar.choice(TEXTS), logprobs=4)
    ).result()
    assert decode(model, out.tokens[0]) in TEXTS[2:]
    first = out.alternatives[0][0]
    allowed = grammar_cases.allowed_in_choice(model, TEXTS, [])
    assert all(allowed[i] for i, p in first.processed_top if np.isfinite(p))
    assert not all(allowed[i] for i, _ in first.top)
    with pytest.raises(NoTokenLeftError, match="leave no token that the grammar allows"):
        least = xj.SamplingConfig(min_tokens=20)
        engine.submit(
            [5], xj.GenerateOptions(max_tokens=24, sampling=least, grammar=xj.grammar.choice(TEXTS))
        ).result()


def test_a_cut_answer_has_the_reason_length(model, engine):
    out = engine.submit([5], xj.GenerateOptions(max_tokens=3, grammar=xj.grammar.regex("a{50}"))).result()
    assert out.finish_reason == ["length"] and set(decode(model, out.tokens[0])) == {"a"}


def test_models_that_reason_are_constrained_after_it(model, engine):
    """They may not end before. The mark's text is found across tokens."""
    grammar = xj.grammar.choice(["yes", "no"], tokenizer=model.tokenizer, reasoning_end="q")
    outs = engine.generate(
        PROMPTS, xj.GenerateOptions(max_tokens=100, sampling=HOT, grammar=grammar), key=KEYS
    )
    found = [decode(model, out.tokens[0]) for out in outs]
    assert any("q" in text for text in found)
    for text in found:
        assert "q" not in text or text.partition("q")[2] in ("yes", "no", "")
    asked = model.tokenizer.encode("q ")
    out = engine.submit(asked, xj.GenerateOptions(max_tokens=9, grammar=grammar)).result()
    assert decode(model, out.tokens[0]) in ("yes", "no")


def test_the_chat_template_says_whether_a_model_reasons(model):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is false %}<think></think>\n{% endif %}{% endif %}"
    )
    backend = model.tokenizer.backend
    tokenizer = xj.Tokenizer(backend, chat_template=template, special_tokens={}, eos_token_ids=[271])
    grammar = xj.grammar.choice(["yes"], tokenizer=tokenizer)
    vocabulary = vocabulary_of(tokenizer, 288)
    ends = [
        vocabulary.reasoning_end(grammar, tokenizer.encode(text))
        for text in (
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}]),
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], enable_thinking=False),
            "a raw text",
        )
    ]
    assert ends[0].ends(tokenizer.encode("x</think>")) and not ends[0].ends(tokenizer.encode("x</thin"))
    assert ends[1:] == [None, None]
    assert vocabulary_of(model.tokenizer, 288).reasoning_end(grammar, [5]) is None


_TERMS = " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(10))
BAD = {
    "unsupported keyword": (xj.grammar.json_schema({"dependentSchemas": {"a": {}}}), "Unimplemented keys"),
    "invalid schema": (xj.grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
    "nothing is valid": (xj.grammar.json_schema({"enum": []}), "Unsatisfiable schema"),
    "look-around": (xj.grammar.regex("(?=a)b"), "look-around"),
    "unclosed": (xj.grammar.regex("[a-z"), "unclosed character class"),
    "matches nothing": (xj.grammar.regex(r"[^\s\S]"), "allows no text"),
    "lark": (xj.grammar.lark("start: foo"), "unknown name"),
    "intersections": (xj.grammar.lark(f"start: A\nA: {_TERMS}"), "9 of & and ~: at most 8"),
    "fuel": (xj.grammar.lark(f"start: A\nA: {_TERMS.rpartition(' & ')[0]}"), "fuel exhausted"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_is_not_served_is_one_line(model, engine, name):
    grammar, words = BAD[name]
    for call in (
        lambda: engine.submit([5], xj.GenerateOptions(max_tokens=4, grammar=grammar)),
        lambda: xj.generate_text(model, "x", xj.GenerateOptions(max_tokens=4, grammar=grammar), raw=True),
    ):
        with pytest.raises(xj.InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


WRONG = {
    "empty choice": (lambda: xj.grammar.choice([]), "choice must be a list"),
    "an empty text": (lambda: xj.grammar.choice(["a", ""]), "choice must be a list"),
    "no JSON": (lambda: xj.grammar.json_schema("{"), "must be JSON"),
    "a list": (lambda: xj.grammar.json_schema([1]), "must be an object"),
    "10 MB": (lambda: xj.grammar.json_schema({"enum": ["x" * 10**7]}), "more than 262144"),
    "no text": (lambda: xj.grammar.regex(""), "must be a text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_rejected_at_once(name):
    make, words = WRONG[name]
    with pytest.raises(xj.InputError, match=words):
        make()


def test_what_does_not_go_with_a_grammar_is_rejected_by_name(model):
    grammar = xj.grammar.choice(["a"], tokenizer=model.tokenizer)
    cases = [
        (dict(grammar="x"), "grammar must be made by"),
        (dict(grammar=xj.grammar.choice(["a"])), "needs the tokenizer"),
        (dict(grammar=[grammar] * 2), "2 grammars for 1 prompts"),
        (dict(grammar=grammar, use_cache=False), "grammar needs the cache"),
        (dict(grammar=grammar, eos_token_ids=()), "grammar needs an EOS id"),
    ]
    for given, words in cases:
        with pytest.raises(xj.InputError, match=words):
            xj.generate(model.params, model.config, [[5]], xj.GenerateOptions(max_tokens=4, **given))


def test_compiled_grammars_are_few(model):
    """The latest ones are kept. An old one is compiled again."""
    vocabulary = vocabulary_of(model.tokenizer, model.config.vocab_size)
    for i in range(400):
        vocabulary.matcher(xj.grammar.json_schema({"const": i}))
    assert len(vocabulary._compiled) <= 256
    assert vocabulary.matcher(xj.grammar.json_schema({"const": 0})).consume_token(
        model.tokenizer.encode("0")[0]
    )


def test_a_tokenizer_wider_than_the_vocabulary(model):
    """Ids beyond the model's logits do not exist: the grammar uses what is left."""
    matcher = CompiledGrammar(bound(model, "lark"), 100).matcher([5], [99])
    ids = model.tokenizer.encode("yes")
    for i in range(len(ids) + 1):
        masks = np.zeros((1, 4), np.uint32)
        matcher.fill(masks)
        found = np.unpackbits(masks.view(np.uint8), bitorder="little")[:100]
        want = grammar_cases.allowed_in_choice(model, TEXTS, ids[:i])[:100]
        want[99] = i == len(ids)
        np.testing.assert_array_equal(found, want)
        matcher.append(ids[i : i + 1])


def test_a_mask_that_fails_ends_its_request(model, engine, monkeypatch):
    def fail(*_):
        raise NoTokenLeftError("too large")

    request = engine.submit([5, 9], xj.GenerateOptions(max_tokens=8, grammar=xj.grammar.json_object()))
    request.result()
    monkeypatch.setattr("xinfer_jax.grammar.matcher.Matcher.fill", fail)
    request = engine.submit([5, 9], xj.GenerateOptions(max_tokens=8, grammar=xj.grammar.json_object()))
    with pytest.raises(NoTokenLeftError, match="too large"):
        for _ in request:
            pass
