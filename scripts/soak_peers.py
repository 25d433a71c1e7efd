"""Checks prefill and decode processes behind a front process: random requests get the bits of one engine,
while processes are killed again and again.

    python scripts/soak_peers.py --kills=10

--kills SIGKILLs of either side come at random times, while requests come. There are two processes of each
side, and a new one for each that is killed. Every request must end: with the bits that it has alone in one
engine of this process, or with an error that names a decode process. At the end all pages are free or cached.
Prints a JSON line. Exit code 1: something differs, or does not end.
"""

from launcher import start

# isort: split
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from absl import flags
from script_paths import ROOT
from soak.engine_requests import draw, outcome, same_outcome

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.processes.secret import load_secret
from xinfer_jax.serve.peer_front import PeerEngines

MODEL = flags.DEFINE_string("model", None, "A checkpoint. Default: the bundled model.")
KILLS = flags.DEFINE_integer("kills", 10, "Kills of each side.", lower_bound=1)
LONGEST = flags.DEFINE_integer("longest", 300, "Tokens of the longest prompt.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 4, "Rows of each engine.", lower_bound=1)
PAGES = flags.DEFINE_integer("pages", 17, "Pages of each engine.", lower_bound=2)
CACHE = flags.DEFINE_string("cache_dtype", None, "Dtype of keys and values.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of all random choices.")
_HOST = "127.0.0.1"


class Processes:
    """A front process's engine here, and the processes that it has."""

    def __init__(self, shape: dict, folder: str):
        self._shape = shape
        self._folder = Path(folder)
        self.lines: list[str] = []
        self.running: dict[str, list[subprocess.Popen]] = dict(prefill=[], decode=[])
        listening = socket.create_server((_HOST, 0))
        self._port = listening.getsockname()[1]
        model = open_checkpoint(MODEL.value).model
        self.front = PeerEngines(model, listening, load_secret(None, _HOST), self.lines.append)

    def start(self, role: str) -> None:
        sizes = [f"--{name}={value}" for name, value in self._shape.items() if value is not None]
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), f"--role={role}", "--warm_up", *sizes]
        command += [f"--peer={_HOST}:{self._port}", *([f"--model={MODEL.value}"] if MODEL.value else [])]
        log = (self._folder / f"{role}{len(self.lines)}{time.monotonic()}").open("w")
        self.running[role].append(subprocess.Popen(command, stdout=log, stderr=log))

    def wait_for(self, each: int) -> None:
        """Waits until this number of processes of each role is connected."""
        while any(sum(peer.role == role for peer in self.front.engines) < each for role in self.running):
            for processes in self.running.values():
                for process in processes:
                    assert process.poll() is None, "a process has ended by itself"
            time.sleep(0.1)

    def kill(self, role: str) -> None:
        """Kills a process that is connected, and starts another."""
        process = self.running[role].pop(0)
        process.kill()
        process.wait()
        self.start(role)

    def close(self) -> None:
        self.front.close()
        for processes in self.running.values():
            for process in processes:
                process.wait(30)


def main(argv: list[str]) -> int:
    shape = dict(rows=ROWS.value, pages=PAGES.value, capacity=1024, cache_dtype=CACHE.value)
    with tempfile.TemporaryDirectory() as folder:
        with xj.Engine(xj.load_model(MODEL.value), **shape, warm_up=True) as single:
            result = check_kills(single, Processes(shape, folder), shape)
    print(json.dumps(result))
    return int(result["differ"] + result["unnamed"] + result["pages_used"] > 0)


def check_kills(single: xj.Engine, processes: Processes, shape: dict) -> dict:
    rng = random.Random(SEED.value)
    front = processes.front
    for role in (*processes.running, *processes.running):
        processes.start(role)
    found = []
    kills = ["prefill", "decode"] * KILLS.value
    for role in kills:
        processes.wait_for(2)
        requests = draw(rng, single.model.config.vocab_size, 30, LONGEST.value, shape)
        for request in requests:
            request.more.pop("deadline", None)
        submitted = [front.submit(r.ids, r.options, key=r.key, **r.more) for r in requests]
        time.sleep(rng.uniform(0, 3))
        processes.kill(role)
        found += [(request, outcome(own)) for request, own in zip(requests, submitted, strict=True)]
    again = [single.submit(r.ids, r.options, key=r.key, **r.more) for r, _ in found]
    alone = [*map(outcome, again)]
    lost = [isinstance(got[0], str) and "is gone" in got[0] for _, got in found]
    errors = Counter(got[0] for (_, got), is_lost in zip(found, lost, strict=True) if is_lost)
    whole = zip(found, alone, lost, strict=True)
    pairs = [(got, own) for (_, got), own, is_lost in whole if not is_lost]
    differ = sum(not same_outcome(*pair) for pair in pairs)
    processes.wait_for(2)
    time.sleep(2.5)
    used = sum(peer.counts()["pages_used"] for peer in front.engines)
    processes.close()
    unnamed = sum(count for error, count in errors.items() if "the decode process" not in error)
    return dict(
        requests=len(found), kills=len(kills), errors=errors.total(), differ=differ, unnamed=unnamed,
        pages_used=used,
    )  # fmt: skip


if __name__ == "__main__":
    start(main)
