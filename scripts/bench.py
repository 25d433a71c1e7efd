"""Measures the speed and memory of generation, as fractions of this machine's limits: time to first token,
time per token, tok/s, peak memory.

    python scripts/bench.py  # Qwen2.5-0.5B's shape, random weights
    python scripts/bench.py --dtypes=float32,bfloat16 --quantize=none,int8,int4
    python scripts/bench.py --model=DIR --batch_sizes=1,8,32 --ragged --stream

Weights are random unless --model names a checkpoint; prompts are always random. Decoding is greedy and never
stops early. Each dtype x quantize runs in its own process, so its peak memory is its own. The machine's
limits are probed before and after every repetition; a repetition is reported as a fraction of the mean of the
two. The limit of decoding is max(bytes / bandwidth, FLOP / matmul rate), where bytes are the stored weights
and the keys and values. The limit of prefill is the same with (2 x non-embedding weights x tokens + attention
+ one vocabulary row) FLOP. The last line is one JSON object. Exit code 1: a case failed; 2: bad flags, or no
case could run.
"""

from launcher import start

# isort: split
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bench.bench_report import HEADER, case_lines, row_line
from bench.machine_limits import AnonymousPeak, Limits, bytes_per_pass, decode_work, prefill_work, spread
from bench.model_shapes import hf_config

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.params import cache_dtype, resolve_dtype, tree_bytes

FORMATS = ("none", "int8", "int4", "ternary")


def _numbers(name: str, default: list[int], help_text: str, least: int) -> flags.FlagHolder:
    holder = flags.DEFINE_list(name, [str(n) for n in default], help_text)
    message = f"must be whole numbers of at least {least}, with commas between"
    flags.register_validator(
        name, lambda values: all(v.isascii() and v.isdigit() and int(v) >= least for v in values), message
    )
    return holder


CONFIG = flags.DEFINE_string(
    "config", "qwen2.5-0.5b", "A built-in shape, or a directory with config.json. The weights are random."
)
MODEL = flags.DEFINE_string(
    "model", None, "A checkpoint to load instead: a directory, or a name owner/name on the hub."
)
PROMPTS = _numbers("prompt_lengths", [26, 300, 512], "Lengths of the prompts, in tokens.", 1)
NEW = _numbers("new_tokens", [64], "Tokens to generate.", 2)
BATCHES = _numbers("batch_sizes", [1, 8], "Prompts in a batch.", 1)
DTYPES = flags.DEFINE_list("dtypes", ["float32"], "float32, bfloat16, float16.")
QUANTIZE = flags.DEFINE_list("quantize", ["none"], f"{', '.join(FORMATS)}.")
RAGGED = flags.DEFINE_boolean(
    "ragged", False, "Give the rows of a batch different lengths: from the full prompt length down to half."
)
REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Timed runs of each case, after one that compiles.", lower_bound=1
)
STREAM = flags.DEFINE_boolean("stream", False, "Also compare `stream` with `generate`, for one row.")
PROBE = flags.DEFINE_integer(
    "probe_mib", 1024, "Size of the array that is read to measure the bandwidth, in MiB.", lower_bound=1
)
COMPILED = flags.DEFINE_string(
    "compilation_cache", None, "Keep compiled programs here; `compile s` is then the time of loading them."
)
WORKER = flags.DEFINE_string("worker", None, "Internal: measure this dtype:quantize and print JSON lines.")


# --- one case, in its own process ---------------------------------------------------------------------------


