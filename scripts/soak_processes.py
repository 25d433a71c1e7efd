"""Answers a file by several processes, and kills or stops one of them again and again. The others must exit
within a minute with code 1 and a line that names it; the finished file must have the bytes of a run of one
process.

    python scripts/soak_processes.py --processes=4 --kills=8

Prints a JSON line per kill: which process, how, seconds until all exited, lines answered so far. Exit code 1:
a process did not exit like that, or a byte differs.
"""

from launcher import start

# isort: split
import json
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

from absl import flags
from process_jobs import Process, job, wait_until

import xinfer_jax as xj

PROCESSES = flags.DEFINE_integer("processes", 4, "Number of processes that run the model.", lower_bound=2)
KILLS = flags.DEFINE_integer("kills", 8, "Number of kills.", lower_bound=0)
LINES = flags.DEFINE_integer("lines", 1000, "Lines of the file.", lower_bound=10)
MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of which process is killed, and when.")

SHAPE = dict(rows=4, capacity=256, pages=40)
WAYS = [("child", signal.SIGKILL), ("parent", signal.SIGKILL), ("child", signal.SIGSTOP)]


def main(_: list[str]) -> int:
    draw = random.Random(SEED.value)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        lines, one, out = (Path(folder) / name for name in ("lines", "one", "out"))
        rows = (dict(prompt=f"What is {i} + 1?", seed=i, temperature=i % 2) for i in range(LINES.value))
        lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        options = xj.GenerateOptions(16)
        xj.generate_file(
            xj.load_model(MODEL.value), lines, one, options, in_order=True, progress=False, **SHAPE
        )
        settings = dict(input=lines, output=out, max_tokens=16, log_dir=Path(folder) / "logs", **SHAPE)
        args = [f"--{name}={value}" for name, value in settings.items()] + ["--in_order"]
        if MODEL.value:
            args.append(f"--model={MODEL.value}")
        for i in range(KILLS.value):
            with job("batch", *args, count=PROCESSES.value) as processes:
                good &= kill_one(processes, out, *WAYS[i % len(WAYS)], draw)
        with job("batch", *args, count=PROCESSES.value) as processes:
            ends = [process.end(600) for process in processes]
        same = out.read_bytes() == one.read_bytes() and {code for code, _, _ in ends} == {0}
        print(json.dumps(dict(lines=LINES.value, processes=PROCESSES.value, same=same)), flush=True)
    return 0 if good and same else 1


def kill_one(
    processes: list[Process], out: Path, target: str, kill_signal: signal.Signals, draw: random.Random
) -> bool:
    """Kills or stops a process after some more answers. Returns whether all exited as expected."""
    before = count(out)
    number = draw.randrange(len(processes))
    enough = before + draw.randrange(1, max(2, LINES.value // (2 * KILLS.value)))
    wait_until(lambda: count(out) >= enough, 600)
    start_s = time.monotonic()
    victim = processes[number]
    os.kill(victim.child if target == "child" else victim.parent.pid, kill_signal)
    ends = [process.end() for process in processes]
    seconds = time.monotonic() - start_s
    message = (
        rf"process {number} of {len(processes)} \([^)]*\) (was ended by SIGKILL|is gone|stopped answering)"
    )
    good = seconds < 60
    for i, (code, _, err) in enumerate(ends):
        if target == "child" or i != number:
            good &= code == 1 and len(re.findall(message, err)) == 1 and "Traceback" not in err
    line = dict(
        who=number,
        what=target,
        how=kill_signal.name,
        seconds=round(seconds, 1),
        lines=count(out),
        as_said=good,
    )
    print(json.dumps(line), flush=True)
    return good


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


if __name__ == "__main__":
    start(main)
