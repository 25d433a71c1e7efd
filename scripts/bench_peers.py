"""Compares speed and memory with other engines: one random checkpoint, each engine in its own process, all
engines in every round.

The other engines are optional: one that is not installed is skipped, with a line that says how to install it.
They may be installed in another Python:

    python scripts/bench_peers.py --rounds=3 --python=peers=/path/to/venv/bin/python

Each engine loads the checkpoint (converted before if needed). For every case it makes a first call, which
compiles, and a warm call on other ids, which is measured: time to the first token, then tokens per second
after it. The seconds of whole calls, first and warm, are a second table. Decoding is greedy, EOS is ignored,
and no engine caches prompts. Ratios compare with ours of the same precision within a round; their medians are
printed. transformers runs eagerly: not compiled, with a growing KV cache. llama.cpp maps its files, so its
weights are in the resident memory, not in the anonymous memory.
"""

from launcher import start

# isort: split
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl import flags
from model_shapes import hf_config
from peer_engines import ENGINES
from safetensors.numpy import save_file

from xinfer_jax.errors import InputError
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf

CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", "A built-in shape (model_shapes.py) or a directory with config.json."
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Directory for the checkpoint and its conversions (12 GB for 0.5b); default: a temporary directory.",
)
WANTED = flags.DEFINE_list(
    "engines",
    None,
    f"Engines to run ({', '.join(ENGINES)}); NAME:PRECISION for one precision only. Default: all.",
)
PYTHON = flags.DEFINE_multi_string(
    "python", [], "NAME=PATH: the Python that runs this engine. The name peers means all engines but ours."
)
ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "Number of times that each engine runs; medians are reported.", lower_bound=1
)
LENGTHS = flags.DEFINE_list("prompt_lengths", ["26", "300", "512"], "Lengths of the prompts, in tokens.")
BATCHES = flags.DEFINE_list("batch_sizes", ["1", "8"], "Prompts in a batch.")
NEW = flags.DEFINE_integer("new_tokens", 64, "Tokens to generate.", lower_bound=2)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights and prompts.")
TIMEOUT = flags.DEFINE_integer("timeout", 900, "Time limit of one process, in seconds.", lower_bound=1)
THREADS = os.cpu_count()
INSTRUCTIONS = {
    "avx2": {"avx2"},
    "avx512": {"avx512f"},
    "vnni": {"avx512_vnni", "avx_vnni"},
    "amx": {"amx_tile"},
}
ORDER = ("float32", "bfloat16", "int8", "int4")


def main(argv: list[str]) -> None:
    wanted = engines()
    pythons = interpreters()
    lengths = numbers(LENGTHS)
    batches = numbers(BATCHES)
    hf = shape()
    workdir = checkpoint(hf)
    settings = f"{NEW.value} new tokens, greedy; transformers eager"
    print(f"{CONFIG.value}, random weights in {workdir}; {THREADS} threads of {cpu_name()}; {settings}")
    cases = [(n, rows) for rows in dict.fromkeys([1, *batches]) for n in lengths]
    job = {
        "checkpoint": str(workdir / "checkpoint"),
        "vocab_size": hf["vocab_size"],
        "cases": cases,
        "threads": THREADS,
    }
    job |= {"new_tokens": NEW.value, "seed": SEED.value}
    report(*rounds(job, wanted, pythons, workdir), cases, wanted)


def shape() -> dict:
    """The config.json of the measured model."""
    hf = hf_config(CONFIG.value) | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    hf.pop("quantization_config", None)
    return hf


