"""Times rollouts by an engine and by `decode_loop`: interleaved pairs in one process, at temperature 1.

    python scripts/bench_rollouts.py --rows=64 --new_tokens=128
    python scripts/bench_rollouts.py --config=qwen2.5-0.5b --prompt_tokens=8 --new_tokens=9 --pairs=2

Prints medians and quartiles, of whole rollouts (with prefill) and of decoding alone (after the first token of
each row): tokens per second of both by the clock, and the ratio, the engine's by the loop's. Then it prints
the same by processor time, which other processes change less.
"""

from launcher import start

# isort: split
import time
from functools import partial

import jax
import numpy as np
from absl import flags

import xinfer_jax as xj
from xinfer_jax.estimates.model_shapes import hf_config

_CONFIG = flags.DEFINE_string("config", "", "A built-in shape with random weights; empty: the bundled model.")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of both.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 32, "Tokens of each prompt.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("new_tokens", 128, "Tokens of each answer.", lower_bound=2)
_PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls.", lower_bound=1)


def clocks() -> np.ndarray:
    """Returns the seconds by the clock and of the processors."""
    return np.array([time.perf_counter(), time.process_time()])


def rates(tokens: int, began: np.ndarray, decoded: int, first: np.ndarray) -> np.ndarray:
    """Returns tokens per second, [2, 2]: of all until now, and of the last `decoded`, by both clocks."""
    end = clocks()
    return np.stack([tokens / (end - began), decoded / (end - first)])


def loop_rates(model: xj.Model, prompts_BT: np.ndarray, seed: int) -> np.ndarray:
    began = clocks()
    (B, T) = prompts_BT.shape
    cache = xj.init_cache(model.config, B, T + _TOKENS.value)
    rows = prompts_BT, np.full(B, T, np.int32)
    logits_BV, cache = xj.prefill(model.params, model.config, *rows, cache, donate=True)
    jax.block_until_ready(logits_BV)
    first = clocks()
    settings = jax.random.key(seed), xj.SamplingConfig(temperature=1.0), [], _TOKENS.value
    args = model.params, model.config, logits_BV, cache, *settings
    jax.block_until_ready(xj.decode_loop(*args, donate=True).tokens_BT)
    return rates(B * _TOKENS.value, began, B * (_TOKENS.value - 1), first)


def engine_rates(engine: xj.Engine, prompts_BT: np.ndarray, seed: int) -> np.ndarray:
    began = clocks()
    options = xj.GenerateOptions(
        max_tokens=_TOKENS.value, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=()
    )
    keys = list(jax.random.split(jax.random.key(seed), len(prompts_BT)))
    requests = engine.submit_many(prompts_BT.tolist(), options, keys=keys, live=False)
    while engine.stats.running < len(requests):
        engine.step()
    first = clocks()
    total = len(requests) * _TOKENS.value
    left = total - sum(len(request.answers[0].tokens) for request in requests)
    for request in requests:
        request.result()
    return rates(total, began, left, first)


def main(argv: list[str]) -> None:
    if _CONFIG.value:
        config = xj.ModelConfig.from_hf(hf_config(_CONFIG.value))
        model = xj.Model(xj.init_params(config, jax.random.key(0), "float32"), config)
    else:
        model = xj.load_model()
    size = _ROWS.value, _PROMPT.value
    prompts_BT = np.random.RandomState(0).randint(0, model.config.vocab_size, size, np.int32)
    capacity = -(-(_PROMPT.value + _TOKENS.value) // 64) * 64
    shape = dict(rows=_ROWS.value, capacity=capacity, prefix_cache=False, warm_up=True)
    engine = xj.Engine(model, **shape)
    calls = partial(loop_rates, model, prompts_BT), partial(engine_rates, engine, prompts_BT)
    for call in calls:
        call(0)  # compiles
    found = np.empty((_PAIRS.value, 2, 2, 2))  # pairs; loop and engine; whole and decoding; clocks
    for pair in range(_PAIRS.value):
        for side in (0, 1) if pair % 2 else (1, 0):
            found[pair, side] = calls[side](pair)
    for clock, by in enumerate(("clock", "processors")):
        for part, of in enumerate(("whole", "decoding")):
            both = found[:, :, part, clock]
            loop, engine_rate = np.median(both, 0)
            low, median, high = np.quantile(both[:, 1] / both[:, 0], (0.25, 0.5, 0.75))
            ratio = f"{median:.2f} ({low:.2f}-{high:.2f})"
            print(f"{by:10} {of:8} {loop:8.1f} {engine_rate:8.1f} tokens/s  {ratio}", flush=True)


if __name__ == "__main__":
    start(main)
