"""Starts commands of several processes on this machine and waits for them."""

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

from paths import ROOT

LIMIT = 60  # seconds within which a command must exit


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_until(condition: Callable[[], Any], limit: float = LIMIT) -> Any:
    """Calls the function until its result is true, and returns it."""
    end = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"still false after {limit} seconds")
        time.sleep(0.02)
    return value


@dataclasses.dataclass
class Process:
    """One process of a job: the parent that was started, and its child."""

    parent: subprocess.Popen[str]

    @property
    def child(self) -> int:
        """Process id of the child. Waits until the child was started."""
        tasks = Path(f"/proc/{self.parent.pid}/task")
        return int(
            wait_until(lambda: " ".join(file.read_text() for file in tasks.glob("*/children")).split())[0]
        )

    def end(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Waits until it exits. Returns exit code, standard output and standard error."""
        out, err = self.parent.communicate(timeout=limit)
        return self.parent.returncode, out, err


@contextlib.contextmanager
def job(
    command: str,
    *args: str,
    each: Mapping[int, tuple[str, ...]] | None = None,
    count: int = 2,
    num_started: int = 0,
) -> Iterator[list[Process]]:
    """Starts a command in several processes, and kills them at the end.

    Args:
        command: name of a function of `__main__`.
        args: arguments of all processes.
        each: further arguments of single processes, by process number.
        count: number of processes of the job.
        num_started: number of processes that are started. 0: all.
    """
    address = f"--coordinator=127.0.0.1:{free_port()}"
    started = list[Process]()
    program = f"from xinfer_jax.__main__ import {command}; {command}()"
    environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    try:
        for i in range(num_started or count):
            flags = address, f"--num_processes={count}", f"--process_id={i}", *args, *(each or {}).get(i, ())
            parent = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *flags],
                env=environment, text=True, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            )  # fmt: skip
            started.append(Process(parent))
        yield started
    finally:
        for process in started:
            process.parent.kill()  # its child ends with it
            process.parent.wait()
