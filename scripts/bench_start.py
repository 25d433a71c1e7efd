"""Measures the time to the first answer of a new process, from its start to the first and last token, and
compares it with other engines.

    python scripts/bench_start.py --rounds=3 --python=peers=/path/to/venv/bin/python
    python scripts/bench_start.py --model=DIR --engines=ours,transformers --precisions=float32
    python scripts/bench_start.py --config=xinfer_jax/assets --layers=24,80 --engines=ours

Ours is the command `xinfer-jax`, timed by the bytes that it writes, and in other ways with --ways: the first
call of `stream`, of `generate` and of an `Engine` in Python, and the first request to `xinfer-jax-serve`.
Each runs cold, with an empty compilation cache, and then warm: both answers of the command must be equal.
Other engines get as many prompt ids and return as many tokens. Their time starts with their process too, but
excludes tokenization. Checkpoints are converted before, and files are in the page cache. Unless --model names
a checkpoint, weights are random, and a tokenizer of the vocabulary's size is made up. Engines, checkpoint and
most flags are those of bench_peers.py. The last line is one JSON object.
"""

from launcher import start

# isort: split
import itertools
import json
import re
import statistics
import string
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import bench_peers as peers
from absl import flags
from bench_peers import CONFIG, NEW, THREADS, TIMEOUT, median
from peer_engines import ENGINES, our_format
from server_startup import server
from tokenizers import Tokenizer, decoders, models

from xinfer_jax.checkpoint.files import checkpoint_dir
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.errors import InputError
from xinfer_jax.text import encode_prompt

MODEL = flags.DEFINE_string("model", None, "A checkpoint to run instead: a directory, or a name on the hub.")
LAYERS = flags.DEFINE_list(
    "layers",
    [],
    "Numbers of layers to measure ours with, else as --config; other engines use the first number.",
)
PRECISIONS = flags.DEFINE_list(
    "precisions", ["float32", "int8", "int4"], f"Precisions to measure: {', '.join(peers.ORDER)}."
)
WAYS = flags.DEFINE_list(
    "ways", ["command"], "How ours is called: command, stream, generate, engine, server."
)
QUESTION = "What is the capital of France?"
SYSTEM = "You are a helpful assistant."  # 26 tokens in ChatML
PROMPT = flags.DEFINE_string("prompt", QUESTION, f"The prompt; it follows the system message {SYSTEM!r}.")
flags.set_default(NEW, 24)
for unused in (peers.LENGTHS, peers.BATCHES):
    delattr(flags.FLAGS, unused.name)
PHASES = ("imports", "opening", "reading", "tracing", "compiling", "prompt", "decoding")
_WAYS = ("command", "stream", "generate", "engine", "server")
_CHATML = ("<|im_start|>", "<|im_end|>", "system", "user", "assistant")


def main(argv: list[str]) -> None:
    for way in WAYS.value:
        if way not in _WAYS:
            raise InputError(f"way {way!r} is unknown: use {', '.join(_WAYS)}")
    wanted = engines()
    pythons = peers.interpreters()
    folders = checkpoints()
    first = next(iter(folders.values()))
    model = open_checkpoint(first).model
    ids = encode_prompt(model, PROMPT.value, system=SYSTEM, escape_control_tokens=False)
    for folder in folders.values():
        into_page_cache(folder)
    about = {"model": MODEL.value or f"{CONFIG.value}, random weights", "cpu": peers.cpu_name()}
    about |= {"threads": THREADS, "prompt_tokens": len(ids), "new_tokens": NEW.value}
    print("; ".join(f"{name} {value}" for name, value in about.items()))
    job = {"program": "peer_startup.py", "checkpoint": str(first), "threads": THREADS, "prompt": ids}
    job |= {"folders": {shape: str(folder) for shape, folder in folders.items()}, "answered": {}}
    job |= {"vocab_size": model.config.vocab_size}
    workdir = peers.work_folder("start", str(first)) if MODEL.value else first.parent
    results, problems = peers.rounds(job, wanted, pythons, workdir, measure)
    summary = report(results, wanted, list(folders))
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    print(json.dumps(peers.round_floats(about | summary | {"rounds": results, "problems": problems})))


def engines() -> dict[str, str]:
    """The engines of bench_peers.py that run in one of --precisions."""
    for precision in PRECISIONS.value or [""]:
        if precision not in peers.ORDER:
            raise InputError(f"precision {precision!r} is unknown: use {', '.join(peers.ORDER)}")
    wanted = {name: ours for name, ours in peers.engines().items() if ours in PRECISIONS.value}
    if not wanted:
        raise InputError(
            f"none of --engines has {' or '.join(PRECISIONS.value)}: change one of the two flags"
        )
    return wanted


# --- checkpoints --------------------------------------------------------------------------------------------


