r"""Checks that an engine gives a request the same bits alone and next to other requests: random requests must
have equal tokens and log-probabilities, bit for bit. Their tokens must also equal the tokens of `generate`.

    python scripts/check_engine.py                    # the bundled checkpoint, 300 requests
    python scripts/check_engine.py --families=qwen2,gemma3,qwen3_moe --quantize=none,int8,int4
    XLA_FLAGS=--xla_force_host_platform_device_count=3 \
        python scripts/check_engine.py --families=gemma3 --prefill_devices=0 --decode_devices=1,2

With --prefill_devices and --decode_devices the requests together go to engines on these devices, and alone to
one engine.

Arrivals are Poisson. Lengths, settings, cancels, deadlines and common prefixes are random. Few pages force
preemption. A token of `generate` may differ if the logits of the two best tokens differ by less than
--margin, because `generate` runs other programs. Exit code 1: something differs.
"""

from launcher import start

# isort: split
import json
import random

from absl import flags
from soak.engine_requests import SHAPES, check, draw, random_model

import xinfer_jax as xj
from xinfer_jax.cli.answer_flags import parse_devices
from xinfer_jax.errors import InputError

MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
FAMILIES = flags.DEFINE_list("families", [], "Small random models instead: qwen2, gemma3, qwen3_moe.")
QUANTIZE = flags.DEFINE_list(
    "quantize", ["none"], "Formats of the weights, one after another: none, int8, int4."
)
ACTIVATIONS = flags.DEFINE_string(
    "activations", None, "int8, without --families. With int4 `generate` of one row computes with floats."
)
CACHE = flags.DEFINE_string("cache_dtype", None, "Dtype of keys and values.")
DRAFT = flags.DEFINE_string("draft", None, "lookup: speculative decoding with prompt lookup.")
REQUESTS = flags.DEFINE_integer("requests", 300, "Number of requests.", lower_bound=1)
COMPARED = flags.DEFINE_integer(
    "compared", 20, "Number of requests that are compared with `generate`.", lower_bound=0
)
LONGEST = flags.DEFINE_integer("longest", 600, "Tokens of the longest prompt.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 4, "Rows of the engine.", lower_bound=1)
PAGES = flags.DEFINE_integer("pages", 24, "Pages of the engine; with few, rows are preempted.", lower_bound=2)
CHUNK = flags.DEFINE_integer("chunk", 128, "Tokens of a prefill chunk.", lower_bound=64)
RATE = flags.DEFINE_float("rate", 30, "Arrivals per second.", lower_bound=0)
MARGIN = flags.DEFINE_float("margin", 2e-4, "Margin of logits for `generate`; see above.", lower_bound=0)
PREFILL = flags.DEFINE_string("prefill_devices", None, "As of xinfer-jax-batch: devices of prompts, as 0,1.")
DECODE = flags.DEFINE_string("decode_devices", None, "The same, of answers.")
HOST_PAGES = flags.DEFINE_integer("host_pages", 0, "Pages of the engine in host memory.", lower_bound=0)
DIRECTORY = flags.DEFINE_string("page_directory", None, "As of xinfer-jax-batch.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of all random choices.")


def main(argv: list[str]) -> int:
    wrong = 0
    given = dict(prefill_devices=PREFILL.value, decode_devices=DECODE.value)
    further: dict = {side: parse_devices(side, text) for side, text in given.items() if text}
    if HOST_PAGES.value:
        further |= dict(host_pages=HOST_PAGES.value, page_directory=DIRECTORY.value)
    if FAMILIES.value and ACTIVATIONS.value:
        raise InputError("--activations is for --model or the bundled model: leave out --families")
    for name, model in models():
        shape = dict(cache_dtype=CACHE.value, draft=DRAFT.value, rows=ROWS.value, pages=PAGES.value)
        shape |= dict(chunk=CHUNK.value, capacity=min(1024, model.config.context_length))
        rng = random.Random(SEED.value)
        requests = draw(rng, model.config.vocab_size, REQUESTS.value, LONGEST.value, shape)
        result = check(model, requests, shape, rng, RATE.value, COMPARED.value, MARGIN.value, **further)
        print(json.dumps(dict(model=name, **result)))
        wrong += result["differ"] + result["differ_from_generate"]
    return int(wrong > 0)


def models():
    """Yields the name of each model, and the model."""
    if not FAMILIES.value:
        for name in QUANTIZE.value:
            method = None if name == "none" else name
            yield name, xj.load_model(MODEL.value, quantize=method, activations=ACTIVATIONS.value)
    for family in FAMILIES.value:
        if family not in SHAPES:
            raise InputError(f"no family {family!r}: choose among {', '.join(SHAPES)}")
        for name in QUANTIZE.value:
            yield f"{family}, {name}", random_model(family, None if name == "none" else name)


if __name__ == "__main__":
    start(main)
