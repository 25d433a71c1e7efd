"""Times the sampler alone with different settings, in turns: a call for each step, logits of 151,936 tokens.

    python scripts/bench_sampler.py --rows=1

Prints for each setting the milliseconds of a step, and how many more it takes than without XTC and DRY:
median and quartiles of pairs.
"""

from launcher import start

# isort: split
import time

import jax
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context
from xinfer_jax.sampling.sampler import sample_tokens

_ROWS = flags.DEFINE_integer("rows", 1, "Rows.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab", 151_936, "Tokens of the vocabulary.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of a row so far.", lower_bound=2)
_DISTINCT = flags.DEFINE_integer("distinct", 50, "How many of them are distinct.", lower_bound=1)
_PAIRS = flags.DEFINE_integer("pairs", 200, "Steps of each setting.", lower_bound=1)

XTC = dict(xtc_probability=0.5, xtc_threshold=0.1)
# What is compared, and with what.
SETTINGS = {
    "temperature 1": (dict(), dict()),
    "XTC": (XTC, dict()),
    "top_k 40": (dict(top_k=40), dict()),
    "top_k 40, XTC": (dict(top_k=40) | XTC, dict(top_k=40)),
    "DRY": (dict(dry_multiplier=0.8), dict()),
}


def program_of(settings: dict):
    """A function of a position that samples a token of each row."""
    B = _ROWS.value
    V = _VOCAB.value
    rng = np.random.default_rng(0)
    logits_BV = jax.numpy.asarray(rng.standard_normal((B, V)) * 3, "float32")
    history_BS = rng.integers(0, _DISTINCT.value, (B, _TOKENS.value), np.int32)
    sampling_B = settings_per_row(xj.SamplingConfig(1.0, **settings), B, V)
    seen_BV = np.zeros((B, V), bool)
    length_B = np.full(B, _TOKENS.value, np.int32)
    context = init_context(sampling_B, length_B, np.full((B, 1), -1, np.int32), seen_BV, history_BS)
    rows = jax.device_put((jax.random.split(jax.random.key(0), B), sampling_B, context))
    step = jax.jit(lambda logits_BV, rows: sample_tokens(logits_BV, *rows)[:2])
    return lambda: jax.block_until_ready(step(logits_BV, rows))


def seconds(program) -> float:
    began = time.perf_counter()
    program()
    return time.perf_counter() - began


def main(argv):
    programs = {str(given): program_of(given) for pair in SETTINGS.values() for given in pair}
    for program in programs.values():
        program()
    times = {name: [] for name in programs}
    for _ in range(_PAIRS.value):
        for name, program in programs.items():
            times[name].append(1e3 * seconds(program))
    for name, (given, other) in SETTINGS.items():
        took = np.array(times[str(given)])
        more = np.percentile(took - np.array(times[str(other)]), [50, 25, 75])
        print(f"{name}: {np.median(took):.2f} ms, more: {more[0]:.2f} ({more[1]:.2f} to {more[2]:.2f})")


if __name__ == "__main__":
    start(main)
