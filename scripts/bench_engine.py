"""What an engine gains over batches that start and end together, how long requests wait, what a row alone
costs, and how soon an engine is ready.

    python scripts/bench_engine.py --config=qwen2.5-0.5b --quantize=none,int8
    python scripts/bench_engine.py --parts=throughput --quantize=int8 --python=peers=/path/to/venv/bin/python

One JSON line a result; `a_over_b` is a ratio of seconds. Lengths of prompts and answers are log-uniform; a
third of the prompts is a common beginning, then its own tokens, cut at the longest. Weights are random, and
no id ends an answer.

throughput: all requests at once, in turns with `generate` over batches of as many rows, sorted by the length
    of the prompt: each runs until its longest answer has ended, and only what was asked for counts.
    openvino-genai's continuous batching (--python, int8) and llama.cpp's server (llama-server on PATH, and
    --llama_model) follow with as many slots; what is left out is said.
load: Poisson arrivals at --load of that rate, from a thread each; times as the thread sees the tokens, from
    when its request was due.
alone: an engine of one row and `generate`, in turns.
ready: seconds of `Engine(...)` in new processes, with an empty compilation cache and with what that left.
"""

from one_line import start

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

import bench_peers as peers
import jax
import numpy as np
from absl import flags
from bench_engine_runners import llama_server
from bench_peers import CONFIG, ROUNDS, SEED, THREADS, TIMEOUT

import xinfer_jax as xj
from xinfer_jax.cli.startup import keep_compiled_programs
from xinfer_jax.config.model_config import from_hf

FORMATS = ("none", "int8", "int4")
PARTS = ("throughput", "load", "alone", "ready")
QUANTIZE = flags.DEFINE_list("quantize", ["none", "int8"], f"Of the weights, in turn: {', '.join(FORMATS)}.")
WANTED = flags.DEFINE_list("parts", list(PARTS), f"What is measured: {', '.join(PARTS)}.")
REQUESTS = flags.DEFINE_integer("requests", 64, "How many.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 8, "Of the engine, and of a batch.", lower_bound=1)
CAPACITY = flags.DEFINE_integer("capacity", None, "Of the engine; default: its own.", lower_bound=2)
PROMPTS = flags.DEFINE_list("prompt_tokens", ["16", "512"], "Shortest and longest prompt.")
ANSWERS = flags.DEFINE_list("answer_tokens", ["16", "256"], "Shortest and longest answer.")
COMMON = flags.DEFINE_integer(
    "common", 256, "Tokens with which a third of the prompts begins.", lower_bound=1
)
LOAD = flags.DEFINE_float("load", 0.7, "Of the engine's rate.", lower_bound=0.01)
ALONE = flags.DEFINE_list("alone", ["26", "128"], "Tokens of the prompt and the answer of the row alone.")
PAIRS = flags.DEFINE_integer("pairs", 10, "Of the row alone.", lower_bound=2)
LLAMA_MODEL = flags.DEFINE_string("llama_model", None, "A GGUF file with a vocabulary, for llama-server.")
COMPILED = flags.DEFINE_string("compilation_cache", None, "Worker: where programs are kept.")
flags.set_default(ROUNDS, 1)
for unused in (peers.LENGTHS, peers.BATCHES, peers.NEW, peers.WANTED):
    delattr(flags.FLAGS, unused.name)

Asked = tuple[list[int], int]  # ids of a prompt, and how many tokens the answer has


def main(argv: list[str]) -> None:
    for flag, known in ((QUANTIZE, FORMATS), (WANTED, PARTS)):
        if not flag.value or not {*flag.value} <= {*known}:
            raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: choose among {', '.join(known)}")
    for flag in (PROMPTS, ANSWERS, ALONE):
        if len(peers.numbers(flag)) != 2:
            raise xj.InputError(f"--{flag.name}={','.join(flag.value)}: give two numbers")
    pythons = peers.interpreters()
    if COMPILED.value:
        keep_compiled_programs("bench_engine", COMPILED.value)
        return print(json.dumps(became_ready(QUANTIZE.value[0])))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].device_kind}, {THREADS} threads of {peers.cpu_name()}",
        "versions": versions | {"python": platform.python_version()},
        "config": CONFIG.value,
    }
    for how in QUANTIZE.value:
        for part, found in measured(how, pythons):
            print(json.dumps(about | {"quantize": how, "part": part} | found), flush=True)


