"""Compares two shapes with random weights in interleaved pairs of calls of one row, and measures what a token
of the first costs by position.

    python scripts/bench_pairs.py --config=qwen3.5-0.8b --against=qwen3-as-0.8b
    python scripts/bench_pairs.py --config=qwen3.5-0.8b --curve_lengths=1024,2048,4096,8192,16384,32768

Prints a JSON line for each length. Ratios are tokens per second of --config by those of --against, in each
pair. The curve has the milliseconds per token of the last tokens of a prompt of each length (half as many as
the first length), prefilled in chunks, and of 16 tokens decoded after it.
"""

from launcher import start

# isort: split
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from goodput_flags import positive_numbers
from machine_limits import spread
from model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation.buckets import bucket

CONFIG = flags.DEFINE_string("config", "qwen3.5-0.8b", "A built-in shape, or a directory with config.json.")
AGAINST = flags.DEFINE_string("against", None, "The shape to compare it with.")
LAYERS = flags.DEFINE_integer("layers", None, "Layers of both; None: all.", lower_bound=1)
DTYPE = flags.DEFINE_string("dtype", "float32", "float32, bfloat16 or float16.")
PROMPTS = flags.DEFINE_list("prompt_lengths", ["256", "2048"], "Tokens of the prompts of pairs.")
NEW = flags.DEFINE_integer("new_tokens", 32, "Tokens to decode after each.", lower_bound=2)
PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls, after one that compiles.", lower_bound=1)
CURVE = flags.DEFINE_list("curve_lengths", [], "Tokens of prompts of the curve, the least first.")

Shape = tuple[Any, xj.ModelConfig]  # parameters and config
_DECODED = 16  # tokens over which a point of the curve averages


def main(argv: list[str]) -> None:
    first = create(CONFIG.value)
    if AGAINST.value:
        second = create(AGAINST.value)
        for tokens in positive_numbers(PROMPTS):
            print(json.dumps(compare([first, second], int(tokens))), flush=True)
        del second
    if CURVE.value:
        lengths = [int(length) for length in positive_numbers(CURVE)]
        next(cost_by_length(first, lengths))  # compiles
        for point in cost_by_length(first, lengths):
            print(json.dumps(point), flush=True)


def create(name: str) -> Shape:
    hf = hf_config(name)
    config = from_hf(hf | dict(num_hidden_layers=LAYERS.value or hf["num_hidden_layers"]))
    return xj.init_params(config, jax.random.key(0), DTYPE.value), config


def compare(models: Sequence[Shape], tokens: int) -> dict[str, Any]:
    """Tokens per second of both models after a prompt of so many tokens, and the ratios of pairs."""
    prompt = random_tokens(tokens)
    rounds = [[call(model, prompt, NEW.value).stats for model in models] for _ in range(PAIRS.value + 1)]
    found: dict[str, Any] = dict(prompt_tokens=tokens, new_tokens=NEW.value)
    for phase in ("prefill", "decode"):
        rates = [[getattr(stats, f"{phase}_tokens_per_second") for stats in pair] for pair in rounds[1:]]
        found[f"{phase}_tok_s"] = [spread(of_model) for of_model in zip(*rates, strict=True)]
        found[f"{phase}_ratio"] = spread([first / second for first, second in rates])
    return found


def cost_by_length(model: Shape, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The curve. The prompt grows: each length prefills only what it has beyond the one before."""
    tokens: list[int] = []
    prefix = None
    for length in lengths:
        for end, new in ((length - lengths[0] // 2, 1), (length, 1 + _DECODED)):
            tokens += random_tokens(end - len(tokens))
            cached = dict(capacity=bucket(lengths[-1] + _DECODED), prefix=prefix, keep_prefix=True)
            out = call(model, tokens, new, **cached)
            prefix = out.prefix
            tokens += out.tokens[0][:-1]  # the last one is not in the cache
        prefill_s = 1 / out.stats.prefill_tokens_per_second
        yield dict(length=length, prefill_ms=1e3 * prefill_s, decode_ms=1e3 * out.stats.tpot_seconds)


def call(model: Shape, prompt: list[int], new: int, **more: Any) -> xj.GenerateOutput:
    return xj.generate(*model, [prompt], xj.GenerateOptions(new, eos_token_ids=(), **more))


def random_tokens(count: int) -> list[int]:
    return np.random.RandomState(count).randint(0, 64, count).tolist()


if __name__ == "__main__":
    start(main)
