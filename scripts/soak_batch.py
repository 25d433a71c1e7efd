"""A file of prompts answered again and again by processes that are killed on the way: nothing may be lost,
nothing twice, and no byte differ.

    python scripts/soak_batch.py --lines=1000 --kills=20
    python scripts/soak_batch.py --parts=questions --lines=1000 --kills=2
    python scripts/soak_batch.py --parts=memory --lines=100000

kills: mixed lines (all forms, settings drawn at random, bad lines), once without a kill, then killed by
    SIGKILL at random moments until so many have hit; the lines are compared, and with --in_order the bytes.
questions: those of train_tiny_data.py to the bundled model, right answers counted; with --model beginnings of
    texts for a model without a chat template, continued. Both killed likewise.
memory: short lines in this process: resident memory after the first thousand and at the end, and the share of
    the time that reading, hashing and writing lines take.
Prints a JSON line a part. Exit code 1: something differs, memory grew by 20 MiB or more, or that share is 2%
or more.
"""

from one_line import InputError, start

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

import train_tiny_data as tiny_data
from absl import flags
from soak_batch_lines import mixed, written

PARTS = ("kills", "questions", "memory")
WANTED = flags.DEFINE_list("parts", ["kills"], f"What is done: {', '.join(PARTS)}.")
LINES = flags.DEFINE_integer("lines", 1000, "Of the file.", lower_bound=10)
KILLS = flags.DEFINE_integer("kills", 20, "That must hit.", lower_bound=0)
IN_ORDER = flags.DEFINE_boolean("in_order", False, "Answers in the order of the lines.")
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled one.")
SEED = flags.DEFINE_integer("seed", 0, "Of all that is drawn.")
COMMAND = [sys.executable, str(Path(__file__).parent / "batch.py"), "--capacity=512"]


def main(argv: list[str]) -> int:
    if unknown := set(WANTED.value) - set(PARTS):
        raise InputError(f"--parts knows {', '.join(PARTS)}, got {unknown.pop()!r}")
    rng = random.Random(SEED.value)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in WANTED.value:
            found = {"kills": kills, "questions": questions, "memory": memory}[part](Path(folder), rng)
            print(json.dumps(dict(part=part, lines=LINES.value, **found)), flush=True)
            failed |= not found.pop("good")
    return failed


def kills(folder: Path, rng: random.Random) -> dict[str, Any]:
    file = written(folder / "mixed.jsonl", mixed(rng, LINES.value))
    return compared(folder, file, rng, [])


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
    more = [f"--model={MODEL.value}", "--max_tokens=64"] if MODEL.value else ["--max_tokens=32"]
    found = compared(folder, written(folder / "questions.jsonl", lines), rng, more)
    if not MODEL.value:
        answers = {row["id"]: row["text"] for row in map(json.loads, (folder / "killed").open())}
        found["right"] = sum(answers[i + 1] == right for i, (_, right) in enumerate(turns))
    return found


def memory(folder: Path, rng: random.Random) -> dict[str, Any]:
    """In this process, whose calls are timed."""
    import xinfer_jax as xj
    from xinfer_jax.batch import ledger, run

    seconds = 0.0
    first: list[float] = []
    file = written(
        folder / "short.jsonl", (dict(prompt=f"Hi {i}", custom_id=f"n{i}") for i in range(LINES.value))
    )

    def timed(function: Any, clock: Any = time.perf_counter) -> Any:
        def call(*args: Any) -> Any:
            nonlocal seconds
            began = clock()
            try:
                return function(*args)
            finally:
                seconds += clock() - began

        return call

    def read(lines: Any) -> Iterator[Any]:
        lines = read_lines(lines)
        step = timed(lambda: next(lines, None), time.thread_time)  # it has a thread of its own
        while (line := step()) is not None:
            if line.number == 1000 or line.number % (LINES.value // 10) == 0:
                first.append(_resident())
            yield line

    read_lines = run.read_lines
    run.read_lines = read
    for name in ("add", "settle"):
        setattr(ledger.Ledger, name, timed(getattr(ledger.Ledger, name)))
    report = run.generate_file(
        xj.load_model(), file, folder / "short", xj.GenerateOptions(2), capacity=128, raw=True
    )
    resident = first[-1] - first[0]
    share = seconds / report["seconds"]
    good = resident < 20 and share < 0.02
    return dict(
        good=good, grown_mib=round(resident, 1), share=round(share, 4), seconds=round(report["seconds"], 1)
    )


def compared(folder: Path, file: Path, rng: random.Random, more: list[str]) -> dict[str, Any]:
    """The output of a run that nobody disturbs, and of one that is killed."""
    more = more + ["--in_order"] * IN_ORDER.value
    began = time.perf_counter()
    run(file, folder / "whole", more)
    seconds = time.perf_counter() - began
    hit = 0
    wholes = 0
    same = True
    killed = folder / "killed"
    while hit < KILLS.value or not wholes:
        if run(file, killed, more, rng.uniform(1, seconds) if hit < KILLS.value else None):
            hit += 1
            continue
        wholes += 1
        rows: Any = [(folder / name).read_bytes() for name in ("whole", "killed")]
        rows = rows if IN_ORDER.value else [sorted(row.split(b"\n")) for row in rows]
        same &= rows[0] == rows[1]
        if hit < KILLS.value:  # it came to its end: once more from the beginning
            killed.unlink()
            wholes = 0
    answers = killed.read_bytes().count(b"\n")
    return dict(good=same, same=same, answers=answers, kills=hit, seconds=round(seconds, 1))


def run(file: Path, output: Path, more: list[str], seconds: float | None = None) -> bool:
    """The command, killed after so many seconds; whether that hit it."""
    process = subprocess.Popen(
        [*COMMAND, f"--input={file}", f"--output={output}", "--seed=7", *more],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    if process.returncode not in (0, 1):  # 1: some lines of `mixed` are errors
        raise InputError(f"the command ended with {process.returncode}: {said}")
    return False


def _resident() -> float:
    """MiB of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) / 1024


if __name__ == "__main__":
    start(main)
