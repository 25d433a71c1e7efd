"""Measures the engine: throughput against static batches, latency under load, the overhead for a single
request, and the time until an engine is ready.

    python scripts/bench_engine.py --config=qwen2.5-0.5b --quantize=none,int8

Prints one JSON line per result; `a_over_b` is a ratio of seconds. Lengths of prompts and answers are
log-uniform. A third of the prompts starts with a common prefix, then has its own tokens, cut at the longest
prompt. Weights are random, and EOS is off.

throughput: all requests at once, interleaved with `generate` over batches of as many rows, sorted by prompt
    length. Each batch runs until its longest answer ends; only the requested tokens count.
load: Poisson arrivals at --load times that rate, one thread per request. Times are measured in the thread,
    from the scheduled arrival.
alone: one request at a time: an engine of one row and `generate`, interleaved.
ready: seconds of `Engine(...)` in new processes, with an empty compilation cache and with a filled one.
"""

from launcher import start

# isort: split
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import jax
import numpy as np
from absl import flags
from bench.model_shapes import hf_config
from goodput.goodput_flags import positive_numbers

import xinfer_jax as xj
from xinfer_jax.cli.startup import use_compilation_cache
from xinfer_jax.families.reading import from_hf
from xinfer_jax.host import cpu_count

FORMATS = ("none", "int8", "int4")
PARTS = ("throughput", "load", "alone", "ready")
CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", "A built-in shape (model_shapes.py) or a directory with config.json."
)
ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds; medians are reported.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights and prompts.")
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
ALONE = flags.DEFINE_list("alone", ["26", "128"], "Tokens of the prompt and of the answer for part alone.")
PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of calls for part alone.", lower_bound=2)
COMPILED = flags.DEFINE_string("compilation_cache", None, "Internal: compilation cache of a worker.")

Request = tuple[list[int], int]  # token ids of the prompt, number of new tokens


def main(argv: list[str]) -> None:
    for flag, known in ((QUANTIZE, FORMATS), (WANTED, PARTS)):
        if not flag.value or not {*flag.value} <= {*known}:
            raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: choose among {', '.join(known)}")
    for flag in (PROMPTS, ANSWERS, ALONE):
        if len(numbers(flag)) != 2:
            raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: give two numbers")
    if COMPILED.value:
        use_compilation_cache("bench_engine", COMPILED.value)
        print(json.dumps(seconds_until_ready(QUANTIZE.value[0])))
        return
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].device_kind}, {cpu_count()} cores",
        "versions": versions | {"python": platform.python_version()},
        "config": CONFIG.value,
    }
    for quantize in QUANTIZE.value:
        for part, result in measure(quantize):
            print(json.dumps(about | {"quantize": quantize, "part": part} | result), flush=True)


def measure(quantize: str) -> Iterator[tuple[str, dict]]:
    """The name of each part and its results."""
    wanted = {*WANTED.value}
    if "ready" in wanted:
        yield "ready", ready(quantize)
    if wanted == {"ready"}:
        return
    model = random_model(quantize)
    if wanted & {"throughput", "load"}:
        yield from throughput_and_load(model)
    if "alone" in wanted:
        yield "alone", alone(model)


def throughput_and_load(model: xj.Model) -> Iterator[tuple[str, dict]]:
    """Measures both parts with one engine."""
    with xj.Engine(model, rows=ROWS.value, capacity=CAPACITY.value, warm_up=True) as engine:
        batch(engine, draw(model, 0)[: ROWS.value])  # warms it up
        if "throughput" in WANTED.value:
            result = throughput(model, engine)
            yield "throughput", result
        if "load" in WANTED.value:
            known = "throughput" in WANTED.value
            seconds = result["engine_seconds"] if known else batch(engine, draw(model, 1))[0]
            yield "load", load(engine, draw(model, 2), LOAD.value * REQUESTS.value / seconds)


def numbers(flag: flags.FlagHolder) -> list[int]:
    """The shortest and the longest length, or the two lengths of a call."""
    values = positive_numbers(flag)
    if any(value % 1 for value in values):
        raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: give whole numbers")
    return [int(value) for value in values]


def random_model(quantize: str) -> xj.Model:
    config = from_hf(hf_config(CONFIG.value))
    params = xj.init_params(config, jax.random.key(0), None, None if quantize == "none" else quantize)
    return xj.Model(params, config, None, {}, xj.LoadStats(0.0, 0, quantize))


def draw(model: xj.Model, number: int) -> list[Request]:
    """Random requests. Each number gives the same lengths but other tokens, because an engine caches
    prefixes.
    """
    lengths = np.random.default_rng(SEED.value)
    tokens = np.random.default_rng([SEED.value, number])

    def ids(count: int) -> list[int]:
        return tokens.integers(0, model.config.vocab_size, count).tolist()

    def between(flag: flags.FlagHolder) -> int:
        first, last = numbers(flag)
        return min(last, int(np.exp(lengths.uniform(np.log(first), np.log(last + 1)))))

    common = ids(COMMON.value)
    longest = numbers(PROMPTS)[1]
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
        result[name] = quantiles(seconds, median=0.5, p99=0.99)
    return result | dict(hits=engine.stats.hits - before.hits)


def alone(model: xj.Model) -> dict:
    """Seconds of one request by a one-row engine and by `generate`; quartiles of their ratio in a pair."""
    length, new = numbers(ALONE)
    ids = np.random.default_rng(SEED.value).integers(0, model.config.vocab_size, length).tolist()
    with xj.Engine(model, rows=1, capacity=CAPACITY.value, prefix_cache=False, warm_up=True) as engine:
        runs = [lambda: batch(engine, [(ids, new)])[0], lambda: static_batches(model, [(ids, new)])[0]]
        for run in runs:
            run()
        pairs = []
        for number in range(PAIRS.value):
            order = -1 if number % 2 else 1  # alternates which one runs first
            pairs.append([run() for run in runs[::order]][::order])
    engine_s, generate_s = np.array(pairs).T
    result = dict(engine_seconds=np.median(engine_s), generate_seconds=np.median(generate_s))
    result |= dict(engine_over_generate=quantiles(engine_s / generate_s, q1=0.25, median=0.5, q3=0.75))
    return result | dict(prompt_tokens=length, new_tokens=new, pairs=len(pairs), engine=engine.about)


def quantiles(values: Sequence[float] | np.ndarray, **quantile: float) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in quantile.items()}


def ready(quantize: str) -> dict:
    """Medians over the rounds, each with its own compilation cache."""
    rounds = []
    for _ in range(ROUNDS.value):
        with tempfile.TemporaryDirectory() as folder:
            worker_flags = [f"--quantize={quantize}", f"--compilation_cache={folder}"]
            command = [sys.executable, __file__, *sys.argv[1:], *worker_flags]
            runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
        rounds.append([json.loads(run.stdout) for run in runs])
    cold, warm = np.median([[run["seconds"] for run in runs] for runs in rounds], axis=0).tolist()
    return dict(cold_seconds=cold, warm_seconds=warm, rounds=len(rounds), engine=rounds[0][1]["engine"])


def seconds_until_ready(quantize: str) -> dict:
    model = random_model(quantize)
    jax.block_until_ready(model.params)
    start_s = time.perf_counter()
    engine = xj.Engine(model, rows=ROWS.value, capacity=CAPACITY.value)
    return dict(seconds=time.perf_counter() - start_s, engine=engine.about)


if __name__ == "__main__":
    start(main)
