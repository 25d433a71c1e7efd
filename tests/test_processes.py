"""Several processes that run one model, on this machine: what they answer, and how they end where one does."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).parents[1]
LIMIT = 60  # seconds in which a command has ended, however it is disturbed
SHAPE = ("--rows=2", "--capacity=256", "--pages=12", "--raw", "--in_order")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def child_of(parent: int) -> int | None:
    """The process that a process has started."""
    found = [task.read_text().split() for task in Path(f"/proc/{parent}/task").glob("*/children")]
    return next((int(ids[0]) for ids in found if ids), None)


@dataclasses.dataclass
class Process:
    parent: subprocess.Popen

    @property
    def child(self) -> int:
        """Its process id, once it has been started."""
        return until(lambda: child_of(self.parent.pid))

    def end(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Exit code, standard output and error."""
        out, err = self.parent.communicate(timeout=limit)
        return self.parent.returncode, out, err


def until(found, limit: float = LIMIT):
    """What a function gives, once it is true."""
    end = time.monotonic() + limit
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def job(command: str, *args: str, each: dict[int, tuple[str, ...]] | None = None, count=2, come=None):
    """`come` of `count` processes, all if None; each: further arguments of some. Nothing of them is left."""
    address, started = f"--coordinator=127.0.0.1:{free_port()}", list[Process]()
    program = f"from xinfer_jax.__main__ import {command}; {command}()"
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    for i in range(count if come is None else come):
        given = address, f"--num_processes={count}", f"--process_id={i}", *args, *(each or {}).get(i, ())
        parent = subprocess.Popen(
            [sys.executable, "-c", program, *given], env=environment, stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(Process(parent))
    try:
        yield started
    finally:
        for process in started:
            process.parent.kill()  # its child ends with it
            process.parent.wait()


def alone(command: str, *args: str) -> subprocess.CompletedProcess:
    program = f"from xinfer_jax.__main__ import {command}; {command}()"
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    return subprocess.run(
        [sys.executable, "-c", program, *args], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint of one layer with a tokenizer, which never ends by itself."""
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIG | dict(num_hidden_layers=1))


@pytest.fixture
def lines(tmp_path) -> Path:
    file = tmp_path / "in.jsonl"
    rows = (dict(prompt=f"the {i}", max_tokens=40, temperature=i % 2 * 0.8, seed=i) for i in range(40))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def batch(model: Path, lines: Path, name: str, *args: str) -> tuple[str, ...]:
    return f"--model={model}", f"--input={lines}", f"--output={lines.parent / name}", *SHAPE, *args