def checkpoints() -> dict[str, Path]:
    """The directory of each shape, by its name."""
    for flag in (CONFIG, LAYERS):
        if MODEL.value and flags.FLAGS[flag.name].present:
            raise InputError(f"--{flag.name} and --model exclude each other: a checkpoint has its shape")
    if MODEL.value:
        return {"": checkpoint_dir(MODEL.value)}
    hf = peers.shape()
    hf.pop("eos_token_id", None)  # no answer ends early
    if not LAYERS.value:
        return {"": random_checkpoint(hf)}
    return {f"{n} layers": random_checkpoint(hf | {"num_hidden_layers": n}) for n in peers.numbers(LAYERS)}


def random_checkpoint(hf: dict) -> Path:
    folder = peers.checkpoint(hf) / "checkpoint"
    file = folder / "tokenizer.json"
    unfinished = folder / "unfinished.json"
    if not file.is_file():
        made_up_tokenizer(hf["vocab_size"]).save(str(unfinished))
        unfinished.rename(file)
    return folder


def made_up_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of this size. Its tokens are one to three characters each, and the words of the prompt."""
    words = dict.fromkeys((*_CHATML, *re.findall(r" ?\w+", f"{SYSTEM}\n{QUESTION}")))
    letters = f" {string.ascii_letters}{string.punctuation}{string.digits}\n"
    texts = ("".join(parts) for n in (1, 2, 3) for parts in itertools.product(letters, repeat=n))
    known = list(itertools.islice(texts, size - len(words)))
    merges = [(text[:-1], text[-1]) for text in known if len(text) > 1]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(known)}, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(list(words))
    return tokenizer


def into_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(2**24):
                pass


# --- one engine in one round --------------------------------------------------------------------------------


def measure(job: dict, python: str, workdir: Path) -> dict:
    """The costs of each run of the engine, by the name of the run. Ours has several runs."""
    if job["engine"] == "ours":
        return ours(job, python)
    precision = ENGINES[job["engine"]].precisions[job["precision"]]
    result = peers.measure(job | {"new_tokens": job["answered"].get(precision, NEW.value)}, python, workdir)
    return {"": result} if "phases" in result else result


def ours(job: dict, python: str) -> dict:
    """Runs the command cold and warm for each shape, and the other ways for the first shape."""
    runs: dict[str, dict] = {}
    options = [f"--prompt={PROMPT.value}", f"--system={SYSTEM}", "--temperature=0", "--output=text"]
    options.append("--noescape_control_tokens")  # made-up words may be control tokens
    options += [f"--max_tokens={NEW.value}"]
    options += [f"--{name}={value}" for name, value in our_format(job["precision"]).items()]
    job["answered"][job["precision"]] = NEW.value
    for shape, folder in job["folders"].items() if "command" in WAYS.value else ():
        with tempfile.TemporaryDirectory() as compiled:
            command_flags = [*options, f"--model={folder}", f"--compilation_cache={compiled}"]
            cold, warm = (command(job | {"flags": command_flags}, python) for _ in range(2))
        for run in (cold, warm):
            if "phases" not in run:
                return run
        if cold.pop("answer") != warm.pop("answer"):
            return {"failed": "the warm run gave another answer than the cold run"}
        runs |= {f"{shape} cold".strip(): cold, f"{shape} warm".strip(): warm}
        job["answered"][job["precision"]] = warm["new_tokens"]
    shape, folder = next(iter(job["folders"].items()))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT.value}]
    for way in [way for way in _WAYS[1:] if way in WAYS.value]:
        with tempfile.TemporaryDirectory() as compiled:
            way_job = job | {"way": way, "folder": folder, "compiled": compiled}
            way_job |= {"new_tokens": job["answered"][job["precision"]]}
            for kind in ("cold", "warm"):
                if way == "server":
                    environment = peers.process(way_job, python)["env"]
                    run = server(way_job, python, environment, messages, TIMEOUT.value)
                else:
                    run = peers.child(way_job, python)
                if "first_s" not in run:
                    return run
                runs[f"{shape} {way} {kind}".strip()] = run
    return runs


def command(job: dict, python: str) -> dict:
    """Runs the command once: its own report, and the times of its answer."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        start_s = time.monotonic()
        answer = b""
        times = []
        with subprocess.Popen(**peers.process(job, python), stdout=subprocess.PIPE, stderr=errors) as process:
            guard = threading.Timer(TIMEOUT.value, process.kill)
            guard.start()
            while chunk := process.stdout.read1():
                answer += chunk
                times.append(time.monotonic() - start_s)
        guard.cancel()
        end = time.monotonic() - start_s
        errors.seek(0)
        last_line = (errors.read().strip().splitlines() or ["no message"])[-1]
    if process.returncode:
        return {"skipped" if process.returncode == 2 else "failed": last_line}
    run = json.loads(last_line)
    costs = run.pop("costs")
    first = times[0]
    last = times[-1]
    run["phases"]["prompt"] = [costs["ttft_seconds"], first - costs["ttft_seconds"], first, 1]
    run["phases"]["decoding"] = [last - first, first, last, 1]
    allowed = 1.15 * (costs["weight_bytes"] + costs["cache_bytes"]) / 2**20 + 350
    run |= {"programs": run["phases"]["compiling"][3]}
    run |= {"fetched": run["phases"].get("fetching", [0] * 4)[3]}
    run |= {"first_s": first, "last_s": last, "end_s": end, "allowed_mib": allowed}
    return run | {"new_tokens": costs["generated_tokens"], "version": costs["version"], "answer": answer}


