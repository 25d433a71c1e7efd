"""The pure form of grammars: automata over tokens, equal to the form of the host, in a caller's jit, under
vmap and in engines.
"""

import random
import re

import grammar_cases
import grammar_inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammar_cases import CAPACITY, TEXTS

import xinfer_jax as xj
from xinfer_jax.grammar.byte_automaton import byte_automaton
from xinfer_jax.grammar.compiler import Vocabulary, vocabulary_of
from xinfer_jax.grammar.matcher import CompiledGrammar, DfaMatcher
from xinfer_jax.grammar.regex_parser import NotRegularError, parse_regex

pytestmark = pytest.mark.oldest

PROMPTS = [[5, 9, 200], [7, 8], [40]]
KEYS = jax.random.split(jax.random.key(4), 3)
HOT = xj.SamplingConfig(temperature=1.5)
PATTERN = r"(\d{3}|[é-ü]{2,4}x?|th+e)-\w{2}"


@pytest.fixture(scope="module")
def model():
    return grammar_cases.random_model()


def texts(model, rows):
    return [model.tokenizer.decode([i for i in row if i], skip_special_tokens=True) for row in rows]


def test_the_byte_automaton_is_the_expression():
    letters = "abth19 f.+\n日éüxZ_-/A"
    served = 0
    for pattern in grammar_inputs.regexes(60, seed=1):
        try:
            next_SX, accepts_S = byte_automaton(parse_regex(pattern))
        except NotRegularError:
            continue
        served += 1
        draw = random.Random(pattern)
        for _ in range(60):
            text = "".join(draw.choice(letters) for _ in range(draw.randint(0, 6)))
            state = 0
            for byte in text.encode():
                state = next_SX[state, byte] if state >= 0 else -1
            matches = re.fullmatch(pattern, text, re.ASCII) is not None
            assert (state >= 0 and accepts_S[state]) == matches, (pattern, text)
    assert served > 40


