"""Commands of several processes on this machine: started, disturbed, waited for; also of the tests."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 60  # seconds in which a command has ended, however it is disturbed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def until(found: Callable[[], Any], limit: float = LIMIT) -> Any:
    """What a function gives, once it is true."""
    end = time.monotonic() + limit
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {limit} seconds")
        time.sleep(0.02)
    return value


@dataclasses.dataclass
class Process:
    """One of a job: the parent that was started, and its child."""

    parent: subprocess.Popen[str]

    @property
    def child(self) -> int:
        """Its process id, once it has been started."""
        tasks = Path(f"/proc/{self.parent.pid}/task")
        return int(until(lambda: " ".join(file.read_text() for file in tasks.glob("*/children")).split())[0])

    def end(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Exit code, standard output and error."""
        out, err = self.parent.communicate(timeout=limit)
        return self.parent.returncode, out, err


@contextlib.contextmanager
def job(
    command: str, *args: str, each: Mapping[int, tuple[str, ...]] | None = None, count: int = 2, come: int = 0
) -> Iterator[list[Process]]:
    """`come` of `count` processes, all if 0. Of them nothing is left behind.

    Args:
        command: a function of `__main__`.
        args, each: arguments of all of them; of some.
    """
    address = f"--coordinator=127.0.0.1:{free_port()}"
    started = list[Process]()
    program = f"from xinfer_jax.__main__ import {command}; {command}()"
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    try:
        for i in range(come or count):
            given = address, f"--num_processes={count}", f"--process_id={i}", *args, *(each or {}).get(i, ())
            parent = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *given],
                env=environment, text=True, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            )  # fmt: skip
            started.append(Process(parent))
        yield started
    finally:
        for process in started:
            process.parent.kill()  # its child ends with it
            process.parent.wait()
