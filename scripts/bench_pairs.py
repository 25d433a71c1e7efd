"""Times the working tree and a commit: interleaved pairs of calls in two processes, so that other work of the
machine affects both equally.

    python scripts/bench_pairs.py --base=main --config=qwen2.5-0.5b --quantize=none,int8,int4

Prints for each format and call the ratio of seconds, the working tree's by the commit's: median and
quartiles. `first` is the call `stream` in a new process that has compiled nothing, with the process's own
start. Weights are random.
"""

from launcher import start

# isort: split
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from bench.commit_checkout import checkout_of, start_in
from script_paths import ROOT

from xinfer_jax.estimates.model_shapes import hf_config

CALLS = ("stream", "stream_8", "generate", "generate_8", "prompt", "engine_8")
_BASE = flags.DEFINE_string("base", "HEAD", "The commit to compare the working tree with.")
_CONFIG = flags.DEFINE_string("config", "qwen2.5-0.5b", "A built-in shape or a directory with config.json.")
_QUANTIZE = flags.DEFINE_list("quantize", ["none", "int8", "int4"], "Formats of the weights.")
_CALLS = flags.DEFINE_multi_enum("calls", [*CALLS, "first"], [*CALLS, "first"], "Calls; repeat for several.")
_PAIRS = flags.DEFINE_integer("pairs", 10, "Pairs of each call.", lower_bound=1)


def start_process(checkout: Path, config_file: Path, quantize: str) -> subprocess.Popen:
    environment = dict(JAX_ENABLE_COMPILATION_CACHE="0")
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return start_in(checkout, "bench/call_times.py", [config_file, quantize], environment, **pipes)


def ask(process: subprocess.Popen, call: str) -> float:
    """Returns the seconds of a call in a process."""
    process.stdin.write(f"{call}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{call} failed: see above")
    return float(answer)


def first_call(checkout: Path, config_file: Path, quantize: str) -> float:
    """Returns the seconds of a new process until its first answer is complete."""
    began = time.perf_counter()
    with start_process(checkout, config_file, quantize) as process:
        ask(process, "stream")
        return time.perf_counter() - began


def ratios(measure: Callable[[int], float]) -> list[float]:
    """Returns the ratios of pairs. measure: seconds of the commit (0) or of the working tree (1)."""
    found = []
    for number in range(_PAIRS.value):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {side: measure(side) for side in order}
        found.append(seconds[1] / seconds[0])
    return found


def measure_format(quantize: str, checkouts: list[Path], config_file: Path) -> None:
    with (
        start_process(checkouts[0], config_file, quantize) as base,
        start_process(checkouts[1], config_file, quantize) as tree,
    ):
        for call in CALLS:
            if call in _CALLS.value:
                for process in (base, tree):
                    ask(process, call)  # compiles
                print_ratios(quantize, call, ratios(lambda side, call=call: ask((base, tree)[side], call)))
    if "first" in _CALLS.value:
        print_ratios(
            quantize, "first", ratios(lambda side: first_call(checkouts[side], config_file, quantize))
        )


def print_ratios(quantize: str, call: str, found: list[float]) -> None:
    low, median, high = np.quantile(found, (0.25, 0.5, 0.75))
    print(f"{quantize:8} {call:12} {median:.3f} ({low:.3f}-{high:.3f})", flush=True)


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name, checkout_of(_BASE.value, Path(name) / "base") as base:
        config_file = Path(name) / "config.json"
        config_file.write_text(json.dumps(hf_config(_CONFIG.value)), encoding="utf-8")
        for quantize in _QUANTIZE.value:
            measure_format(quantize, [base, ROOT], config_file)


if __name__ == "__main__":
    start(main)
