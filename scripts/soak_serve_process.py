"""The server process that soak_serve.py --attacks measures, and who looks at it meanwhile."""

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak_serve_attackers import Attack
from soak_serve_sending import HOST

from xinfer_jax.errors import InputError

HERE = Path(__file__).resolve().parent
SHAPE = dict(rows=8, capacity=2048, pages=300)
GRACE = 2
MORE_GRACE = 5  # seconds that the server gives its answers, and that its end may take beyond them
STARTED = 120.0  # seconds that a start may take
MOST_MEMORY = 10 * 2**10  # MiB at which a server is killed, so that the machine survives


class Server:
    """A server process, and those that it starts."""

    def __init__(self, folder: Path, options: Sequence[str], attack: Attack | None):
        """options: of the model."""
        self.log = folder / "log"
        self.headers = {"content-type": "application/json"}
        shape = [f"--{name}={value}" for name, value in SHAPE.items()]
        flags = ["--port=0", f"--grace={GRACE}", *shape, *options, *(attack.flags if attack else ())]
        if attack and attack.keyed:
            keys = folder / "keys"
            keys.write_text("second-client\n", encoding="utf-8")
            self.headers["authorization"] = "Bearer second-client"
            flags.append(f"--api_key_file={keys}")
        with self.log.open("wb") as log:
            command = [sys.executable, HERE / "serve.py", *flags]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # Kills the server once nobody holds the other end of its standard input: however this process ends.
        guard = ["sh", "-c", f"read _; kill -9 {self.process.pid}"]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        if attack and attack.files:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (attack.files, attack.files))
        self.port = 0
        self._wait()

    def _wait(self) -> None:
        """Until it is ready."""
        end = time.monotonic() + STARTED
        while self.process.poll() is None and time.monotonic() < end:
            found = re.search(r"listening on http://[^ ]*:(\d+)", self.said())
            if found:
                self.port = int(found[1])
                if self.health()[0] == "200":
                    return
            time.sleep(0.1)
        self.kill()
        raise InputError(f"the server did not start: {self.said()[-500:]}")

    def said(self) -> str:
        return self.log.read_bytes()[-4000:].decode(errors="replace")

    def send(
        self, method: str, path: str, body: Any = None, seconds: float = 60.0, source: str = "127.0.0.2"
    ) -> tuple[str, bytes]:
        """Status and body, or the name of an error and nothing."""
        connection = http.client.HTTPConnection(
            HOST, self.port, timeout=max(0.05, seconds), source_address=(source, 0)
        )
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, self.headers)
            answer = connection.getresponse()
            return str(answer.status), answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, b""
        finally:
            connection.close()

    def health(self) -> tuple[str, float]:
        """Status, and the seconds that it took."""
        began = time.monotonic()
        return self.send("GET", "/health", source="127.0.0.3", seconds=20)[0], time.monotonic() - began

    def processes(self) -> list[int]:
        """The server's, and those of the processes that it started."""
        found = [self.process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{pid}/task").glob("*/children"):
                    found += map(int, file.read_text().split())
        return found

    def resident(self) -> float:
        """MiB that no file backs, of all its processes."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                total += int(found[1]) if found else 0
        return total / 1024

    def end(self) -> tuple[float, list[int]]:
        """Sends SIGTERM; the seconds until the process had ended, and processes that it left behind. It is
        killed 5 s after it should have ended.
        """
        others = self.processes()[1:]
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE + MORE_GRACE + 5)
        seconds = time.monotonic() - began
        left = [pid for pid in others if _lives(pid)]
        self.kill(others)
        return seconds, left

    def kill(self, others: Sequence[int] = ()) -> None:
        for pid in {*self.processes()[1:], *others}:
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)
        for process in (self._guard, self.process):
            process.kill()
            process.wait()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Watcher:
    """Looks at a server meanwhile: its memory, and its /health."""

    def __init__(self, server: Server):
        self._server = server
        self._over = threading.Event()
        self.before = self.peak = server.resident()
        self.slowest = 0.0
        self.health = Counter[str]()
        self.killed = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._memory, self._ask)]
        for thread in self._threads:
            thread.start()

    def _memory(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, now := self._server.resident())
            if now > MOST_MEMORY:
                self.killed = True
                self._server.kill()
                return

    def _ask(self) -> None:
        while not self._over.wait(0.5):
            status, seconds = self._server.health()
            if not self._over.is_set() or status == "200":
                self.health[status] += 1
                self.slowest = max(self.slowest, seconds)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
