"""Answers a file of prompts by processes that are killed again and again: no answer may be lost or doubled,
and no byte may differ.

    python scripts/soak_batch.py --lines=1000 --kills=20
    python scripts/soak_batch.py --parts=questions --lines=1000 --kills=2
    python scripts/soak_batch.py --parts=memory --lines=100000

kills: mixed lines (all forms, random settings, wrong lines), once without a kill, then with --kills SIGKILLs
    at random times. The lines are compared, with --in_order the bytes.
questions: the questions of train/tiny_data.py to the bundled model, and the number of right answers; with
    --model, beginnings of sentences for a model without a chat template. Killed in the same way.
memory: short lines in this process: resident memory after the first thousand and at the end, and the fraction
    of the time for reading, hashing and writing lines.
Prints a JSON line per part. Exit code 1: something differs, memory grew by 20 MiB or more, or that fraction
is 2% or more.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags
from soak.batch_lines import mixed_lines, write_lines
from train import tiny_data

PARTS = ("kills", "questions", "memory")
WANTED = flags.DEFINE_list("parts", ["kills"], f"Parts to run: {', '.join(PARTS)}.")
LINES = flags.DEFINE_integer("lines", 1000, "Lines of the file.", lower_bound=10)
KILLS = flags.DEFINE_integer("kills", 20, "Number of kills.", lower_bound=0)
IN_ORDER = flags.DEFINE_boolean("in_order", False, "Write answers in the order of the lines.")
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of all random choices.")
COMMAND = [sys.executable, str(Path(__file__).parent / "batch.py"), "--capacity=512"]


def main(argv: list[str]) -> int:
    if unknown := set(WANTED.value) - set(PARTS):
        raise InputError(f"--parts knows {', '.join(PARTS)}, got {unknown.pop()!r}")
    rng = random.Random(SEED.value)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in WANTED.value:
            result = {"kills": kills, "questions": questions, "memory": memory}[part](Path(folder), rng)
            print(json.dumps(dict(part=part, lines=LINES.value, **result)), flush=True)
            failed |= not result.pop("good")
    return failed


def kills(folder: Path, rng: random.Random) -> dict[str, Any]:
    file = write_lines(folder / "mixed.jsonl", mixed_lines(rng, LINES.value))
    return compare_with_killed(folder, file, rng, [])


def questions(folder: Path, rng: random.Random) -> dict[str, Any]:
    turns = [turn for phrasing in tiny_data.PHRASINGS for turn in tiny_data.evaluation_set(phrasing)]
    turns = [turns[i % len(turns)] for i in rng.sample(range(max(LINES.value, len(turns))), LINES.value)]
    if MODEL.value:
        sentences = [tiny_data.raw_sentence(name)[0] for name in tiny_data.NAMED_CAPITALS]
        lines = [
            dict(prompt=f"{rng.choice(sentences)} {i}", temperature=0.8, top_k=20) for i in range(LINES.value)
        ]
    else:
        lines = [dict(prompt=question) for question, _ in turns]
    extra_flags = [f"--model={MODEL.value}", "--max_tokens=64"] if MODEL.value else ["--max_tokens=32"]
    file = write_lines(folder / "questions.jsonl", lines)
    result = compare_with_killed(folder, file, rng, extra_flags)
    if not MODEL.value:
        answers = {row["id"]: row["text"] for row in map(json.loads, (folder / "killed").open())}
        result["right"] = sum(answers[i + 1] == right for i, (_, right) in enumerate(turns))
    return result


def memory(folder: Path, rng: random.Random) -> dict[str, Any]:
    """Runs in this process, and times calls in it."""
    import xinfer_jax as xj
    from xinfer_jax.batch import resumable_output, run_batch

    seconds = 0.0
    resident: list[float] = []
    file = write_lines(
        folder / "short.jsonl", (dict(prompt=f"Hi {i}", custom_id=f"n{i}") for i in range(LINES.value))
    )

    def timed(function: Any, clock: Any = time.perf_counter) -> Any:
        def call(*args: Any) -> Any:
            nonlocal seconds
            start_s = clock()
            try:
                return function(*args)
            finally:
                seconds += clock() - start_s

        return call

    def timed_read_lines(lines: Any) -> Iterator[Any]:
        lines = read_lines(lines)
        step = timed(lambda: next(lines, None), time.thread_time)  # it runs in its own thread
        while (line := step()) is not None:
            if line.number == 1000 or line.number % (LINES.value // 10) == 0:
                resident.append(_resident())
            yield line

    read_lines = run_batch.read_lines
    run_batch.read_lines = timed_read_lines
    for name in ("add", "sync"):
        setattr(
            resumable_output.ResumableOutput, name, timed(getattr(resumable_output.ResumableOutput, name))
        )
    report = run_batch.generate_file(
        xj.load_model(), file, folder / "short", xj.GenerateOptions(2), capacity=128, raw=True
    )
    grown = resident[-1] - resident[0]
    share = seconds / report["seconds"]
    good = grown < 20 and share < 0.02
    return dict(
        good=good, grown_mib=round(grown, 1), share=round(share, 4), seconds=round(report["seconds"], 1)
    )


def compare_with_killed(
    folder: Path, file: Path, rng: random.Random, extra_flags: list[str]
) -> dict[str, Any]:
    """Compares the output of a run without kills with that of a run that is killed and restarted."""
    extra_flags = extra_flags + ["--in_order"] * IN_ORDER.value
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
    return dict(good=same, same=same, answers=answers, kills=kills, seconds=round(seconds, 1))


def run(file: Path, output: Path, extra_flags: list[str], seconds: float | None = None) -> bool:
    """Runs the command, and kills it after this many seconds. Returns whether it was killed."""
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


def _resident() -> float:
    """Anonymous memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) / 1024


if __name__ == "__main__":
    start(main)
