"""How long the first answer takes: processes that are new, from the command to its first and its last token,
beside other engines in turns.

    python scripts/bench_start.py --rounds=3 --python=peers=/path/to/venv/bin/python
    python scripts/bench_start.py --model=DIR --engines=ours,transformers --precisions=float32
    python scripts/bench_start.py --config=xinfer_jax/assets --layers=24,80 --engines=ours

Ours is the command `xinfer-jax`, timed by the bytes that it writes: cold, with a new compilation cache, and
warm, the same again, which has to give the same answer. Other engines read as many prompt ids and give as
many tokens; their clock starts with their process too, but no text is made into ids or back. What they need
converted is converted before. Files are in the page cache. Unless --model names a checkpoint, weights are
random, and the tokenizer is made up, as large as the vocabulary. Engines, checkpoint and most flags are those
of bench_peers.py. The last line is one JSON object.
"""

from one_line import start

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
from bench_peer_runners import ENGINES, our_format
from bench_peers import CONFIG, NEW, THREADS, TIMEOUT, median
from tokenizers import Tokenizer, decoders, models

from xinfer_jax.checkpoint.files import checkpoint_dir
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.errors import InputError
from xinfer_jax.text import encode_prompt

MODEL = flags.DEFINE_string("model", None, "A checkpoint to run instead: a directory, or a hub name.")
LAYERS = flags.DEFINE_list(
    "layers",
    [],
    "Numbers of layers that ours has in turn, the shape of --config else; others have the first.",
)
PRECISIONS = flags.DEFINE_list("precisions", ["float32", "int8", "int4"], f"Of {', '.join(peers.ORDER)}.")
QUESTION = "What is the capital of France?"
SYSTEM = "You are a helpful assistant."  # 26 tokens in ChatML
PROMPT = flags.DEFINE_string("prompt", QUESTION, f"What is asked, behind the system message {SYSTEM!r}")
flags.set_default(NEW, 24)
for unused in (peers.LENGTHS, peers.BATCHES):
    delattr(flags.FLAGS, unused.name)
PHASES = ("imports", "opening", "reading", "tracing", "compiling", "prompt", "decoding")
_CHATML = ("<|im_start|>", "<|im_end|>", "system", "user", "assistant")


def main(argv: list[str]) -> None:
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
    job = {"runner": "bench_start_runners.py", "checkpoint": str(first), "threads": THREADS, "prompt": ids}
    job |= {"folders": {shape: str(folder) for shape, folder in folders.items()}, "answered": {}}
    job |= {"vocab_size": model.config.vocab_size}
    workdir = peers.work_folder("start", str(first)) if MODEL.value else first.parent
    results, problems = peers.rounds(job, wanted, pythons, workdir, measure)
    found = report(results, wanted, list(folders))
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    print(json.dumps(peers.rounded(about | found | {"rounds": results, "problems": problems})))


def engines() -> dict[str, str]:
    """Those of bench_peers.py that have to do with --precisions."""
    for precision in PRECISIONS.value or [""]:
        if precision not in peers.ORDER:
            raise InputError(f"precision {precision!r} is unknown: use {', '.join(peers.ORDER)}")
    wanted = {name: ours for name, ours in peers.engines().items() if ours in PRECISIONS.value}
    if not wanted:
        raise InputError(f"none of --engines has {' or '.join(PRECISIONS.value)}: give others of either")
    return wanted


# --- checkpoints --------------------------------------------------------------------------------------------


def checkpoints() -> dict[str, Path]:
    """How each shape is called, and its directory."""
    for flag in (CONFIG, LAYERS):
        if MODEL.value and flags.FLAGS[flag.name].present:
            raise InputError(f"--{flag.name} and --model exclude each other: a checkpoint has its shape")
    if MODEL.value:
        return {"": checkpoint_dir(MODEL.value)}
    hf = peers.shape()
    hf.pop("eos_token_id", None)  # an answer is as long as was asked for
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
    """As many tokens, each of them some text: characters, two of them, three, and words of the prompt."""
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
    """What each run of the engine cost, by what it was: of ours there are several."""
    if job["engine"] == "ours":
        return ours(job, python)
    precision = ENGINES[job["engine"]].precisions[job["precision"]]
    result = peers.measure(job | {"new_tokens": job["answered"].get(precision, NEW.value)}, python, workdir)
    return {"": result} if "phases" in result else result


def ours(job: dict, python: str) -> dict:
    found: dict[str, dict] = {}
    asked = [f"--prompt={PROMPT.value}", f"--system={SYSTEM}", "--temperature=0", "--output=text"]
    asked.append("--noescape_control_tokens")  # made-up words may be control tokens
    asked += [f"--max_tokens={NEW.value}"]
    asked += [f"--{name}={value}" for name, value in our_format(job["precision"]).items()]
    for shape, folder in job["folders"].items():
        with tempfile.TemporaryDirectory() as compiled:
            told = [*asked, f"--model={folder}", f"--compilation_cache={compiled}"]
            cold, warm = (command(job | {"flags": told}, python) for _ in range(2))
        for run in (cold, warm):
            if "phases" not in run:
                return run
        if cold.pop("answer") != warm.pop("answer"):
            return {"failed": "the same command gave another answer once its programs were in the cache"}
        found |= {f"{shape} cold".strip(): cold, f"{shape} warm".strip(): warm}
        job["answered"][job["precision"]] = warm["new_tokens"]
    return found


