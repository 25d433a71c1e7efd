"""A file answered by several processes, of which one is killed or stopped again and again: all have to end
within a minute with exit code 1 and a line that names it, and the file to end with the bytes of one process.

    python scripts/soak_processes.py --processes=4 --kills=8

Prints a JSON line a kill: who, how, seconds until all had ended, lines answered so far. Exit code 1: somebody
did not end as said, or a byte differs.
"""

from one_line import start

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
from soak_processes_jobs import Process, job, until

import xinfer_jax as xj

PROCESSES = flags.DEFINE_integer("processes", 4, "That run the model.", lower_bound=2)
KILLS = flags.DEFINE_integer("kills", 8, "That must hit.", lower_bound=0)
LINES = flags.DEFINE_integer("lines", 1000, "Of the file.", lower_bound=10)
MODEL = flags.DEFINE_string("model", None, "Checkpoint. Default: the bundled one.")
SEED = flags.DEFINE_integer("seed", 0, "Of who is hit, and when.")

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
        given = dict(input=lines, output=out, max_tokens=16, log_dir=Path(folder) / "logs", **SHAPE)
        args = [f"--{name}={value}" for name, value in given.items()] + ["--in_order"]
        args += [f"--model={MODEL.value}"] if MODEL.value else []
        for i in range(KILLS.value):
            with job("batch", *args, count=PROCESSES.value) as processes:
                good &= disturbed(processes, out, *WAYS[i % len(WAYS)], draw)
        with job("batch", *args, count=PROCESSES.value) as processes:
            ends = [process.end(600) for process in processes]
        same = out.read_bytes() == one.read_bytes() and {code for code, _, _ in ends} == {0}
        print(json.dumps(dict(lines=LINES.value, processes=PROCESSES.value, same=same)), flush=True)
    return 0 if good and same else 1


def disturbed(
    processes: list[Process], out: Path, what: str, how: signal.Signals, draw: random.Random
) -> bool:
    """Hits one of them once some more lines are there; whether all ended as they should."""
    before = count(out)
    who = draw.randrange(len(processes))
    enough = before + draw.randrange(1, max(2, LINES.value // (2 * KILLS.value)))
    until(lambda: count(out) >= enough, 600)
    began = time.monotonic()
    victim = processes[who]
    os.kill(victim.child if what == "child" else victim.parent.pid, how)
    ends = [process.end() for process in processes]
    seconds = time.monotonic() - began
    told = rf"process {who} of {len(processes)} \([^)]*\) (was ended by SIGKILL|is gone|stopped answering)"
    good = seconds < 60
    for i, (code, _, err) in enumerate(ends):
        if what == "child" or i != who:
            good &= code == 1 and len(re.findall(told, err)) == 1 and "Traceback" not in err
    hit = dict(who=who, what=what, how=how.name, seconds=round(seconds, 1), lines=count(out), as_said=good)
    print(json.dumps(hit), flush=True)
    return good


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


if __name__ == "__main__":
    start(main)
