"""Times decode steps of an engine that holds something for rows beside one that holds nothing, in pairs:
LoRA adapters, a vector for every layer, or a caller's logits processor.

    python scripts/bench_held.py --config=qwen2.5-0.5b --pairs=10
    python scripts/bench_held.py --config=qwen2.5-0.5b --quantize=int8 --rows=8 --what=vectors

Prints, for rows without it and for rows that all have it (of adapters one each in turn), medians and
quartiles of the time of a step by that of the other engine, by the clock and by processor time.
"""

from launcher import start

# isort: split
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bench.model_shapes import hf_config

import xinfer_jax as xj

_CONFIG = flags.DEFINE_string("config", "qwen2.5-0.5b", "A built-in shape, with random weights.")
_QUANTIZE = flags.DEFINE_string("quantize", None, "Format of the weights, as int8.")
_ROWS = flags.DEFINE_integer("rows", 1, "Rows.", lower_bound=1)
_WHAT = flags.DEFINE_enum("what", "adapters", ["adapters", "vectors", "processor"], "What it holds.")
_HELD = flags.DEFINE_integer("adapters", 4, "Adapters that the engine holds.", lower_bound=1)
_RANK = flags.DEFINE_integer("rank", 16, "Of each, on every matrix of the layers.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("new_tokens", 22, "Tokens of each answer.", lower_bound=3)
_PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls.", lower_bound=1)


def xtc(settings, logits_BV, context):
    probability_BV = jax.nn.softmax(logits_BV)
    above_BV = probability_BV > settings["threshold"][:, None]
    least_B1 = jnp.where(above_BV, probability_BV, 2).min(-1, keepdims=True)
    happens_B = jax.vmap(jax.random.uniform)(context.key_B) < settings["probability"]
    return jnp.where((probability_BV > least_B1) & happens_B[:, None], -jnp.inf, logits_BV)


def holdings(config: xj.ModelConfig) -> tuple[dict, list[dict]]:
    """The arguments of an engine, and those of the rows in turn."""
    if _WHAT.value == "vectors":
        vectors = np.random.default_rng(0).standard_normal((config.num_hidden_layers, config.hidden_size))
        return dict(taps=dict(v=dict(enumerate(vectors)))), [dict(taps=dict(v=0.1))]
    if _WHAT.value == "processor":
        settings = dict(probability=0.5, threshold=0.1)
        return dict(processors=dict(x=(xj.Processor(None, xtc, last=True), settings))), [
            dict(processors=dict(x=None))
        ]
    names = [f"a{i}" for i in range(_HELD.value)]
    adapters = {name: xj.init_adapter(config, jax.random.key(i), _RANK.value) for i, name in enumerate(names)}
    return dict(adapters=adapters), [dict(adapter=name) for name in names]


def call_times(engine: xj.Engine, of_rows: list[dict], tokens: int) -> np.ndarray:
    """Returns the seconds of a call for so many tokens of each row, by the clock and of the processors."""
    sampling = xj.SamplingConfig(1.0 if _WHAT.value == "processor" else 0.0)

    def submit(adapter: str | None = None, **how) -> xj.Request:
        options = xj.GenerateOptions(tokens, sampling, eos_token_ids=(), **how)
        return engine.submit([5, 6, 7], options, key=jax.random.key(0), live=False, adapter=adapter)

    began = np.array([time.perf_counter(), time.process_time()])
    requests = [submit(**of_rows[i % len(of_rows)]) for i in range(_ROWS.value)]
    for request in requests:
        request.result()
    return np.array([time.perf_counter(), time.process_time()]) - began


def step_times(engine: xj.Engine, of_rows: list[dict]) -> np.ndarray:
    """Returns the seconds of a decode step: what further tokens add to a call."""
    short, long = (call_times(engine, of_rows, count) for count in (2, _TOKENS.value))
    return (long - short) / (_TOKENS.value - 2)


def main(argv: list[str]) -> None:
    config = xj.from_hf(hf_config(_CONFIG.value))
    model = xj.Model(xj.init_params(config, jax.random.key(0), "float32", _QUANTIZE.value), config)
    shape = dict(rows=_ROWS.value, capacity=128, pages=2 * _ROWS.value + 1, prefix_cache=False, warm_up=True)
    holds, has = holdings(config)
    plain = xj.Engine(model, **shape)
    holding = xj.Engine(model, **shape, **holds)
    del holds
    calls = {"without": (holding, [{}]), "with": (holding, has)}
    for engine, of_rows in ((plain, [{}]), *calls.values()):
        step_times(engine, of_rows)
    found = {name: np.empty((_PAIRS.value, 2, 2)) for name in calls}
    for pair in range(_PAIRS.value):
        for name, call in calls.items():
            for side in (0, 1) if pair % 2 else (1, 0):
                found[name][pair, side] = step_times(*((plain, [{}]), call)[side])
    for name, times in found.items():
        for clock, by in enumerate(("clock", "processors")):
            base, own = 1e3 * np.median(times[:, :, clock], 0)
            low, median, high = np.quantile(times[:, 1, clock] / times[:, 0, clock], (0.25, 0.5, 0.75))
            ratio = f"{median:.3f} ({low:.3f}-{high:.3f})"
            print(
                f"rows {name:7} {_WHAT.value}, {by:10} {base:7.1f} {own:7.1f} ms a step  {ratio}", flush=True
            )


if __name__ == "__main__":
    start(main)
