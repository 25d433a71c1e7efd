"""Measures the engine: throughput against static batches, and latency under load.

    python scripts/bench_engine.py --config=qwen2.5-0.5b --quantize=none,int8

Prints one JSON line per result; `a_over_b` is a ratio of seconds. Lengths of prompts and answers are
log-uniform. A third of the prompts starts with a common prefix, then has its own tokens, cut at the longest
prompt. Weights are random, and EOS is off.

throughput: all requests at once, interleaved with `generate` over batches of as many rows, sorted by prompt
    length. Each batch runs until its longest answer ends; only the requested tokens count.
load: Poisson arrivals at --load times that rate, one thread per request. Times are measured in the thread,
    from the scheduled arrival.
"""

from launcher import start

# isort: split
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from absl import flags
from bench.measuring import about, chosen, random_model, whole_numbers
from bench.model_shapes import hf_config

import xinfer_jax as xj

FORMATS = ("none", "int8", "int4")
PARTS = ("throughput", "load")
CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", "A built-in shape (model_shapes.py) or a directory with config.json."
)
ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds; medians are reported.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the prompts.")
QUANTIZE = flags.DEFINE_list(
    "quantize", ["none", "int8"], f"Formats of the weights to measure: {', '.join(FORMATS)}."
)
WANTED = flags.DEFINE_list("parts", list(PARTS), f"What to measure: {', '.join(PARTS)}.")
REQUESTS = flags.DEFINE_integer("requests", 64, "Number of requests.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 8, "Rows of the engine, and of a batch.", lower_bound=1)
CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Capacity of the engine; default: the engine's.", lower_bound=2
)
PROMPTS = flags.DEFINE_list("prompt_tokens", ["16", "512"], "Tokens of the shortest and longest prompt.")
ANSWERS = flags.DEFINE_list("answer_tokens", ["16", "256"], "Tokens of the shortest and longest answer.")
COMMON = flags.DEFINE_integer(
    "common", 256, "Tokens of the common prefix of a third of the prompts.", lower_bound=1
)
LOAD = flags.DEFINE_float(
    "load", 0.7, "Arrival rate as a fraction of the engine's throughput.", lower_bound=0.01
)

Request = tuple[list[int], int]  # token ids of the prompt, number of new tokens


def main(argv: list[str]) -> None:
    chosen(QUANTIZE, FORMATS)
    chosen(WANTED, PARTS)
    for flag in (PROMPTS, ANSWERS):
        if len(whole_numbers(flag)) != 2:
            raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: give two numbers")
    facts = about() | dict(config=CONFIG.value)
    for quantize in QUANTIZE.value:
        model = random_model(hf_config(CONFIG.value), None, quantize)
        for part, result in measure(model):
            print(json.dumps(facts | {"quantize": quantize, "part": part} | result), flush=True)


def measure(model: xj.Model) -> Iterator[tuple[str, dict]]:
    """Measures both parts with one engine: the name of each, and its results."""
    with xj.Engine(model, rows=ROWS.value, capacity=CAPACITY.value, warm_up=True) as engine:
        batch(engine, draw(model, 0)[: ROWS.value])  # warms it up
        if "throughput" in WANTED.value:
            result = throughput(model, engine)
            yield "throughput", result
        if "load" in WANTED.value:
            known = "throughput" in WANTED.value
            seconds = result["engine_seconds"] if known else batch(engine, draw(model, 1))[0]
            yield "load", load(engine, draw(model, 2), LOAD.value * REQUESTS.value / seconds)


def draw(model: xj.Model, number: int) -> list[Request]:
    """Random requests. Each number gives the same lengths but other tokens, because an engine caches
    prefixes.
    """
    lengths = np.random.default_rng(SEED.value)
    tokens = np.random.default_rng([SEED.value, number])

    def ids(count: int) -> list[int]:
        return tokens.integers(0, model.config.vocab_size, count).tolist()

    def between(flag: flags.FlagHolder) -> int:
        first, last = whole_numbers(flag)
        return min(last, int(np.exp(lengths.uniform(np.log(first), np.log(last + 1)))))

    common = ids(COMMON.value)
    longest = whole_numbers(PROMPTS)[1]
    requests = [(ids(between(PROMPTS)), between(ANSWERS)) for _ in range(REQUESTS.value)]
    return [((common + own)[:longest] if i % 3 == 1 else own, new) for i, (own, new) in enumerate(requests)]