def rounds(
    job: dict,
    wanted: Iterable[str],
    pythons: dict[str, str],
    workdir: Path,
    run: Callable[[dict, str, Path], dict] | None = None,
) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Runs every engine in every round, by `measure` or another `run`. Returns the results of each engine,
    and the reasons why engines were left out.
    """
    results: dict[str, list[dict]] = {name: [] for name in wanted}
    problems: dict[str, str] = {}
    for number in range(1, ROUNDS.value + 1):
        for name in [name for name in results if name not in problems]:
            start = time.perf_counter()
            engine, precision = name.split(":")
            python = pythons.get(engine, sys.executable)
            result = (run or measure)(job | {"engine": engine, "precision": precision}, python, workdir)
            if problem := next(
                (f"{kind}: {result[kind]}" for kind in ("skipped", "failed") if kind in result), None
            ):
                problems[name] = problem
            else:
                results[name].append(result)
            print(f"round {number}: {name}: {problem or f'{time.perf_counter() - start:.0f} s'}", flush=True)
    return results, problems


def engines() -> dict[str, str]:
    """engine:precision -> precision of ours that it is compared with. Equal precisions run one after another,
    so that noise affects both.
    """
    every = {f"{name}:{p}": ours for name, engine in ENGINES.items() for p, ours in engine.precisions.items()}
    chosen = [
        name
        for entry in WANTED.value or ENGINES
        for name in every
        if name == entry or name.split(":")[0] == entry
    ]
    for entry in WANTED.value or ():
        if not any(name == entry or name.split(":")[0] == entry for name in every):
            raise InputError(
                f"engine {entry!r} is unknown: use {', '.join(ENGINES)} or one of {', '.join(every)}"
            )
    return {name: every[name] for name in sorted(chosen, key=lambda name: ORDER.index(every[name]))}


def numbers(flag: flags.FlagHolder) -> list[int]:
    if not flag.value or not all(entry.isdecimal() and int(entry) for entry in flag.value):
        raise InputError(
            f"--{flag.name}={','.join(flag.value)}: give whole numbers above 0, with commas between"
        )
    return [int(entry) for entry in flag.value]


def interpreters() -> dict[str, str]:
    """The Python of each engine that --python names."""
    paths = dict(entry.partition("=")[::2] for entry in PYTHON.value)
    for name, path in paths.items():
        if name not in (*ENGINES, "peers") or not os.access(path, os.X_OK):
            raise InputError(
                f"--python={name}={path}: give an engine ({', '.join(ENGINES)}) or peers, and an executable"
            )
    peers = {name: paths["peers"] for name in ENGINES if name != "ours"} if "peers" in paths else {}
    return peers | paths


def checkpoint(hf: dict) -> Path:
    """Writes checkpoint/ (config.json and random bfloat16 weights) into the folder of this config and seed,
    and returns the folder.

    Matrices are normal with standard deviation 1/sqrt(inputs), embeddings twice that, so that logits have a
    standard deviation of about 2.
    """
    config = from_hf(hf)
    folder = work_folder(config.model_type, hf, SEED.value, 1)
    if (folder / "checkpoint").is_dir():
        return folder
    rng = np.random.default_rng(SEED.value)
    tensors = {}
    for spec in jax.tree.leaves(file_specs(config)):
        values = rng.standard_normal(spec.shape, np.float32)
        if len(spec.shape) == 1:
            values = 0.1 * values + spec.hf_name.endswith("norm.weight")
        else:
            values *= (2 if spec.hf_name.startswith(("model.embed", "lm_head")) else 1) / np.sqrt(
                spec.shape[1]
            )
        tensors[spec.hf_name] = values.astype(ml_dtypes.bfloat16)
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    (unfinished / "config.json").write_text(json.dumps(hf, indent=1))
    save_file(tensors, unfinished / "model.safetensors", {"format": "pt"})
    return unfinished.rename(folder / "checkpoint").parent


def work_folder(name: str, *contents: object) -> Path:
    """The folder of files that depend on these contents."""
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:12]
    root = Path(WORKDIR.value) if WORKDIR.value else Path(tempfile.gettempdir()) / "xinfer_jax_bench"
    return root.expanduser() / f"{name}-{digest}"


def measure(job: dict, python: str, workdir: Path) -> dict:
    """Converts the checkpoint if this engine needs it and it has not been done, then runs the engine."""
    if ENGINES[job["engine"]].convert:
        ready = workdir / f"{job['engine']}-{job['precision']}"
        unfinished = workdir / "converting"
        if not ready.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
            result = child(job | {"convert": True, "converted": str(unfinished)}, python)
            if "converted" not in result:
                return result
            unfinished.rename(ready)
        job |= {"converted": str(ready)}
    return child(job | {"convert": False}, python)


def process(job: dict, python: str) -> dict[str, Any]:
    """The arguments and environment of the process of a job. The job gets the time at which it starts."""
    program = Path(__file__).parent / "bench" / job.get("program", "peer_engines.py")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    environment = {"JAX_PLATFORMS": "cpu"} | dict(os.environ) | offline
    environment |= {"OMP_NUM_THREADS": str(job["threads"])}
    started_job = json.dumps(job | {"started": time.monotonic()})
    return {"args": [python, str(program), started_job], "env": environment}


def child(job: dict, python: str) -> dict:
    """Runs a job in its own process and returns its answer; a crash is an answer too."""
    try:
        done = subprocess.run(
            **process(job, python), capture_output=True, text=True, errors="replace", timeout=TIMEOUT.value
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer after {TIMEOUT.value} s"}
    answer = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and answer.startswith("{"):
        return json.loads(answer)
    last_line = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
    return {"failed": f"exit code {done.returncode}: {last_line[:200]}"}


def report(
    results: dict[str, list[dict]], problems: dict[str, str], cases: list, wanted: dict[str, str]
) -> None:
    ran = {name: rounds for name, rounds in results.items() if rounds}
    speeds = [f"prefill {n} x{rows}" for n, rows in cases if rows == 1] + [
        f"decode {n} x{rows}" for n, rows in cases
    ]
    calls = [f"{call} {n} x{rows}" for n, rows in cases for call in ("first", "warm")]
    costs = ["load_s", *speeds, "anon_mib", "anon_all_mib", "hwm_all_mib"]
    medians = {
        name: {key: median([r[key] for r in rounds if r.get(key) is not None]) for key in (*costs, *calls)}
        for name, rounds in ran.items()
    }
    reference = (ran.get("ours:float32") or next(iter(ran.values()), [{"tokens": []}]))[0]["tokens"]
    for name, rounds in ran.items():
        pairs = enumerate(zip(reference, rounds[0]["tokens"], strict=True))
        medians[name]["same_tokens"] = next((i for i, (a, b) in pairs if a != b), len(reference))
    ratios = {}
    for name, rounds in ran.items():
        ours = ran.get(f"ours:{wanted[name]}", [])
        if ours and not name.startswith("ours:"):
            keys = [*speeds, "anon_mib", "anon_all_mib"]
            pairs = list(zip(ours, rounds, strict=False))  # rounds that both ran
            ratios[name] = {
                key: median([a[key] / b[key] for a, b in pairs if a.get(key) and b.get(key)]) for key in keys
            }
    short = {key: key.replace(" x1", "") for key in speeds}
    print(
        "\nMedians. prefill, decode: tok/s by prompt length (x rows: all rows together); peak MiB: anonymous"
        " (1 row · all cases), resident"
    )
    print(
        "same: number of leading tokens (of the first case) equal to ours in float32, or to the first"
        " engine's; rounding makes later tokens differ."
    )
    heads = ["load s", *short.values(), "anon", "anon all", "resident", "same"]
    rows = [[name, *(m[key] for key in (*costs, "same_tokens"))] for name, m in medians.items()]
    print_table(["engine", *heads], rows)
    print(f"\nSeconds of a whole call of {NEW.value} tokens: the first call of its case, and a warm call")
    heads = [key.replace(" x1", "") for key in calls]
    print_table(
        ["engine", *heads], [[name, *(m[key] for key in calls)] for name, m in medians.items()], digits=2
    )
    if ratios:
        print("\nours ÷ peer, same precision, within a round: above 1 we are faster (or, for memory, larger)")
        rows = [[f"{name} / {wanted[name]}", *r.values()] for name, r in ratios.items()]
        print_table(["peer / ours", *short.values(), "anon", "anon all"], rows, digits=2)
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    engines = {
        name: (
            {"median": medians[name], "ratio": ratios.get(name), "version": rounds[0]["version"]}
            | {"rounds": [{key: value for key, value in r.items() if key != "tokens"} for r in rounds]}
        )
        for name, rounds in ran.items()
    }
    about = {
        "config": CONFIG.value,
        "cpu": cpu_name(),
        "threads": THREADS,
        "new_tokens": NEW.value,
        "rounds": ROUNDS.value,
    }
    print(json.dumps(round_floats(about | {"engines": engines, "problems": problems})))


def round_floats(value: object) -> object:
    if isinstance(value, dict):
        return {key: round_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_floats(entry) for entry in value]
    return round(value, 3) if isinstance(value, float) else value


def print_table(heads: list[str], rows: list[list], digits: int | None = None) -> None:
    def cell(value: object) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.{digits}f}" if digits is not None else f"{value:.{0 if value >= 100 else 1}f}"
        return str(value)

    lines = [heads, *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        print(
            "  ".join(
                [
                    first.ljust(widths[0]),
                    *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)),
                ]
            )
        )


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def cpu_name() -> str:
    """The name of the CPU, and its vector and matrix instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(about.get("flags", "").split())
    has = [name for name, any_of in INSTRUCTIONS.items() if flags & any_of]
    return f"{about.get('model name', platform.machine())} ({', '.join(has) or 'no wide vectors'})"


if __name__ == "__main__":
    start(main)
