"""Compares speculative with plain decoding: tokens per second, interleaved, at given acceptance rates.

    python scripts/bench_speculative.py --config=qwen2.5-0.5b --quantize=int8 --acceptance=0.6,0.8,1

Draft tokens are those of the plain answer, made wrong at random, so that the acceptance rate is known.
Drafting costs nothing, as with prompt lookup. Without --config, the checkpoint --model answers --prompt with
draft tokens of prompt lookup, so the acceptance rate is a real one.
"""

from launcher import start

# isort: split
import json
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.text import encode_prompt

CONFIG = flags.DEFINE_string(
    "config", None, "A built-in shape (random weights) or a directory with a config.json."
)
MODEL = flags.DEFINE_string(
    "model", None, "A checkpoint instead: a directory or a name on the hub. Default: the bundled model."
)
PROMPT = flags.DEFINE_string("prompt", "What is the capital of France? And of Spain?", "Prompt, for --model.")
RAW = flags.DEFINE_boolean("raw", False, "Do not apply the chat template.")
DTYPE = flags.DEFINE_string("dtype", "float32", "float32, bfloat16 or float16.")
QUANTIZE = flags.DEFINE_string("quantize", None, "int8 or int4.")
ACCEPTANCE = flags.DEFINE_list(
    "acceptance", ["0.8"], "Probabilities that a draft token is right, with --config."
)
DRAFT_TOKENS = flags.DEFINE_list("draft_tokens", ["2", "3", "4"], "Numbers of draft tokens per pass.")
NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens per answer.", lower_bound=2)
REPEATS = flags.DEFINE_integer("repeats", 3, "Repetitions; medians are printed.", lower_bound=1)


def main(argv: list[str]) -> None:
    print(json.dumps(run()))


def run() -> dict:
    counts = numbers(DRAFT_TOKENS, int)
    rates = numbers(ACCEPTANCE, float)
    if CONFIG.value:
        config = from_hf(hf_config(CONFIG.value))
        params = xj.init_params(config, jax.random.key(0), DTYPE.value, QUANTIZE.value)
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, 26).tolist()
    else:
        model = xj.load_model(MODEL.value, dtype=DTYPE.value, quantize=QUANTIZE.value)
        params = model.params
        config = model.config
        prompt = encode_prompt(model, PROMPT.value, raw=RAW.value)

    def answer(**draft) -> xj.GenerateOutput:
        return xj.generate(params, config, [prompt], xj.GenerateOptions(NEW.value, eos_token_ids=(), **draft))

    plain = answer().tokens[0]
    ways = {"plain": {}}
    for count in counts:
        for rate in rates if CONFIG.value else [None]:
            draft = "lookup" if rate is None else noisy_drafter(plain, len(prompt), rate, config.vocab_size)
            ways[f"{count} draft tokens" + ("" if rate is None else f", {rate:.0%} right")] = dict(
                draft=draft, draft_tokens=count
            )
    runs = {name: [answer(**way) for _ in range(2)][1:] for name, way in ways.items()}  # the first compiles
    for _ in range(REPEATS.value - 1):
        for name, way in ways.items():
            runs[name].append(answer(**way))
    label = (
        f"{CONFIG.value or MODEL.value or 'bundled model'}, {QUANTIZE.value or DTYPE.value}, jax"
        f" {jax.__version__}"
    )
    print(
        f"{label}; medians of {REPEATS.value}; tokens equal to plain decoding are counted up to the first"
        " that differs by rounding"
    )
    results = {}
    for name, outs in runs.items():
        speed = statistics.median(out.stats.decode_tokens_per_second for out in outs)
        ratio = statistics.median(
            a.stats.decode_tokens_per_second / b.stats.decode_tokens_per_second
            for a, b in zip(outs, runs["plain"], strict=True)
        )
        accepted = outs[0].stats.acceptance
        same = next(
            (i for i, pair in enumerate(zip(outs[0].tokens[0], plain, strict=True)) if pair[0] != pair[1]),
            len(plain),
        )
        results[name] = {
            "tokens_per_second": speed,
            "ratio": ratio,
            "acceptance": accepted and accepted[0],
            "same_tokens": same,
        }
        share = "" if accepted is None else f"{accepted[0]:5.0%} accepted, {outs[0].stats.passes[0]} passes, "
        print(f"{name:28s} {speed:8.1f} tok/s {ratio:6.2f} x  {share}{same} of {len(plain)} tokens the same")
    return {
        "command": "python " + " ".join(sys.argv),
        "what": label,
        "new_tokens": NEW.value,
        "results": results,
    }


def numbers(flag: flags.FlagHolder, kind: type) -> list:
    try:
        return [kind(entry) for entry in flag.value]
    except ValueError as error:
        raise xj.InputError(
            f"--{flag.name}={','.join(flag.value)}: give numbers, with commas between"
        ) from error


def noisy_drafter(answer: list[int], start: int, rate: float, vocab_size: int):
    """A draft function that returns the tokens of the answer, each of them right with probability `rate`."""
    right = np.random.default_rng(1).random(len(answer) + 64) < rate
    known = jnp.array(
        np.where(right, np.pad(answer, (0, 64)), (np.pad(answer, (0, 64)) + 1) % vocab_size), jnp.int32
    )
    return lambda history_BS, length_B, count: known[length_B[:, None] - start + jnp.arange(count)]


if __name__ == "__main__":
    start(main)
