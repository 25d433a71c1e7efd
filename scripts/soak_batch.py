"""Answers a file of prompts by processes that are killed again and again: no answer may be lost or doubled,
and no byte may differ.

    python scripts/soak_batch.py --lines=1000 --kills=20

Mixed lines (all forms, random settings, wrong lines), once without a kill, then with --kills SIGKILLs at
random times. The lines are compared, with --in_order the bytes. Prints a JSON line. Exit code 1: they differ.
"""

from launcher import InputError, start

# isort: split
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import flags
from soak.batch_lines import mixed_lines, write_lines

LINES = flags.DEFINE_integer("lines", 1000, "Lines of the file.", lower_bound=10)
KILLS = flags.DEFINE_integer("kills", 20, "Number of kills.", lower_bound=0)
IN_ORDER = flags.DEFINE_boolean("in_order", False, "Write answers in the order of the lines.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of all random choices.")
COMMAND = [sys.executable, str(Path(__file__).parent / "batch.py"), "--capacity=512"]


def compare_with_killed(folder: Path, file: Path, rng: random.Random) -> dict[str, Any]:
    """Compares the output of a run without kills with the output of a run that is killed and restarted."""
    extra_flags = ["--in_order"] * IN_ORDER.value
    start_s = time.perf_counter()
    run(file, folder / "whole", extra_flags)
    seconds = time.perf_counter() - start_s
    kills = 0
    finished = False
    same = True
    killed = folder / "killed"
    while kills < KILLS.value or not finished:
        if run(file, killed, extra_flags, rng.uniform(1, seconds) if kills < KILLS.value else None):
            kills += 1
            continue
        finished = True
        rows: Any = [(folder / name).read_bytes() for name in ("whole", "killed")]
        rows = rows if IN_ORDER.value else [sorted(row.split(b"\n")) for row in rows]
        same &= rows[0] == rows[1]
        if kills < KILLS.value:  # it finished before the last kill: start again
            killed.unlink()
            finished = False
    answers = killed.read_bytes().count(b"\n")
    return dict(same=same, answers=answers, kills=kills, seconds=round(seconds, 1))


def run(file: Path, output: Path, extra_flags: list[str], seconds: float | None = None) -> bool:
    """Runs the command, and kills it after this many seconds. Returns True if it was killed."""
    process = subprocess.Popen(
        [*COMMAND, f"--input={file}", f"--output={output}", "--seed=7", *extra_flags],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode not in (0, 1):  # 1: some lines of `mixed_lines` are errors
        raise InputError(f"the command ended with {process.returncode}: {errors}")
    return False


def main(argv: list[str]) -> int:
    rng = random.Random(SEED.value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_lines(folder / "mixed.jsonl", mixed_lines(rng, LINES.value))
        result = compare_with_killed(folder, file, rng)
    print(json.dumps(dict(lines=LINES.value, **result)))
    return int(not result["same"])


if __name__ == "__main__":
    start(main)