class Case:
    """Measures a model in one format."""

    def __init__(self, dtype: str, quantize: str):
        self.memory = AnonymousPeak()
        start = time.perf_counter()
        formats = {} if quantize == "none" else {"quantize": quantize}
        if MODEL.value:
            model = xj.load_model(MODEL.value, dtype=dtype, **formats)
            self.params = model.params
            self.config = model.config
        else:
            self.config = from_hf(hf_config(CONFIG.value))
            self.params = jax.block_until_ready(
                xj.init_params(self.config, jax.random.key(0), dtype, **formats)
            )
        self.loaded = {"load_s": time.perf_counter() - start, "load_peak_bytes": self.memory.peak()}
        self.loaded |= {
            "weight_bytes": tree_bytes(self.params),
            "weight_bytes_per_pass": bytes_per_pass(self.params),
        }
        self.loaded |= {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
        self.cache_itemsize = jnp.dtype(cache_dtype(self.params)).itemsize
        self.rate = "float32" if jax.default_backend() == "cpu" or dtype == "float32" else "bfloat16"

    def measure(self) -> None:
        """Measures everything that the flags ask for and prints each result as a JSON line."""
        _emit("load", self.loaded)
        with Limits(PROBE.value) as limits:
            for prompt, new, rows in itertools.product(
                *([int(v) for v in f.value] for f in (PROMPTS, NEW, BATCHES))
            ):
                _emit(
                    "rows",
                    _or_skipped(self.rows, limits, rows, prompt, new),
                    rows=rows,
                    prompt_tokens=prompt,
                    new_tokens=new,
                )
            if STREAM.value:
                _emit("stream", _or_skipped(self.stream))
            limits.probe()
            _emit("limits", limits.summary())

    def rows(self, limits: Limits, rows: int, prompt: int, new: int) -> dict[str, Any]:
        """Measures prefill and decoding of one batch."""
        lengths = (
            np.linspace(prompt, -(-prompt // 2), rows).round().astype(int).tolist()
            if RAGGED.value
            else [prompt] * rows
        )
        self.memory.reset()
        compile_s = self.generate(lengths, new).stats.compile_seconds
        works = {
            "prefill": prefill_work(self.config, self.loaded["weight_bytes_per_pass"], lengths),
            "decode": decode_work(
                self.config, self.loaded["weight_bytes_per_pass"], self.cache_itemsize, lengths, new
            ),
        }
        runs = []
        probes = [limits.probe()]
        for _ in range(REPEATS.value):
            runs.append(self.generate(lengths, new).stats)
            probes.append(limits.probe())
        around = [
            {kind: (a[kind] + b[kind]) / 2 for kind in ("read", self.rate)}
            for a, b in itertools.pairwise(probes)
        ]
        figures = {
            "ttft_s": spread([s.ttft_seconds for s in runs]),
            "tpot_s": spread([s.tpot_seconds for s in runs]),
            "prefill_tok_s": spread([s.prefill_tokens_per_second for s in runs]),
            "decode_tok_s": spread([s.decode_tokens_per_second for s in runs]),
            "prefill": works["prefill"].fractions_of_limits(
                [s.prefill_seconds for s in runs], around, self.rate
            ),
            "decode": works["decode"].fractions_of_limits([s.tpot_seconds for s in runs], around, self.rate),
        }
        floor = runs[0].weight_bytes + runs[0].cache_bytes
        memory = {
            "cache_bytes": runs[0].cache_bytes,
            "floor_bytes": floor,
            "peak_bytes": self.memory.peak() or runs[-1].peak_bytes,
        }
        return {"lengths": lengths, "compile_s": compile_s, **figures, **memory}

    def stream(self) -> dict[str, Any]:
        """Measures the wall time of whole calls of `generate` and `stream`, interleaved."""
        prompt = int(PROMPTS.value[0])
        new = int(NEW.value[0])
        first = []
        wall = {"generate": [], "stream": []}
        for _ in range(REPEATS.value + 1):
            start = time.perf_counter()
            self.generate([prompt], new)
            wall["generate"].append(time.perf_counter() - start)
            start = time.perf_counter()
            steps = xj.stream(self.params, self.config, _prompts(self.config, [prompt]), _options(new))
            next(steps)
            first.append(time.perf_counter() - start)
            for _ in steps:
                pass
            wall["stream"].append(time.perf_counter() - start)
        wall = {name: seconds[1:] for name, seconds in wall.items()}  # the first ones compiled
        percent = [100 * (s / g - 1) for g, s in zip(wall["generate"], wall["stream"], strict=True)]
        figures = {f"{name}_s": spread(seconds) for name, seconds in wall.items()} | {
            "first_token_s": spread(first[1:])
        }
        return {"prompt_tokens": prompt, "new_tokens": new, **figures, "overhead_percent": spread(percent)}

    def generate(self, lengths: list[int], new: int, **more: Any) -> xj.GenerateOutput:
        return xj.generate(self.params, self.config, _prompts(self.config, lengths), _options(new, **more))


def _prompts(config: xj.ModelConfig, lengths: list[int]) -> list[list[int]]:
    random = np.random.RandomState(0)
    return [random.randint(0, config.vocab_size, n).tolist() for n in lengths]


def _options(new: int, **more: Any) -> xj.GenerateOptions:
    return xj.GenerateOptions(
        max_new_tokens=new, sampling=xj.SamplingConfig(temperature=0.0), eos_token_ids=(), **more
    )


def _or_skipped(function: Any, *args: Any) -> dict[str, Any]:
    """The result of the function, or the message of the input error that it raises."""
    try:
        return function(*args)
    except xj.InputError as error:
        return {"skipped": str(error)}


def _emit(kind: str, value: Any, **more: Any) -> None:
    print(json.dumps({kind: more | value}), flush=True)


# --- all cases ----------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    _check()
    if WORKER.value:
        return _work(*WORKER.value.split(":"))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")} | {
        "python": platform.python_version()
    }
    machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
    }
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
    }
    what = MODEL.value or f"{CONFIG.value}, random weights"
    print(
        f"{what}; {machine['cores']} cores, jax {versions['jax']}, Python {versions['python']},"
        f" {about['date']}"
    )
    cases = [_case(dtype, quantize) for dtype, quantize in itertools.product(DTYPES.value, QUANTIZE.value)]
    results = about | {
        "machine": machine,
        "model": MODEL.value,
        "config": None if MODEL.value else CONFIG.value,
        "cases": cases,
    }
    print(json.dumps(results), flush=True)
    if any("failed" in case for case in cases):
        sys.exit(1)
    sys.exit(2 if all("skipped" in case for case in cases) else 0)


