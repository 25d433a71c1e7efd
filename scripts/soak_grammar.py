"""Answers to random JSON schemas and regular expressions: all are valid, and most end within 512 tokens.

    python scripts/soak_grammar.py --schemas=300 --regexes=200 --walks=5000

First, walks: schemas on whose edges answers become invalid, and random bytes that their grammars allow.

Each schema is answered by the bundled model and by one of random weights, greedy and at temperature 1.5.
Prints the share of answers that ended, the masks in which the two forms of regular expressions agree, and the
memory after many different schemas.
"""

from launcher import start

# isort: split
import dataclasses
import json
import re
import resource
import time

import jax
import jsonschema
import numpy as np
from absl import flags
from soak.grammar_inputs import regexes, schemas
from soak.schema_walks import walk_schemas

import xinfer_jax as xj
from xinfer_jax.errors import InputError
from xinfer_jax.grammar.compiler import vocabulary_of
from xinfer_jax.grammar.token_masks import next_tokens

SCHEMAS = flags.DEFINE_integer("schemas", 300, "Number of schemas.", lower_bound=0)
REGEXES = flags.DEFINE_integer("regexes", 200, "Number of regular expressions.", lower_bound=0)
DIFFERENT = flags.DEFINE_integer("different", 10_000, "Schemas that are only compiled.", lower_bound=0)
WALKS = flags.DEFINE_integer("walks", 5000, "Schemas whose grammars are walked at random.", lower_bound=0)
ROWS = flags.DEFINE_integer("rows", 16, "Slots of the engine.", lower_bound=1)
NEW = flags.DEFINE_integer("max_tokens", 512, "Most tokens of an answer.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of schemas, expressions and weights.", lower_bound=0)


def main(argv: list[str]) -> None:
    print(json.dumps(walk_schemas(WALKS.value, 8, SEED.value)))
    bundled = xj.load_model()
    weights = xj.init_params(bundled.config, jax.random.key(SEED.value), "float32")
    for name, model in (("bundled", bundled), ("random", dataclasses.replace(bundled, params=weights))):
        with xj.Engine(model, rows=ROWS.value, capacity=NEW.value + 64) as engine:
            for temperature in (0.0, 1.5):
                print(json.dumps(dict(model=name, temperature=temperature) | answer(engine, temperature)))
    print(json.dumps(compare_forms(bundled)))
    print(json.dumps(compile_many(bundled)))


def answer(engine: xj.Engine, temperature: float) -> dict:
    """Submits all schemas and expressions, and checks every answer that its grammar ended."""
    cases = [(xj.json_schema(schema), schema) for schema in schemas(SCHEMAS.value, SEED.value)]
    cases += [(xj.regex(pattern), pattern) for pattern in regexes(REGEXES.value, SEED.value)]
    requests = []
    for i, (grammar, _) in enumerate(cases):
        options = xj.GenerateOptions(NEW.value, xj.SamplingConfig(temperature=temperature), grammar=grammar)
        requests.append(engine.submit("Go on.", options, key=jax.random.key(i)))
    ended = 0
    for request, (_, source) in zip(requests, cases, strict=True):
        out = request.result()
        if out.finish_reason != ["eos"]:
            continue
        ended += 1
        text = engine.model.tokenizer.decode(out.tokens[0], skip_special_tokens=False)
        if isinstance(source, str):
            if not re.fullmatch(source, text, re.ASCII):
                raise InputError(f"{text!r} does not match {source!r}")
        else:
            jsonschema.validate(json.loads(text), source)
    return dict(answers=len(cases), ended=round(ended / max(1, len(cases)), 4))


def compare_forms(model: xj.Model) -> dict:
    """The masks of automata and of llguidance along random answers."""
    size = model.config.vocab_size
    vocabulary = vocabulary_of(model.tokenizer, size)
    automata = 0
    masks = 0
    for i, pattern in enumerate(regexes(REGEXES.value, SEED.value)):
        grammar = xj.regex(pattern, tokenizer=model.tokenizer)
        dfa = vocabulary.automaton(grammar)
        if dfa is None:
            continue
        automata += 1
        matcher = vocabulary.matcher(grammar)
        draw = np.random.default_rng(i)
        state = 0
        for _ in range(24):
            bits = np.unpackbits(next_tokens(matcher, size).view(np.uint8), bitorder="little")
            own = np.append(dfa.next_SC[state, dfa.class_V] >= 0, dfa.next_SC[state, 0] >= 0)
            if not np.array_equal(bits[: size + 1], own):
                raise InputError(f"the masks of {pattern!r} differ in state {state}")
            masks += 1
            if not own[:size].any():
                break
            token = int(draw.choice(np.flatnonzero(own[:size])))
            matcher.consume_token(token)
            state = int(dfa.next_SC[state, dfa.class_V[token]])
    return dict(expressions=REGEXES.value, automata=automata, equal_masks=masks)


def compile_many(model: xj.Model) -> dict:
    """Compiles many different schemas: the memory is bounded."""
    vocabulary = vocabulary_of(model.tokenizer, model.config.vocab_size)
    began = time.perf_counter()
    peaks = []
    for i in range(DIFFERENT.value):
        enum = [f"{i} {j}" for j in range(20)]
        properties = dict(name=dict(type="string", maxLength=20), kind=dict(enum=enum))
        vocabulary.matcher(xj.json_schema(dict(type="object", properties=properties, required=["name"])))
        if i in (DIFFERENT.value // 10, DIFFERENT.value - 1):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    seconds = time.perf_counter() - began
    return dict(different=DIFFERENT.value, seconds=round(seconds, 2), peak_mib_after_a_tenth_and_all=peaks)


if __name__ == "__main__":
    start(main)