def command(job: dict, python: str) -> dict:
    """A run of the command: its own report, and when its answer came."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        began = time.monotonic()
        answer = b""
        times = []
        with subprocess.Popen(**peers.process(job, python), stdout=subprocess.PIPE, stderr=errors) as process:
            guard = threading.Timer(TIMEOUT.value, process.kill)
            guard.start()
            while piece := process.stdout.read1():
                answer += piece
                times.append(time.monotonic() - began)
        guard.cancel()
        end = time.monotonic() - began
        errors.seek(0)
        last_line = (errors.read().strip().splitlines() or ["no message"])[-1]
    if process.returncode:
        return {"skipped" if process.returncode == 2 else "failed": last_line}
    found = json.loads(last_line)
    costs = found.pop("costs")
    first = times[0]
    last = times[-1]
    found["phases"]["prompt"] = [costs["ttft_seconds"], first - costs["ttft_seconds"], first, 1]
    found["phases"]["decoding"] = [last - first, first, last, 1]
    allowed = 1.15 * (costs["weight_bytes"] + costs["cache_bytes"]) / 2**20 + 350
    found |= {"programs": found["phases"]["compiling"][3]}
    found |= {"fetched": found["phases"].get("fetching", [0] * 4)[3]}
    found |= {"first_s": first, "last_s": last, "end_s": end, "allowed_mib": allowed}
    return found | {"new_tokens": costs["generated_tokens"], "version": costs["version"], "answer": answer}


# --- the tables ---------------------------------------------------------------------------------------------


def report(results: dict[str, list[dict]], wanted: dict[str, str], shapes: list[str]) -> dict[str, dict]:
    """Prints medians over the rounds, ours beside the peers, each shape beside the first; returns them."""
    ran = {name: rounds for name, rounds in results.items() if rounds}
    medians = {
        f"{name} {what}".strip(): middle([runs[what] for runs in rounds])
        for name, rounds in ran.items()
        for what in rounds[0]
    }
    print("\nMedians. Seconds from the command to the first token, the last, the end; programs compiled or")
    print("fetched; peak MiB: anonymous, resident, and what is allowed, 1.15 x (weights + cache) + 350")
    costs = "new_tokens", "first_s", "last_s", "end_s", "programs", "fetched"
    show(medians, *costs, "anon_mib", "hwm_mib", "allowed_mib")
    print("\nPhases: seconds in which anything of it was under way (from-to)")
    phases = {name: m["phases"] for name, m in medians.items()}
    show({name: {p: _span(*spans[p]) for p in spans} for name, spans in phases.items()}, *PHASES)
    ratios = beside_peers(ran, wanted, shapes[0])
    if ratios:
        print("\nours ÷ peer, within a round: below 1 we are faster")
        show(ratios, *next(iter(ratios.values())))
    growth = beside_the_first(ran, shapes)
    if growth:
        print(f"\n÷ {shapes[0]}, within a round")
        show(growth, *next(iter(growth.values())))
    return {"median": medians, "ratio": ratios, "growth": growth}


def show(rows: dict[str, dict], *keys: str) -> None:
    peers.table(["", *keys], [[name, *map(row.get, keys)] for name, row in rows.items()], digits=2)


def _span(seconds: float, first: float, last: float, _: float) -> str:
    return f"{seconds:.1f} ({first:.1f}-{last:.1f})"


def middle(values: list[Any]) -> Any:
    """The medians of dicts and lists of numbers; of texts the first."""
    one = values[0]
    if isinstance(one, dict):
        return {key: middle([value[key] for value in values if key in value]) for key in one}
    if isinstance(one, list):
        return [middle(list(column)) for column in zip(*values, strict=True)]
    if isinstance(one, int):
        return statistics.median_low(values)  # it stays a whole number
    return one if isinstance(one, str | None) else median(values)


def beside_peers(ran: dict[str, list[dict]], wanted: dict[str, str], shape: str) -> dict[str, dict]:
    """Ours beside each peer of the same precision, or in float32 where it has no other."""
    found = {}
    for name, other in itertools.product(ran, ran):
        engine = other.split(":")[0]
        has = {wanted[n] for n in wanted if n.split(":")[0] == engine}
        precision = wanted[name] if wanted[name] in has else "float32"
        if name.startswith("ours:") and engine != "ours" and wanted[other] == precision:
            pairs = list(zip(ran[name], ran[other], strict=False))  # rounds that both ran
            found[f"{name} / {other}"] = {
                f"{token} {kind}": median([a[f"{shape} {kind}".strip()][key] / b[""][key] for a, b in pairs])
                for token, key in (("first", "first_s"), ("last", "last_s"))
                for kind in ("cold", "warm")
            }
    return found


def beside_the_first(ran: dict[str, list[dict]], shapes: list[str]) -> dict[str, dict]:
    """What ours costs with other numbers of layers, beside the first number."""

    def costs(run: dict) -> dict[str, float]:
        phases = {phase: run["phases"][phase][0] for phase in ("tracing", "compiling")}
        return phases | {key: run[key] for key in ("programs", "first_s", "last_s")}

    found = {}
    for (name, rounds), shape, kind in itertools.product(ran.items(), shapes[1:], ("cold", "warm")):
        if name.startswith("ours:"):
            pairs = [(costs(r[f"{shape} {kind}"]), costs(r[f"{shapes[0]} {kind}"])) for r in rounds]
            ratios = [{key: a[key] / b[key] for key in a} for a, b in pairs]
            found[f"{name} {shape} {kind}"] = middle(ratios)
    return found


if __name__ == "__main__":
    start(main)
