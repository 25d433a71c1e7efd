"""The small parent of a command that is one of several processes: it imports no jax, starts the command once
more as its child, and sees to it that all processes end where one does.

parents meet at process 0's ─ compare ─► children start, jax joins them ─ one ends, dies or is gone ─► all end

All parents know one secret (`signing`). A child gets it through a pipe, never by arguments or environment.
"""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from ..errors import InputError, one_line
from ..signing import hand_over, secret_of
from .channel import HEARTBEAT_SECONDS, Channel, listen
from .group import Job, compared, difference, job_of
from .process import Told, told_first
from .program import Program
from .terminal import status

_SETTLE_SECONDS = 2  # until all have said why they ended
_CHILD = "XINFER_JAX_CHILD"  # of the environment: what a parent tells its child, but for the secret
_BROKEN = 70  # exit code of a child that does not end in order
_UNPROVED = 64  # connections at a time that have not proved that they know the secret
_DEAD = re.compile(r"stopped sending heartbeats\):\s+(?:/job:\S*task:)?(\d+)")  # as jax names who is
_TORN = "JAX distributed service detected fatal errors"  # said by a process that ends because another did
_TAIL = 1 << 16  # bytes of a log in which it is looked for
_child: dict[str, Any] = {}


def watch(program: Program) -> int | None:
    """Where flags say that this is one of several processes: runs the command in a child until all have
    ended; the exit code. None: go on, as that child or alone.

    Raises:
        InputError: flags that make no sense, an address that cannot be had, or no secret.
    """
    if _CHILD in os.environ:
        _adopt(json.loads(os.environ.pop(_CHILD)))
        return None
    if (job := job_of(program.values)) is None:
        return None
    secret = secret_of(program.values.secret_file, job.host)
    if directory := program.values.log_dir:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--log_dir={directory} cannot be made: {error.strerror}") from error
    if job.id == 0:
        _Hub(job, program.values.start_seconds, secret)
    with told_first() as stop:
        code, line = _Parent(job, program, stop, secret).run()
    if line:
        status.say(f"{program.name}: {one_line(line)}")
    return code


def child() -> dict[str, Any]:
    """What `jax.distributed.initialize` is to be told in this process; empty: it is alone."""
    return _child.get("joins", {})


def _adopt(given: dict[str, Any]) -> None:
    """Begins to be such a child. What C++ and libraries write, and tracebacks, go to its log."""
    _child.update(given)
    with open(given["secret"], "rb") as pipe:
        hand_over(pipe.read())
    for name, place in given["streams"].items():
        old = getattr(sys, name)
        setattr(sys, name, open(place, "w", 1, encoding=old.encoding, errors=old.errors))
    logging.basicConfig(stream=sys.__stderr__)
    sys.excepthook = _log_and_end
    threading.Thread(target=_end_with, args=(given["parent"],), daemon=True).start()


def _log_and_end(*error: Any) -> NoReturn:
    traceback.print_exception(*error, file=sys.__stderr__)
    os._exit(_BROKEN)  # an orderly end of jax would wait for the other processes


def _end_with(parent: int) -> None:
    os.read(parent, 1)  # nothing is ever written: it returns once the parent is gone
    os._exit(_BROKEN)


class _End(Exception):
    """All are to end, with this exit code and this line; "": what there is to say is said."""

    def __init__(self, code: int, line: str = ""):
        self.code = code
        self.line = line


