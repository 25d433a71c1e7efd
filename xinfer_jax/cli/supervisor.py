"""The supervisor of a command that is one of several processes: a small parent that imports no jax, starts
the command once more as its child, and ends it when any process of the group ends.

parents connect to process 0's ─ compare settings ─► children start, jax connects them ─ one ends ─► all end

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

from ..errors import InputError, format_message
from ..signing import load_secret, set_secret
from .channel import HEARTBEAT_SECONDS, Channel, Receive
from .coordinator import Coordinator, GroupEnd
from .flag_parser import FlagParser
from .process import SignalEvent, capture_signals
from .process_group import GroupMember, member_from_flags, shared_settings
from .terminal import status

_CHILD = "XINFER_JAX_CHILD"  # environment variable: what a parent tells its child, except the secret
_BROKEN = 70  # exit code of a child that does not end in order
_DEAD_PROCESS = re.compile(r"stopped sending heartbeats\):\s+(?:/job:\S*task:)?(\d+)")  # as jax names it
_OTHER_FAILED = "JAX distributed service detected fatal errors"  # logged where a process ends after another
_LOG_TAIL = 1 << 16  # bytes at the end of a child's log that are searched for these
_child: dict[str, Any] = {}  # settings from the parent; empty: this process is not a child


def supervise(parser: FlagParser) -> int | None:
    """Runs the command in a child until all processes have ended, where flags make it one of several; the
    exit code. None: go on in this process, which is such a child or alone.
    """
    if _CHILD in os.environ:
        _become_child(json.loads(os.environ.pop(_CHILD)))
        return None
    if (member := member_from_flags(parser.values)) is None:
        return None
    secret = load_secret(parser.values.secret_file, member.host)
    if directory := parser.values.log_dir:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--log_dir={directory} cannot be made: {error.strerror}") from error
    if member.id == 0:
        Coordinator(member, parser.values.start_seconds, secret)
    with capture_signals() as stop:
        code, line = _Supervisor(member, parser, stop, secret).run()
    if line:
        status.log(f"{parser.name}: {format_message(line)}")
    return code


def distributed_args() -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize` for this process; empty: it runs alone."""
    return _child.get("jax_args", {})


def _become_child(settings: dict[str, Any]) -> None:
    """Makes this process a child, whose standard streams are its log, and which ends with its parent."""
    _child.update(settings)
    with open(settings["secret"], "rb") as pipe:
        set_secret(pipe.read())
    for name, descriptor in settings["streams"].items():
        old = getattr(sys, name)
        setattr(sys, name, open(descriptor, "w", 1, encoding=old.encoding, errors=old.errors))
    logging.basicConfig(stream=sys.__stderr__)
    sys.excepthook = _log_and_exit
    threading.Thread(target=_exit_with_parent, args=(settings["parent"],), daemon=True).start()


def _log_and_exit(*error: Any) -> NoReturn:
    traceback.print_exception(*error, file=sys.__stderr__)
    os._exit(_BROKEN)  # an orderly end of jax would wait for the other processes


def _exit_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns once the parent is gone
    os._exit(_BROKEN)


