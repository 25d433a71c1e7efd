"""Whether an engine keeps its promise: requests drawn at random, together and each alone, must have the same
tokens and log-probabilities, bit for bit; those of `generate` must be the same tokens.

    python scripts/check_engine.py                    # the bundled checkpoint, 300 requests
    python scripts/check_engine.py --families=qwen2,gemma3,qwen3_moe --quantize=none,int8,int4

Arrivals are Poisson; lengths, settings, cancels, deadlines and shared beginnings are drawn; few pages force
preemption. "By the margin rule": a token of `generate` may differ where the two likeliest are nearer to each
other than --margin, since its programs are others. Exit code 1: something differs.
"""

from one_line import start

# isort: split
import json
import random

from absl import flags
from check_engine_requests import SHAPES, check, draw, random_model

import xinfer_jax as xj
from xinfer_jax.errors import InputError

MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled one.")
FAMILIES = flags.DEFINE_list("families", [], "Small random models instead: qwen2, gemma3, qwen3_moe.")
QUANTIZE = flags.DEFINE_list("quantize", ["none"], "Of the weights: none, int8 or int4; several in turn.")
CACHE = flags.DEFINE_string("cache_dtype", None, "Of keys and values.")
DRAFT = flags.DEFINE_string("draft", None, "lookup: the engine guesses.")
REQUESTS = flags.DEFINE_integer("requests", 300, "How many.", lower_bound=1)
COMPARED = flags.DEFINE_integer("compared", 20, "With how many of them generate is asked too.", lower_bound=0)
LONGEST = flags.DEFINE_integer("longest", 600, "Tokens of a prompt.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 4, "Of the engine.", lower_bound=1)
PAGES = flags.DEFINE_integer("pages", 24, "Of the engine; few: rows are preempted.", lower_bound=2)
CHUNK = flags.DEFINE_integer("chunk", 128, "Of the engine.", lower_bound=64)
RATE = flags.DEFINE_float("rate", 30, "Arrivals a second.", lower_bound=0)
MARGIN = flags.DEFINE_float("margin", 2e-4, "In logits; see above.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Of all that is drawn.")


def main(argv: list[str]) -> int:
    wrong = 0
    for name, model in models():
        shape = dict(cache_dtype=CACHE.value, draft=DRAFT.value, rows=ROWS.value, pages=PAGES.value)
        shape |= dict(chunk=CHUNK.value, capacity=min(1024, model.config.context_length))
        rng = random.Random(SEED.value)
        asked = draw(rng, model.config.vocab_size, REQUESTS.value, LONGEST.value, shape)
        found = check(model, asked, shape, rng, RATE.value, COMPARED.value, MARGIN.value)
        print(json.dumps(dict(model=name, **found)))
        wrong += found["differ"] + found["differ_from_generate"]
    return int(wrong > 0)


def models():
    if not FAMILIES.value:
        for how in QUANTIZE.value:
            yield how, xj.load_model(MODEL.value, quantize=None if how == "none" else how)
    for family in FAMILIES.value:
        if family not in SHAPES:
            raise InputError(f"no family {family!r}: choose among {', '.join(SHAPES)}")
        for how in QUANTIZE.value:
            if family != "qwen3_moe" or how == "none":  # experts have float weights only
                yield f"{family}, {how}", random_model(family, None if how == "none" else how)


if __name__ == "__main__":
    start(main)