class _Hub:
    """What the parent of process 0 does beside its own work: hears all parents, and says when all start and
    when all end.
    """

    def __init__(self, job: Job, seconds: int, secret: bytes):
        self._secret = secret
        self._unknown = 0
        self._lock = threading.Lock()
        self._unproved = dict[socket.socket, None]()  # connections, the oldest first
        self._job = job
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._events: SimpleQueue = SimpleQueue()
        self._lines = dict[int, Channel]()
        self._hosts = dict[int, str]()
        self._told = dict[int, dict[str, str]]()
        self._reports = list[tuple[int, int, str]]()
        self._started = self._passed_on = False
        self._server = listen(job.host, job.port)
        for work in (self._accept, self._run):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._server.accept()[0]
            except OSError:  # as many files are open as may be
                time.sleep(0.1)
                continue
            with self._lock:
                self._unproved[connection] = None
                if len(self._unproved) > _UNPROVED:  # who knows the secret proves it at once
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            Channel(connection, self._events, self._secret, listens=True)
        except InputError:
            self._unknown += 1
        except OSError:
            pass
        finally:
            with self._lock:
                self._unproved.pop(connection, None)

    def _run(self) -> None:
        try:
            while True:
                self._check_time()
                with suppress(Empty):
                    self._hear(*self._events.get(timeout=0.1))
        except _End as end:
            for number in sorted(self._lines, reverse=True):  # this process ends with its own, the last
                self._lines[number].say(end=end.code, line=end.line)

    def _check_time(self) -> None:
        if time.monotonic() < self._until:
            return
        if self._reports:
            raise _End(*min(self._reports, key=lambda report: report[0])[1:])
        missing = next(i for i in range(self._job.processes) if i not in self._lines or i not in self._told)
        others = f" ({self._unknown} came with another secret)" if self._unknown else ""
        raise _End(1, f"{self._name(missing)} did not come within {self._seconds} s{others}")

    def _hear(self, line: Channel, said: dict[str, Any]) -> None:
        number = next((i for i, known in self._lines.items() if known is line), None)
        if number is None and said.get("here") in range(self._job.processes):
            self._here(line, said["here"], str(said.get("host")))
        elif number is not None and "same" in said:
            self._same(number, said["same"])
        elif number is not None and "ended" in said:
            self._ended(number, said["ended"], said["why"], said["blames"])
        elif number is not None and "gone" in said:
            self._report(0, f"{self._name(number)} is gone ({said['gone']})")
        elif number is not None and "signal" in said:  # process 0 hears of it, once, and ends as it likes
            if not self._started:
                raise _End(128 + said["signal"])
            if not self._passed_on:
                self._lines[0].say(signal=said["signal"])
            self._passed_on = True

    def _here(self, line: Channel, number: int, host: str) -> None:
        if number in self._lines:
            line.say(end=2, line=f"--process_id={number} is given twice, on {self._hosts[number]} and {host}")
            return
        self._lines[number] = line
        self._hosts[number] = host

    def _same(self, number: int, told: dict[str, str]) -> None:
        self._told[number] = told
        if found := difference(self._told):
            self._report(0, found, 2)
        elif len(self._told) == self._job.processes:
            own = self._server.getsockname()[0]
            with socket.create_server((own, 0), family=self._server.family) as free:
                port = free.getsockname()[1]
            self._started = True
            self._until = float("inf")
            for line in self._lines.values():
                line.say(start=port, bind=own)

    def _ended(self, number: int, code: int, why: str, blames: int | None) -> None:
        """A child has ended: process 0's in order, which is the end of all, or one that the others miss."""
        if not self._started:
            self._report(0, f"{self._name(number)} {why}", 2)
        elif number == 0 and (code in (0, 1, 2) or code > 128):
            raise _End(code)
        elif blames is not None:
            self._report(2, f"{self._name(blames)} stopped answering")
        elif code:
            self._report(0 if code < 0 else 1, f"{self._name(number)} {why}")

    def _report(self, rank: int, line: str, code: int = 1) -> None:
        """Of what is heard in a short time the lowest rank, and the first of these, is the cause."""
        self._reports.append((rank, code, line))
        others = self._started or len(self._lines) < self._job.processes  # may have more to say, or to hear
        self._until = min(self._until, time.monotonic() + others * _SETTLE_SECONDS)

    def _name(self, number: int) -> str:
        return f"process {number} of {self._job.processes} ({self._hosts.get(number, 'not heard of')})"