def measured(how: str, pythons: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Each part and what was found."""
    if "ready" in WANTED.value:
        yield "ready", ready(how)
    if WANTED.value == ["ready"]:
        return
    model = random_model(how)
    if {*WANTED.value} & {"throughput", "load"}:
        yield from together(model)
    if "throughput" in WANTED.value:
        asked = draw(model, 3)
        llama = llama_server(LLAMA_MODEL.value, asked, ROWS.value, THREADS, TIMEOUT.value)
        for name, found in (("openvino-genai", openvino(asked, how, pythons)), ("llama-server", llama)):
            if "seconds" in found:
                found["tokens_per_second"] = sum(new for _, new in asked) / found["seconds"]
            yield "throughput", {"peer": name} | found
    if "alone" in WANTED.value:
        yield "alone", alone(model)


def together(model: xj.Model) -> Iterator[tuple[str, dict]]:
    """What one engine of all rows does."""
    with xj.Engine(model, rows=ROWS.value, capacity=CAPACITY.value) as engine:
        batch(engine, draw(model, 0)[: ROWS.value])  # it was used once
        if "throughput" in WANTED.value:
            found = throughput(model, engine)
            yield "throughput", found
        if "load" in WANTED.value:
            known = "throughput" in WANTED.value
            seconds = found["engine_seconds"] if known else batch(engine, draw(model, 1))[0]
            yield "load", load(engine, draw(model, 2), LOAD.value * REQUESTS.value / seconds)


def random_model(how: str) -> xj.Model:
    config = from_hf(peers.shape())
    params = xj.init_params(config, jax.random.key(0), None, None if how == "none" else how)
    return xj.Model(params, config, None, {}, xj.LoadStats(0.0, 0, how))


def draw(model: xj.Model, number: int) -> list[Asked]:
    """Requests, of the same lengths whatever the number, and of other tokens: an engine remembers them."""
    lengths = np.random.default_rng(SEED.value)
    tokens = np.random.default_rng([SEED.value, number])

    def ids(count: int) -> list[int]:
        return tokens.integers(0, model.config.vocab_size, count).tolist()

    def between(flag: flags.FlagHolder) -> int:
        first, last = peers.numbers(flag)
        return min(last, int(np.exp(lengths.uniform(np.log(first), np.log(last + 1)))))

    common = ids(COMMON.value)
    longest = peers.numbers(PROMPTS)[1]
    asked = [(ids(between(PROMPTS)), between(ANSWERS)) for _ in range(REQUESTS.value)]
    return [((common + own)[:longest] if i % 3 == 1 else own, new) for i, (own, new) in enumerate(asked)]


def options(new: int) -> xj.GenerateOptions:
    return xj.GenerateOptions(new, eos_token_ids=())


def batch(engine: xj.Engine, asked: list[Asked]) -> tuple[float, list[list[int]]]:
    """Seconds of all at once, and the tokens of each."""
    began = time.perf_counter()
    outs = engine.generate([ids for ids, _ in asked], [options(new) for _, new in asked])
    return time.perf_counter() - began, [out.tokens[0] for out in outs]


def by_length(model: xj.Model, asked: list[Asked]) -> tuple[float, list[list[int]]]:
    """The same by `generate`."""
    began = time.perf_counter()
    tokens = {}
    order = sorted(range(len(asked)), key=lambda i: len(asked[i][0]))
    for rows in (order[at : at + ROWS.value] for at in range(0, len(order), ROWS.value)):
        most = options(max(asked[i][1] for i in rows))
        out = xj.generate(model.params, model.config, [asked[i][0] for i in rows], most)
        tokens |= {i: row[: asked[i][1]] for i, row in zip(rows, out.tokens, strict=True)}
    return time.perf_counter() - began, [tokens[i] for i in range(len(asked))]


def throughput(model: xj.Model, engine: xj.Engine) -> dict:
    """Medians of seconds and of their ratio within a round; counts are means."""
    by_length(model, draw(model, 3))  # compiles
    counted = "hits", "preemptions", "read_tokens", "chosen_tokens"
    rounds = []
    same = 0
    before = engine.stats
    for number in range(ROUNDS.value):
        asked = draw(model, 3 + number)
        theirs, expected = by_length(model, asked)
        ours, tokens = batch(engine, asked)
        rounds.append((ours, theirs, theirs / ours))
        same += sum(a == b for a, b in zip(tokens, expected, strict=True))
    seconds, other, ratio = np.median(rounds, axis=0).tolist()
    new = sum(new for _, new in asked)
    stats = engine.stats
    sums = {name: getattr(stats, name) - getattr(before, name) for name in counted} | dict(same_answers=same)
    found = dict(engine_seconds=seconds, generate_seconds=other, generate_over_engine=ratio)
    found |= dict(tokens_per_second=new / seconds, generate_tokens_per_second=new / other)
    found |= dict(rounds=len(rounds), rows=ROWS.value, requests=len(asked), new_tokens=new)
    found |= dict(prompt_tokens=sum(len(ids) for ids, _ in asked), engine=engine.about)
    return found | {name: total / len(rounds) for name, total in sums.items()}


def openvino(asked: list[Asked], how: str, pythons: dict[str, str]) -> dict:
    if how != "int8" or "openvino-genai" not in pythons:
        return {"skipped": "needs --quantize=int8 and --python=openvino-genai=PATH"}
    workdir = peers.checkpoint(peers.shape())
    job = dict(runner="bench_engine_runners.py", engine="openvino-genai", precision=how, threads=THREADS)
    job |= dict(checkpoint=str(workdir / "checkpoint"), asked=asked, rows=ROWS.value)
    return peers.measure(job, pythons["openvino-genai"], workdir)


def load(engine: xj.Engine, asked: list[Asked], rate: float) -> dict:
    """Percentiles over requests that come at so many a second."""
    due = np.random.default_rng(SEED.value).exponential(1 / rate, len(asked)).cumsum()
    began = time.perf_counter()
    before = engine.stats

    def one(asked: Asked, due: float) -> tuple[float, float, float]:
        """Seconds to the first token, for each after it, and to the end."""
        time.sleep(max(0.0, began + due - time.perf_counter()))
        request = engine.submit(asked[0], options(asked[1]))
        seen = [time.perf_counter() - began - due for _ in request]
        return seen[0], (seen[-1] - seen[0]) / max(1, len(seen) - 1), due + seen[-1]

    with ThreadPoolExecutor(len(asked)) as clients:
        ttft, tpot, ends = zip(*clients.map(one, asked, due), strict=True)
    found: dict = dict(requests=len(asked), load=LOAD.value, requests_per_second=rate, seconds=max(ends))
    for name, seconds in (("ttft_seconds", ttft), ("tpot_seconds", tpot)):
        found[name] = quantiles(seconds, median=0.5, p99=0.99)
    return found | dict(hits=engine.stats.hits - before.hits)


def alone(model: xj.Model) -> dict:
    """Seconds of one row by an engine of one and by `generate`; quartiles of the ratio within a pair."""
    length, new = peers.numbers(ALONE)
    ids = np.random.default_rng(SEED.value).integers(0, model.config.vocab_size, length).tolist()
    with xj.Engine(model, rows=1, capacity=CAPACITY.value, prefix_cache=False) as engine:
        ways = [lambda: batch(engine, [(ids, new)])[0], lambda: by_length(model, [(ids, new)])[0]]
        for way in ways:
            way()
        pairs = []
        for number in range(PAIRS.value):
            turn = -1 if number % 2 else 1  # who goes first
            pairs.append([way() for way in ways[::turn]][::turn])
    ours, theirs = np.array(pairs).T
    found = dict(engine_seconds=np.median(ours), generate_seconds=np.median(theirs))
    found |= dict(engine_over_generate=quantiles(ours / theirs, q1=0.25, median=0.5, q3=0.75))
    return found | dict(prompt_tokens=length, new_tokens=new, pairs=len(pairs), engine=engine.about)


def quantiles(values: Sequence[float] | np.ndarray, **at: float) -> dict[str, float]:
    return {name: float(np.quantile(values, part)) for name, part in at.items()}


def ready(how: str) -> dict:
    """Medians over the rounds, each with a cache of its own."""
    rounds = []
    for _ in range(ROUNDS.value):
        with tempfile.TemporaryDirectory() as folder:
            own = [f"--quantize={how}", f"--compilation_cache={folder}"]
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
        rounds.append([json.loads(run.stdout) for run in runs])
    cold, warm = np.median([[run["seconds"] for run in runs] for runs in rounds], axis=0).tolist()
    return dict(cold_seconds=cold, warm_seconds=warm, rounds=len(rounds), engine=rounds[0][1]["engine"])


def became_ready(how: str) -> dict:
    model = random_model(how)
    jax.block_until_ready(model.params)
    began = time.perf_counter()
    engine = xj.Engine(model, rows=ROWS.value, capacity=CAPACITY.value)
    return dict(seconds=time.perf_counter() - began, engine=engine.about)


if __name__ == "__main__":
    start(main)
