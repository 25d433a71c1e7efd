"""Times decode steps of an engine that holds LoRA adapters beside one that holds none: interleaved pairs.

    python scripts/bench_adapters.py --config=qwen2.5-0.5b --pairs=10
    python scripts/bench_adapters.py --config=qwen2.5-0.5b --quantize=int8 --rows=8 --pairs=10

Prints, for rows without adapters and for rows that have one each in turn, medians and quartiles of the time
of a step by that of the engine without adapters, by the clock and by processor time.
"""

from launcher import start

# isort: split
import time

import jax
import numpy as np
from absl import flags
from bench.model_shapes import hf_config

import xinfer_jax as xj

_CONFIG = flags.DEFINE_string("config", "qwen2.5-0.5b", "A built-in shape, with random weights.")
_QUANTIZE = flags.DEFINE_string("quantize", None, "Format of the weights, as int8.")
_ROWS = flags.DEFINE_integer("rows", 1, "Rows.", lower_bound=1)
_HELD = flags.DEFINE_integer("adapters", 4, "Adapters that the engine holds.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 16, "Of each, on every matrix of the layers.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("new_tokens", 22, "Tokens of each answer.", lower_bound=3)
_PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls.", lower_bound=1)


def call_times(engine: xj.Engine, adapters: list[str | None], tokens: int) -> np.ndarray:
    """Returns the seconds of a call for so many tokens of each row, by the clock and of the processors."""
    options = xj.GenerateOptions(tokens, eos_token_ids=())
    began = np.array([time.perf_counter(), time.process_time()])
    names = [adapters[i % len(adapters)] for i in range(_ROWS.value)]
    requests = [engine.submit([5, 6, 7], options, live=False, adapter=name) for name in names]
    for request in requests:
        request.result()
    return np.array([time.perf_counter(), time.process_time()]) - began


def step_times(engine: xj.Engine, adapters: list[str | None]) -> np.ndarray:
    """Returns the seconds of a decode step: what further tokens add to a call."""
    short, long = (call_times(engine, adapters, count) for count in (2, _TOKENS.value))
    return (long - short) / (_TOKENS.value - 2)


def main(argv: list[str]) -> None:
    config = xj.from_hf(hf_config(_CONFIG.value))
    model = xj.Model(xj.init_params(config, jax.random.key(0), "float32", _QUANTIZE.value), config)
    shape = dict(rows=_ROWS.value, capacity=128, pages=2 * _ROWS.value + 1, prefix_cache=False, warm_up=True)
    names = [f"a{i}" for i in range(_HELD.value)]
    adapters = {name: xj.init_adapter(config, jax.random.key(i), _RANK.value) for i, name in enumerate(names)}
    plain = xj.Engine(model, **shape)
    holding = xj.Engine(model, **shape, adapters=adapters)
    del adapters
    calls = {"without": (holding, [None]), "with": (holding, names)}
    for engine, of_rows in ((plain, [None]), *calls.values()):
        step_times(engine, of_rows)
    found = {name: np.empty((_PAIRS.value, 2, 2)) for name in calls}
    for pair in range(_PAIRS.value):
        for name, call in calls.items():
            for side in (0, 1) if pair % 2 else (1, 0):
                found[name][pair, side] = step_times(*((plain, [None]), call)[side])
    for name, times in found.items():
        for clock, by in enumerate(("clock", "processors")):
            base, own = 1e3 * np.median(times[:, :, clock], 0)
            low, median, high = np.quantile(times[:, 1, clock] / times[:, 0, clock], (0.25, 0.5, 0.75))
            ratio = f"{median:.3f} ({low:.3f}-{high:.3f})"
            print(f"rows {name:7} adapters, {by:10} {base:7.1f} {own:7.1f} ms a step  {ratio}", flush=True)


if __name__ == "__main__":
    start(main)
