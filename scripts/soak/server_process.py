"""The server process that soak_serve.py --attacks measures, and the watcher of its memory and health."""

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

from script_paths import SCRIPTS

from soak.attacks import Attack
from soak.senders import HOST
from xinfer_jax.errors import InputError

SHAPE = dict(rows=8, capacity=2048, pages=300)
GRACE = 2
MORE_GRACE = 5  # seconds: the --grace of the server, and the time for its exit beyond that
START_LIMIT = 120.0  # seconds
MOST_MEMORY = 10 * 2**10  # MiB; above, the server is killed, to protect the machine


class Server:
    """A server process and its child processes."""

    def __init__(self, folder: Path, options: Sequence[str], attack: Attack):
        """Starts a server. options: flags that name a model."""
        self.log = folder / "log"
        self.headers = {"content-type": "application/json"}
        shape = [f"--{name}={value}" for name, value in SHAPE.items()]
        flags = ["--port=0", f"--grace={GRACE}", *shape, *options, *attack.flags]
        if attack.prepare:
            flags += attack.prepare(folder)
        if attack.keyed:
            keys = folder / "keys"
            keys.write_text("second-client\n", encoding="utf-8")
            self.headers["authorization"] = "Bearer second-client"
            flags.append(f"--api_key_file={keys}")
        with self.log.open("wb") as log:
            command = [sys.executable, SCRIPTS / "serve.py", *flags]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # Kills the server when its standard input is closed, that is when this process ends in any way.
        guard = ["sh", "-c", f"read _; kill -9 {self.process.pid}"]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        if attack.files:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (attack.files, attack.files))
        self.port = 0
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_LIMIT
        while self.process.poll() is None and time.monotonic() < end:
            listening = re.search(r"listening on http://[^ ]*:(\d+)", self.log_end())
            if listening:
                self.port = int(listening[1])
                if self.health()[0] == "200":
                    return
            time.sleep(0.1)
        self.kill()
        raise InputError(f"the server did not start: {self.log_end()[-500:]}")

    def log_end(self) -> str:
        return self.log.read_bytes()[-4000:].decode(errors="replace")

    def send(
        self, method: str, path: str, body: Any = None, seconds: float = 60.0, source: str = "127.0.0.2"
    ) -> tuple[str, bytes]:
        """Returns the status and body of the response, or the name of an error and an empty body."""
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
        """Returns the status of /health, and the seconds that the request took."""
        start_s = time.monotonic()
        return self.send("GET", "/health", source="127.0.0.3", seconds=20)[0], time.monotonic() - start_s

    def processes(self) -> list[int]:
        """Returns the process ids of the server and its descendants."""
        pids = [self.process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{pid}/task").glob("*/children"):
                    pids += map(int, file.read_text().split())
        return pids

    def resident(self) -> float:
        """Returns the anonymous memory of all its processes, in MiB."""
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                total += int(match[1]) if match else 0
        return total / 1024

    def end(self) -> tuple[float, list[int]]:
        """Sends SIGTERM. Returns the seconds until the process exited, and its children that still run. The
        server is killed 5 s after its time limit.
        """
        others = self.processes()[1:]
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE + MORE_GRACE + 5)
        seconds = time.monotonic() - start_s
        time.sleep(0.2)  # the system kills children of a process after it
        left = [pid for pid in others if _is_running(pid)]
        self.kill(others)
        return seconds, left

    def kill(self, others: Sequence[int] = ()) -> None:
        for pid in {*self.processes()[1:], *others}:
            if _is_running(pid):
                os.kill(pid, signal.SIGKILL)
        for process in (self._guard, self.process):
            process.kill()
            process.wait()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Watcher:
    """Records the memory and the /health of a server, in threads."""

    def __init__(self, server: Server):
        self._server = server
        self._stopped = threading.Event()
        self.before = self.peak = server.resident()
        self.slowest = 0.0
        self.health = Counter[str]()
        self.killed = False
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._watch_memory, self._watch_health)
        ]
        for thread in self._threads:
            thread.start()

    def _watch_memory(self) -> None:
        while not self._stopped.wait(0.05):
            self.peak = max(self.peak, now := self._server.resident())
            if now > MOST_MEMORY:
                self.killed = True
                self._server.kill()
                return

    def _watch_health(self) -> None:
        while not self._stopped.wait(0.5):
            status, seconds = self._server.health()
            if not self._stopped.is_set() or status == "200":
                self.health[status] += 1
                self.slowest = max(self.slowest, seconds)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(30)