class _Parent:
    """Of one child."""

    def __init__(self, job: Job, program: Program, stop: Told, secret: bytes):
        self._job = job
        self._program = program
        self._stop = stop
        self._secret = secret
        self._events: SimpleQueue = SimpleQueue()
        self._seconds = program.values.start_seconds
        self._zero = f"process 0 of {job.processes} ({job.host}:{job.port})"
        self._log_dir: Path | None = None
        self._passed_on = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> tuple[int, str]:
        """Until all end: exit code and line."""
        try:
            line = self._hub = self._connect()
            line.say(here=self._job.id, host=socket.gethostname())
            try:
                line.say(same=compared(self._program))
            except (InputError, OSError) as error:
                line.say(ended=2, why=f"cannot begin: {error}", blames=None)
            while True:
                self._take()
        except _End as end:
            return self._over(end)

    def _connect(self) -> Channel:
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            with suppress(OSError):
                address = self._job.host, self._job.port
                connection = socket.create_connection(address, HEARTBEAT_SECONDS)
                try:
                    return Channel(connection, self._events, self._secret, listens=False)
                except InputError as error:
                    raise _End(2, f"{self._zero} has another secret: give all the same file") from error
            if self._stop.wait(0.2):
                raise _End(128 + self._stop.number)
        raise _End(1, f"{self._zero} did not come within {self._seconds} s")

    def _take(self) -> None:
        if self._stop.is_set() and not self._passed_on:  # a second signal ends this process at once
            self._hub.say(signal=self._stop.number)
            self._passed_on = True
        with suppress(Empty):
            _, said = self._events.get(timeout=0.1)
            if "end" in said:
                raise _End(said["end"], said["line"])
            if "gone" in said:
                raise _End(1, f"{self._zero} is gone ({said['gone']})")
            if "start" in said:
                self._start(said["start"], said["bind"])
            if "signal" in said and self._process:
                self._process.send_signal(said["signal"])

    def _start(self, port: int, bind: str) -> None:
        """The same command again, as a child in a session of its own: a terminal's Ctrl-C comes by us. jax's
        service is at this port of process 0's address, and at no other address.
        """
        job = self._job
        given = self._program.values.log_dir
        self._log_dir = Path(given or tempfile.mkdtemp(prefix="xinfer-jax-"))
        host, bind = (f"[{name}]" if ":" in name else name for name in (job.host, bind))
        joins: dict[str, Any] = dict(
            coordinator_address=f"{host}:{port}", num_processes=job.processes, process_id=job.id,
            initialization_timeout=self._seconds, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
        if job.id == 0:
            joins["coordinator_bind_address"] = f"{bind}:{port}"
        streams = {} if job.id else dict(stdout=os.dup(1), stderr=os.dup(2))
        held, self._lifeline = os.pipe()
        secret, to_child = os.pipe()
        os.write(to_child, self._secret)
        os.close(to_child)
        told = json.dumps(dict(joins=joins, streams=streams, parent=held, secret=secret))
        log_file = self._log_dir / f"process-{job.id}.log"
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]], env=os.environ | {_CHILD: told}, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL if job.id else None, pass_fds=[held, secret, *streams.values()],
                start_new_session=True,
            )  # fmt: skip
        for place in (held, secret, *streams.values()):
            os.close(place)
        self._waiting = threading.Thread(target=self._wait, args=(self._process, log_file), daemon=True)
        self._waiting.start()

    def _wait(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        code = process.wait()
        said = log_file.read_bytes()[-_TAIL:].decode(errors="replace")
        blames = None
        why = f"ended with exit code {code}"
        if code and _TORN in said:
            dead = _DEAD.findall(said)
            blames = int(dead[-1]) if dead else 0  # which holds jax's service
        elif code < 0:
            why = f"was ended by {signal.Signals(-code).name}"
        elif last := said.strip().rpartition("\n")[2]:
            why += f" ({one_line(last)[:200]})"
        self._hub.say(ended=code, why=why, blames=blames)

    def _over(self, end: _End) -> tuple[int, str]:
        if self._process is None:
            return end.code, end.line
        self._process.kill()  # in order or not, its work is done
        self._waiting.join()
        if end.code == 1 and end.line:
            return 1, f"{end.line}: all have ended, see {self._log_dir}"
        if self._program.values.log_dir is None and self._log_dir:
            shutil.rmtree(self._log_dir, ignore_errors=True)
        return end.code, end.line
