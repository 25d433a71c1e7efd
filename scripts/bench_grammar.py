"""What grammars cost: seconds to build one, and time per token beside the same call without, interleaved.

    python scripts/bench_grammar.py --config=qwen2.5-0.5b --tokenizer=DIR --pairs=10

Weights are random. A JSON schema in `stream`, in an engine (masks of the host) and in an engine whose masks
other processes compute, as in a server (pool); a regular expression in `generate` of one row (an automaton on
the device).
"""

from launcher import start

# isort: split
import asyncio
import dataclasses
import json
import statistics
import time

import jax
import numpy as np
from absl import flags
from bench.model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.grammar.compiler import vocabulary_of
from xinfer_jax.grammar.matcher import CompiledGrammar
from xinfer_jax.grammar.pool import GrammarPool

CONFIG = flags.DEFINE_string("config", None, "A built-in shape; default: the bundled model.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "A directory with tokenizer.json, with --config.")
DTYPE = flags.DEFINE_string("dtype", "float32", "float32, bfloat16 or float16.")
PAIRS = flags.DEFINE_integer("pairs", 10, "Interleaved pairs of calls; medians are printed.", lower_bound=1)
NEW = flags.DEFINE_integer("new_tokens", 32, "Tokens of each answer.", lower_bound=2)
ROWS = flags.DEFINE_integer("rows", 8, "Constrained rows of the engine.", lower_bound=1)
PARTS = flags.DEFINE_list("parts", ["build", "stream", "generate", "engine", "pool"], "What to measure.")


def main(argv: list[str]) -> None:
    model = xj.load_model()
    if CONFIG.value:
        config = from_hf(hf_config(CONFIG.value))
        tokenizer = xj.Tokenizer.from_dir(TOKENIZER.value) if TOKENIZER.value else model.tokenizer
        config = dataclasses.replace(config, eos_token_ids=tuple(tokenizer.eos_token_ids))
        params = xj.init_params(config, jax.random.key(0), DTYPE.value)
        model = dataclasses.replace(model, params=params, config=config, tokenizer=tokenizer)
    text = dict(type="string", minLength=8 * NEW.value, maxLength=9 * NEW.value)
    schema = dict(type="object", properties=dict(a=text, b=text), required=["a", "b"])
    of_host = xj.json_schema(schema, tokenizer=model.tokenizer)
    of_device = xj.regex("([a-z]{1,12} )+", tokenizer=model.tokenizer)
    parts = dict(
        build=lambda: build(model, of_host, of_device),
        stream=lambda: compare(lambda grammar: stream(model, grammar), of_host),
        generate=lambda: compare(lambda grammar: generate(model, grammar), of_device),
        engine=lambda: engine(model, of_host),
        pool=lambda: pool(model, of_host),
    )
    for part in PARTS.value:
        print(json.dumps(dict(part=part) | parts[part]()), flush=True)


def build(model: xj.Model, *grammars: xj.Grammar) -> dict:
    """Seconds to read the vocabulary once, then for each grammar and its first mask."""
    began = time.perf_counter()
    vocabulary_of(model.tokenizer, model.config.vocab_size)
    seconds = dict(vocabulary=time.perf_counter() - began)
    for grammar in grammars:
        began = time.perf_counter()
        compiled = CompiledGrammar(grammar, model.config.vocab_size)
        matcher = compiled.matcher([0], model.config.eos_token_ids)
        assert (matcher.dfa is None) == (grammar.kind == "json")
        if matcher.dfa is None:
            matcher.fill(np.zeros((1, -(-model.config.vocab_size // 32)), np.uint32))
        seconds[f"{grammar.kind} and first mask"] = time.perf_counter() - began
    return {name: round(value, 4) for name, value in seconds.items()}


def compare(seconds_per_token, grammar: xj.Grammar) -> dict:
    """Milliseconds per token without and with a grammar, and the median of the ratios of pairs."""
    for one in (None, grammar):
        seconds_per_token(one)  # compiles
    pairs = [(seconds_per_token(None), seconds_per_token(grammar)) for _ in range(PAIRS.value)]
    plain, constrained = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(with_it / without for without, with_it in pairs)
    return dict(plain_ms=round(plain, 3), constrained_ms=round(constrained, 3), ratio=round(ratio, 4))


def options(grammar: xj.Grammar | None, new_tokens: int | None = None) -> xj.GenerateOptions:
    """Options of equally many tokens, with a grammar or without: nothing ends an answer before."""
    new_tokens = new_tokens or NEW.value
    return xj.GenerateOptions(new_tokens, eos_token_ids=None if grammar else (), grammar=grammar)


def stream(model: xj.Model, grammar: xj.Grammar | None) -> float:
    tokens = xj.stream(model.params, model.config, [[5] * 26], options(grammar))
    assert len([*tokens]) == NEW.value
    return tokens.output.stats.tpot_seconds


def generate(model: xj.Model, grammar: xj.Grammar | None) -> float:
    out = xj.generate(model.params, model.config, [[5] * 26], options(grammar, loop_tokens()))
    assert len(out.tokens[0]) == loop_tokens()
    return out.stats.decode_seconds / out.stats.decode_steps


def loop_tokens() -> int:
    """So many that `generate` decodes one row in a loop on the device."""
    return max(NEW.value, 264)


def engine(model: xj.Model, grammar: xj.Grammar) -> dict:
    """Of all rows at the same time."""
    with xj.Engine(model, rows=ROWS.value, capacity=26 + NEW.value + 64, warm_up=True) as served:

        def seconds_per_token(grammar: xj.Grammar | None) -> float:
            prompts = [[5 + i] * 26 for i in range(ROWS.value)]
            requests = served.submit_many(prompts, options(grammar), live=False)
            outs = [request.result() for request in requests]
            return statistics.median(out.stats.decode_seconds / out.stats.decode_steps for out in outs)

        return compare(seconds_per_token, grammar)


def pool(model: xj.Model, grammar: xj.Grammar) -> dict:
    """`engine` with masks of other processes."""
    grammars = GrammarPool(model.tokenizer, model.config.vocab_size)
    try:
        return engine(model, asyncio.run(grammars.compile("", grammar)))
    finally:
        grammars.close()


if __name__ == "__main__":
    start(main)