def options(new: int) -> xj.GenerateOptions:
    return xj.GenerateOptions(new, eos_token_ids=())


def batch(engine: xj.Engine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds of all requests submitted at once to the engine, and the tokens of each."""
    start_s = time.perf_counter()
    outs = engine.generate([ids for ids, _ in requests], [options(new) for _, new in requests])
    return time.perf_counter() - start_s, [out.tokens[0] for out in outs]


def static_batches(model: xj.Model, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds of all requests by `generate` over batches sorted by prompt length, and the tokens of each."""
    start_s = time.perf_counter()
    tokens = {}
    order = sorted(range(len(requests)), key=lambda i: len(requests[i][0]))
    for rows in (order[at : at + ROWS.value] for at in range(0, len(order), ROWS.value)):
        longest = options(max(requests[i][1] for i in rows))
        out = xj.generate(model.params, model.config, [requests[i][0] for i in rows], longest)
        tokens |= {i: row[: requests[i][1]] for i, row in zip(rows, out.tokens, strict=True)}
    return time.perf_counter() - start_s, [tokens[i] for i in range(len(requests))]


def throughput(model: xj.Model, engine: xj.Engine) -> dict:
    """Medians of the seconds and of their ratio within a round; means of the counts."""
    static_batches(model, draw(model, 3))  # compiles
    counts = "hits", "preemptions", "prefill_tokens", "generated_tokens"
    rounds = []
    same = 0
    before = engine.stats
    for number in range(ROUNDS.value):
        requests = draw(model, 3 + number)
        generate_s, expected = static_batches(model, requests)
        engine_s, tokens = batch(engine, requests)
        rounds.append((engine_s, generate_s, generate_s / engine_s))
        same += sum(a == b for a, b in zip(tokens, expected, strict=True))
    seconds, other, ratio = np.median(rounds, axis=0).tolist()
    new = sum(new for _, new in requests)
    stats = engine.stats
    sums = {name: getattr(stats, name) - getattr(before, name) for name in counts} | dict(same_answers=same)
    result = dict(engine_seconds=seconds, generate_seconds=other, generate_over_engine=ratio)
    result |= dict(tokens_per_second=new / seconds, generate_tokens_per_second=new / other)
    result |= dict(rounds=len(rounds), rows=ROWS.value, requests=len(requests), new_tokens=new)
    result |= dict(prompt_tokens=sum(len(ids) for ids, _ in requests), engine=engine.about)
    return result | {name: total / len(rounds) for name, total in sums.items()}


def load(engine: xj.Engine, requests: list[Request], rate: float) -> dict:
    """Percentiles of the latencies at this many requests per second."""
    arrivals = np.random.default_rng(SEED.value).exponential(1 / rate, len(requests)).cumsum()
    start_s = time.perf_counter()
    before = engine.stats

    def run(request: Request, arrival: float) -> tuple[float, float, float]:
        """Seconds to the first token, per later token, and from the start to the end of the request."""
        time.sleep(max(0.0, start_s + arrival - time.perf_counter()))
        ids, new = request
        times = [time.perf_counter() - start_s - arrival for _ in engine.submit(ids, options(new))]
        return times[0], (times[-1] - times[0]) / max(1, len(times) - 1), arrival + times[-1]

    with ThreadPoolExecutor(len(requests)) as clients:
        ttft, tpot, ends = zip(*clients.map(run, requests, arrivals), strict=True)
    result: dict = dict(requests=len(requests), load=LOAD.value, requests_per_second=rate, seconds=max(ends))
    for name, seconds in (("ttft_seconds", ttft), ("tpot_seconds", tpot)):
        median, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
        result[name] = dict(median=median, p99=p99)
    return result | dict(hits=engine.stats.hits - before.hits)


if __name__ == "__main__":
    start(main)