def test_the_masks_are_those_of_the_host(model, monkeypatch):
    """The masks are equal at each step of random answers."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    vocabulary = vocabulary_of(model.tokenizer, model.config.vocab_size)
    compared = 0
    served = 0
    for i, pattern in enumerate(grammar_inputs.regexes(30, seed=2)):
        grammar = xj.grammar.regex(pattern, tokenizer=model.tokenizer)
        dfa = vocabulary.automaton(grammar)
        if dfa is None:
            continue
        served += 1
        host = CompiledGrammar(grammar, model.config.vocab_size)
        monkeypatch.setattr(host, "_dfa", None)
        matcher = host.matcher([5], [0])
        draw = np.random.RandomState(i)
        state = 0
        for _ in range(12):
            masks = np.zeros((1, 9), np.uint32)
            matcher.fill(masks)
            found = np.unpackbits(masks.view(np.uint8), bitorder="little")[:288].astype(bool)
            class_V = dfa.class_V.copy()
            class_V = np.append(class_V, np.ones(288 - len(class_V), int))
            class_V[0] = 0
            np.testing.assert_array_equal(found, dfa.next_SC[state, class_V] >= 0, pattern)
            compared += 1
            if not found[1:].any():
                break
            token = int(draw.choice(np.flatnonzero(found[1:]))) + 1
            matcher.append([token])
            state = dfa.next_SC[state, class_V[token]]
    print(f"{compared} masks of {served} expressions are equal")
    assert served > 15


@pytest.mark.full
def test_decode_loop_in_a_callers_jit_and_under_vmap(model):
    """One automaton for all rows, one per row, and traced ones. The tokens are those of `generate`."""
    config = model.config
    eos = config.eos_token_ids
    dfas = [
        xj.grammar.compile_dfa(PATTERN, model.tokenizer),
        xj.grammar.compile_dfa(xj.grammar.choice(TEXTS), model.tokenizer),
        None,
    ]
    tokens = np.zeros((3, 4), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def run(params, temperature, grammar):
        cache = xj.init_cache(config, 3, CAPACITY)
        logits, cache = xj.prefill(params, config, tokens, np.array([*map(len, PROMPTS)]), cache)
        sampling = xj.SamplingConfig(temperature=temperature)
        return xj.decode_loop(
            params, config, logits, cache, KEYS, sampling, eos, 24, grammar=grammar
        ).tokens_BT

    for temperature in (0.0, 1.5):
        sampling = xj.SamplingConfig(temperature=temperature)
        grammars = [
            xj.grammar.regex(PATTERN, tokenizer=model.tokenizer),
            xj.grammar.choice(TEXTS, tokenizer=model.tokenizer),
            None,
        ]
        given = xj.GenerateOptions(max_tokens=24, sampling=sampling, capacity=CAPACITY, grammar=grammars)
        want = xj.generate(model.params, config, PROMPTS, given, key=KEYS).tokens
        found = np.asarray(run(model.params, temperature, dfas))
        assert [[i for i in row[: len(ids)]] for row, ids in zip(found, want, strict=True)] == want
        assert all(row[len(ids) - 1] in eos for row, ids in zip(found[:2], want, strict=False))
        assert re.fullmatch(PATTERN, texts(model, want)[0], re.ASCII) and texts(model, want)[1] in TEXTS
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), dfas[1])
    both = jax.vmap(lambda temperature, dfa: run(model.params, temperature, dfa))(
        jnp.array([0.0, 1.5]), stacked
    )
    assert {text for of_one in both for text in texts(model, np.asarray(of_one).tolist())} <= {*TEXTS}


@pytest.mark.full
def test_both_forms_sample_the_same_in_an_engine(model, monkeypatch):
    """A row with an automaton decodes several steps a call, beside rows with masks and rows without."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    with xj.Engine(model, rows=4, capacity=CAPACITY, pages=9, chunk=64) as engine:
        counts = []
        decode = engine.core.device.decode
        monkeypatch.setattr(
            engine.core.device,
            "decode",
            lambda pages, steps, *args: counts.append(steps) or decode(pages, steps, *args),
        )

        def ask():
            asked = [xj.grammar.regex(r"[a-z]{40}"), xj.grammar.regex(PATTERN), None]
            given = [
                xj.GenerateOptions(max_tokens=60, sampling=HOT, grammar=grammar, n=2) for grammar in asked
            ]
            outs = [engine.submit(p, o, key=k).result() for p, o, k in zip(PROMPTS, given, KEYS, strict=True)]
            return [(out.tokens, out.logprobs) for out in outs]

        with_automata = ask()
        steps = max(counts)
        assert isinstance(
            CompiledGrammar(xj.grammar.regex("a", tokenizer=model.tokenizer), 288).matcher([5], [0]),
            DfaMatcher,
        )
        monkeypatch.setattr(Vocabulary, "automaton", lambda self, grammar: None)
        counts.clear()
        assert ask() == with_automata and steps > 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?i)a", "a group with"), (r"\bfoo", r"\\\\b"), ("a{1,1000000}", "more than 20000 parts"),
        ("(a|b)*a(a|b){20}", "more than 512 states"), ("[a-z", "ends too soon"),
        (r"[^\s\S]", "no text matches"),
        (xj.grammar.json_object(), "takes a regular expression"),
    ],
)  # fmt: skip
def test_what_has_no_automaton_is_rejected_by_name(model, pattern, why):
    with pytest.raises(xj.InputError, match=why):
        xj.grammar.compile_dfa(pattern, model.tokenizer)


def test_wrong_grammars_of_decode_loop(model):
    config = model.config
    cache = xj.init_cache(config, 2, 16)
    logits = np.zeros((2, config.vocab_size), np.float32)
    dfa = xj.grammar.compile_dfa("a", model.tokenizer)
    for grammar, eos, why in (
        (xj.grammar.regex("a"), [1], "must be from dfa"),
        ([dfa], [1], "1 grammars"),
        (dfa, [], "EOS"),
    ):
        with pytest.raises(xj.InputError, match=why):
            xj.decode_loop(
                model.params, config, logits, cache, KEYS[:2], xj.SamplingConfig(), eos, 4, grammar=grammar
            )


@pytest.mark.parametrize(
    "pattern", ["(){1000000}", "((){9999}){9999}", "(" * 3000 + ")" * 3000, "a{9999999}"]
)
def test_hostile_expressions_take_no_time(pattern):
    with pytest.raises(NotRegularError):
        byte_automaton(parse_regex(pattern))