def _check() -> None:
    """Raises InputError for wrong flags, before anything is measured."""
    if MODEL.value and flags.FLAGS["config"].present:
        raise xj.InputError("--config and --model exclude each other: a checkpoint brings its config")
    if not MODEL.value:
        from_hf(hf_config(CONFIG.value))
    for dtype in DTYPES.value:
        resolve_dtype(dtype)
    for quantize in QUANTIZE.value:
        if quantize not in FORMATS:
            raise xj.InputError(f"--quantize={quantize} is not known: use {', '.join(FORMATS)}")
    for holder in (PROMPTS, NEW, BATCHES, DTYPES, QUANTIZE):
        if not holder.value:
            raise xj.InputError(f"--{holder.name} is empty: give at least one value")


def _work(dtype: str, quantize: str) -> None:
    if COMPILED.value:
        jax.config.update("jax_compilation_cache_dir", COMPILED.value)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    else:
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        Case(dtype, quantize).measure()
    except xj.InputError as error:
        print(json.dumps({"skipped": str(error)}), flush=True)


def _case(dtype: str, quantize: str) -> dict[str, Any]:
    """Measures one format in its own process and prints its results as they arrive."""
    case: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "rows": []}
    command = [sys.executable, __file__, *sys.argv[1:], f"--worker={dtype}:{quantize}"]
    # On a GPU the process of the probes needs memory too.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    print(f"\n{dtype}" + (f", {quantize} weights" if quantize != "none" else ""))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            ((kind, value),) = json.loads(line).items()
            if kind == "rows":
                case["rows"].append(value)
                print(row_line(value), flush=True)
            else:
                case[kind] = value
                print("\n".join(case_lines(kind, value)), flush=True)
            if kind == "load":
                print(HEADER)
    if process.returncode:
        case["failed"] = f"exit code {process.returncode}"
        print(f"failed: {case['failed']}", flush=True)
    return case


if __name__ == "__main__":
    start(main)