class _Supervisor:
    """The parent of one child: connects to the coordinator, starts the child, reports its end."""

    def __init__(self, member: GroupMember, parser: FlagParser, stop: SignalEvent, secret: bytes):
        self._member = member
        self._parser = parser
        self._stop = stop
        self._secret = secret
        self._events: SimpleQueue = SimpleQueue()
        self._seconds = parser.values.start_seconds
        self._process_0 = f"process 0 of {member.processes} ({member.host}:{member.port})"
        self._log_dir: Path | None = None
        self._signal_sent = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> tuple[int, str]:
        """The exit code, and a line to print, once all processes are to end."""
        try:
            channel = self._channel = self._connect()
            channel.send(here=self._member.id, host=socket.gethostname())
            try:
                channel.send(same=shared_settings(self._parser))
            except (InputError, OSError) as error:
                channel.send(ended=2, why=f"cannot begin: {error}", blames=None)
            while True:
                self._handle_event()
        except GroupEnd as end:
            return self._finish(end)

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._seconds
        receive: Receive = lambda _, message: self._events.put(message)  # noqa: E731
        while time.monotonic() < deadline:
            with suppress(OSError):
                address = self._member.host, self._member.port
                connection = socket.create_connection(address, HEARTBEAT_SECONDS)
                try:
                    return Channel(connection, receive, self._secret, listens=False)
                except InputError as error:
                    why = f"{self._process_0} has another secret: give all the same file"
                    raise GroupEnd(2, why) from error
            if self._stop.wait(0.2):
                raise GroupEnd(128 + self._stop.number)
        raise GroupEnd(1, f"{self._process_0} did not answer within {self._seconds} s")

    def _handle_event(self) -> None:
        if self._stop.is_set() and not self._signal_sent:  # a second signal ends this process at once
            self._channel.send(signal=self._stop.number)
            self._signal_sent = True
        with suppress(Empty):
            message = self._events.get(timeout=0.1)
            if "end" in message:
                raise GroupEnd(message["end"], message["line"])
            if "gone" in message:
                raise GroupEnd(1, f"{self._process_0} is gone ({message['gone']})")
            if "start" in message:
                self._start(message["start"], message["bind"])
            if "signal" in message and self._process:
                self._process.send_signal(message["signal"])

    def _start(self, port: int, bind: str) -> None:
        """Starts the same command as a child, in a session of its own: a terminal's Ctrl-C reaches only this
        parent. jax's service listens at this port of process 0's address, and at no other address.
        """
        member = self._member
        self._log_dir = Path(self._parser.values.log_dir or tempfile.mkdtemp(prefix="xinfer-jax-"))
        host, bind = (f"[{name}]" if ":" in name else name for name in (member.host, bind))
        jax_args: dict[str, Any] = dict(
            coordinator_address=f"{host}:{port}", num_processes=member.processes, process_id=member.id,
            initialization_timeout=self._seconds, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
        if member.id == 0:
            jax_args["coordinator_bind_address"] = f"{bind}:{port}"
        streams = {} if member.id else dict(stdout=os.dup(1), stderr=os.dup(2))
        parent_pipe, self._lifeline = os.pipe()
        secret, to_child = os.pipe()
        os.write(to_child, self._secret)
        os.close(to_child)
        settings = json.dumps(dict(jax_args=jax_args, streams=streams, parent=parent_pipe, secret=secret))
        inherited = [parent_pipe, secret, *streams.values()]
        log_file = self._log_dir / f"process-{member.id}.log"
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]], env=os.environ | {_CHILD: settings},
                stdin=subprocess.DEVNULL if member.id else None, stdout=log, stderr=log,
                pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        for descriptor in inherited:
            os.close(descriptor)
        self._waiting = threading.Thread(target=self._wait, args=(self._process, log_file), daemon=True)
        self._waiting.start()

    def _wait(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        """Waits for the child and reports how it ended, and which process its log blames."""
        code = process.wait()
        tail = log_file.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        blames = None
        why = f"ended with exit code {code}"
        if code and _OTHER_FAILED in tail:
            dead = _DEAD_PROCESS.findall(tail)
            blames = int(dead[-1]) if dead else 0  # process 0 runs jax's service
        elif code < 0:
            why = f"was ended by {signal.Signals(-code).name}"
        elif last := tail.strip().rpartition("\n")[2]:
            why += f" ({format_message(last)[:200]})"
        self._channel.send(ended=code, why=why, blames=blames)

    def _finish(self, end: GroupEnd) -> tuple[int, str]:
        """Ends the child; the exit code, and a line to print."""
        if self._process is None:
            return end.code, end.line
        self._process.kill()  # even where it ended in order: its work is done
        self._waiting.join()
        if end.code == 1 and end.line:
            return 1, f"{end.line}: all have ended, see {self._log_dir}"
        if self._parser.values.log_dir is None and self._log_dir:
            shutil.rmtree(self._log_dir, ignore_errors=True)
        return end.code, end.line
