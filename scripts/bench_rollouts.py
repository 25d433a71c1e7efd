"""Times rollouts by an engine beside `decode_loop`: interleaved pairs in one process, at temperature 1.

    python scripts/bench_rollouts.py --rows=64 --new_tokens=128
    python scripts/bench_rollouts.py --config=qwen2.5-0.5b --new_tokens=16 --pairs=3

Prints medians and quartiles: tokens per second of both, and the ratios, the engine's by the loop's: of whole
rollouts (with prefill); of decoding alone, from the last row's first token on; and of whole rollouts by
processor time, which other processes change less.
"""

from launcher import start

# isort: split
import time
from functools import partial

import jax
import numpy as np
from absl import flags
from bench.model_shapes import hf_config

import xinfer_jax as xj

_CONFIG = flags.DEFINE_string(
    "config", "", "A built-in shape, with random weights; empty: the bundled model."
)
_QUANTIZE = flags.DEFINE_string("quantize", None, "Format of random weights, as int8.")
_ROWS = flags.DEFINE_integer("rows", 64, "Rows of both.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt_tokens", 32, "Tokens of each prompt.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("new_tokens", 128, "Tokens of each answer.", lower_bound=2)
_PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls.", lower_bound=1)
_PROCESSED = flags.DEFINE_bool("processed", False, "Also log-probabilities after the logits processors.")


def time_loop(model: xj.Model, prompts_BT: np.ndarray, seed: int) -> list[float]:
    """Returns the seconds of a rollout, of its decoding, and of the processors."""
    began = time.perf_counter()
    cpu = time.process_time()
    (B, T) = prompts_BT.shape
    cache = xj.init_cache(model.config, B, T + _TOKENS.value)
    rows = prompts_BT, np.full(B, T, np.int32)
    logits_BV, cache = xj.prefill(model.params, model.config, *rows, cache, donate=True)
    jax.block_until_ready(logits_BV)
    first = time.perf_counter()
    settings = jax.random.key(seed), xj.SamplingConfig(temperature=1.0), [], _TOKENS.value
    more = dict(logprobs=0) if _PROCESSED.value else {}
    args = model.params, model.config, logits_BV, cache, *settings
    jax.block_until_ready(xj.decode_loop(*args, donate=True, **more).tokens_BT)
    end = time.perf_counter()
    return [end - began, end - first, time.process_time() - cpu]


def time_engine(engine: xj.Engine, prompts_BT: np.ndarray, seed: int) -> list[float]:
    """As `time_loop`."""
    began = time.monotonic()
    cpu = time.process_time()
    options = xj.GenerateOptions(_TOKENS.value, xj.SamplingConfig(temperature=1.0), eos_token_ids=())
    keys = list(jax.random.split(jax.random.key(seed), len(prompts_BT)))
    how = dict(keys=keys, live=False, processed_logprobs=_PROCESSED.value)
    requests = engine.submit_many(prompts_BT.tolist(), options, **how)
    for request in requests:
        request.result()
    end = time.monotonic()
    first = max(request.times["first"] for request in requests)
    return [end - began, end - first, time.process_time() - cpu]


def main(argv: list[str]) -> None:
    if _CONFIG.value:
        config = xj.from_hf(hf_config(_CONFIG.value))
        params = xj.init_params(config, jax.random.key(0), "float32", _QUANTIZE.value)
        model = xj.Model(params, config)
    else:
        model = xj.load_model()
    size = _ROWS.value, _PROMPT.value
    prompts_BT = np.random.RandomState(0).randint(0, model.config.vocab_size, size, np.int32)
    capacity = -(-(sum(size[1:]) + _TOKENS.value) // 64) * 64
    shape = dict(rows=_ROWS.value, capacity=capacity, prefix_cache=False, warm_up=True)
    with xj.Engine(model, **shape) as engine:
        calls = partial(time_loop, model, prompts_BT), partial(time_engine, engine, prompts_BT)
        for call in calls:
            call(0)  # compiles
        seconds = np.empty((_PAIRS.value, 2, 3))  # of pairs; loop and engine; parts
        for pair in range(_PAIRS.value):
            for side in (0, 1) if pair % 2 else (1, 0):
                seconds[pair, side] = calls[side](pair)
    for i, part in enumerate(("whole", "decoding", "CPU")):
        rates = _ROWS.value * (_TOKENS.value - (i == 1)) / np.median(seconds[:, :, i], 0)
        low, median, high = np.quantile(seconds[:, 0, i] / seconds[:, 1, i], (0.25, 0.5, 0.75))
        print(f"{part:8} {rates[0]:8.0f} {rates[1]:8.0f} tokens/s  {median:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    start(main)