# --- the tables ---------------------------------------------------------------------------------------------


def report(results: dict[str, list[dict]], wanted: dict[str, str], shapes: list[str]) -> dict[str, dict]:
    """Prints the medians over the rounds, ours against the peers, and each shape against the first; returns
    all three.
    """
    ran = {name: rounds for name, rounds in results.items() if rounds}
    medians = {
        f"{name} {what}".strip(): median_tree([runs[what] for runs in rounds])
        for name, rounds in ran.items()
        for what in rounds[0]
    }
    print("\nMedians. Seconds from the start of the process until it can be asked, to the first token, the")
    print("last token and the end; programs, and those from the compilation cache; peak MiB: anonymous,")
    print("resident, and the limit, which is 1.15 x (weights + cache) + 350")
    costs = "new_tokens", "ready_s", "first_s", "last_s", "end_s", "programs", "fetched"
    print_rows(medians, *costs, "anon_mib", "hwm_mib", "allowed_mib")
    print("\nPhases: seconds in which the phase was running (first start-last end)")
    phases = {name: m["phases"] for name, m in medians.items()}
    print_rows({name: {p: _span(*spans[p]) for p in spans} for name, spans in phases.items()}, *PHASES)
    ratios = ratios_to_peers(ran, wanted, shapes[0])
    if ratios:
        print("\nours ÷ peer, within a round: below 1 we are faster")
        print_rows(ratios, *next(iter(ratios.values())))
    growth = ratios_to_first_shape(ran, shapes)
    if growth:
        print(f"\n÷ {shapes[0]}, within a round")
        print_rows(growth, *next(iter(growth.values())))
    return {"median": medians, "ratio": ratios, "growth": growth}


def print_rows(rows: dict[str, dict], *keys: str) -> None:
    peers.print_table(["", *keys], [[name, *map(row.get, keys)] for name, row in rows.items()], digits=2)


def _span(seconds: float, first: float, last: float, _: float) -> str:
    return f"{seconds:.1f} ({first:.1f}-{last:.1f})"


def median_tree(values: list[Any]) -> Any:
    """The medians of equal dicts and lists of numbers, entry by entry; the first one of strings."""
    one = values[0]
    if isinstance(one, dict):
        return {key: median_tree([value[key] for value in values if key in value]) for key in one}
    if isinstance(one, list):
        return [median_tree(list(column)) for column in zip(*values, strict=True)]
    if isinstance(one, int):
        return statistics.median_low(values)  # keeps an integer
    return one if isinstance(one, str | None) else median(values)


def ratios_to_peers(ran: dict[str, list[dict]], wanted: dict[str, str], shape: str) -> dict[str, dict]:
    """Ours relative to each peer of the same precision, or in float32 where the peer lacks the precision."""
    ratios = {}
    for name, other in itertools.product(ran, ran):
        engine = other.split(":")[0]
        available = {wanted[n] for n in wanted if n.split(":")[0] == engine}
        precision = wanted[name] if wanted[name] in available else "float32"
        if name.startswith("ours:") and engine != "ours" and wanted[other] == precision:
            pairs = list(zip(ran[name], ran[other], strict=False))  # rounds that both ran
            ratios[f"{name} / {other}"] = {
                f"{token} {kind}": median([a[f"{shape} {kind}".strip()][key] / b[""][key] for a, b in pairs])
                for token, key in (("first", "first_s"), ("last", "last_s"))
                for kind in (run.removeprefix(shape).strip() for run in ran[name][0] if run.startswith(shape))
            }
    return ratios


def ratios_to_first_shape(ran: dict[str, list[dict]], shapes: list[str]) -> dict[str, dict]:
    """The costs of ours with other numbers of layers, relative to the first number."""

    def costs(run: dict) -> dict[str, float]:
        phases = {phase: run["phases"][phase][0] for phase in ("tracing", "compiling")}
        return phases | {key: run[key] for key in ("programs", "first_s", "last_s")}

    growth = {}
    for (name, rounds), shape, kind in itertools.product(ran.items(), shapes[1:], ("cold", "warm")):
        if name.startswith("ours:"):
            pairs = [(costs(r[f"{shape} {kind}"]), costs(r[f"{shapes[0]} {kind}"])) for r in rounds]
            growth[f"{name} {shape} {kind}"] = median_tree(
                [{key: a[key] / b[key] for key in a} for a, b in pairs]
            )
    return growth


if __name__ == "__main__":
    start(main)
