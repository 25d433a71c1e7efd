"""The parent of one of several processes: it imports no jax, starts the same command once more as its child,
and ends it when any process of the group ends.

parents connect to process 0's ─ compare settings ─► children start, jax connects them ─ one ends ─► all end
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from ..errors import InputError, format_message
from .channel import GONE, HEARTBEAT_SECONDS, Channel, Message, connect
from .coordinator import Coordinator, GroupEnd, GroupMember
from .secret import SECRET_VARIABLE, load_secret

_CHILD = "XINFER_JAX_CHILD"  # environment variable: what a parent tells its child
_BROKEN = 70  # exit code of a child that does not end in order
_DEAD_PROCESS = re.compile(r"stopped sending heartbeats\):\s+(?:/job:\S*task:)?(\d+)")  # as jax names it
_OTHER_FAILED = "JAX distributed service detected fatal errors"  # logged where a process ends after another
_LOG_TAIL = 1 << 16  # bytes at the end of a child's log that are searched for these
_child: dict[str, Any] = {}  # settings from the parent; empty: this process is not a child


def distributed_args() -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize` for this process. empty: it runs alone."""
    return _child.get("jax_args", {})


def become_child() -> bool:
    """Returns True if a parent started this process. Then its log has its standard streams, and it ends with
    its parent.
    """
    if _CHILD not in os.environ:
        return False
    settings = json.loads(os.environ.pop(_CHILD))
    _child.update(settings)
    for name, descriptor in settings["streams"].items():
        old = getattr(sys, name)
        setattr(sys, name, open(descriptor, "w", 1, encoding=old.encoding, errors=old.errors))
    logging.basicConfig(stream=sys.__stderr__)
    sys.excepthook = _log_and_exit
    threading.Thread(target=_exit_with_parent, args=(settings["parent"],), daemon=True).start()
    return True


def _log_and_exit(*error: Any) -> NoReturn:
    traceback.print_exception(*error, file=sys.__stderr__)
    os._exit(_BROKEN)  # an orderly end of jax would wait for the other processes


def _exit_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns once the parent is gone
    os._exit(_BROKEN)


class Supervisor:
    """The parent of one child: connects to the coordinator, starts the child, reports its end."""

    def __init__(self, member: GroupMember, seconds: int, log_dir: str | None, secret_file: str | None):
        """Makes the parent of process `member`. The parent of process 0 is also the coordinator.

        Args:
            member: this process.
            seconds: the time for all processes to connect.
            log_dir: the directory for the child's log. None: a new one, which stays if a process fails.
            secret_file: the file with the secret of the run. None: `load_secret` finds it.
        """
        self._member = member
        self._secret_file = secret_file
        self._secret = load_secret(secret_file, member.host)
        self._events = SimpleQueue[Message]()
        self._seconds = seconds
        self._process_0 = f"process 0 of {member.processes} ({member.host}:{member.port})"
        self._given_log_dir = log_dir
        self._log_dir: Path | None = None
        self._signal_sent = False
        self._process: subprocess.Popen[bytes] | None = None
        if member.id == 0:
            Coordinator(member, seconds, self._secret)

    def run(self, settings: Callable[[], dict[str, str]], stop: Any) -> tuple[int, str]:
        """Runs the child until all processes have ended. Returns the exit code, and a line to print.

        Args:
            settings: returns the settings that must be the same in all processes.
            stop: a `threading.Event` that a signal sets, with the `number` of the signal.
        """
        try:
            channel = self._channel = self._connect(stop)
            channel.send("register", self._member.id, socket.gethostname())
            try:
                channel.send("settings", settings(), "")
            except (InputError, OSError) as error:
                channel.send("settings", {}, str(error))
            while True:
                self._handle_event(stop)
        except GroupEnd as end:
            return self._finish(end)

    def _connect(self, stop: Any) -> Channel:
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            with suppress(OSError):
                try:
                    return connect(self._member.host, self._member.port, self._events.put, self._secret)
                except InputError as error:
                    why = f"{self._process_0} has another secret: give all the same file"
                    raise GroupEnd(2, why) from error
            if stop.wait(0.2):
                raise GroupEnd(128 + stop.number)
        raise GroupEnd(1, f"{self._process_0} did not answer within {self._seconds} s")

    def _handle_event(self, stop: Any) -> None:
        if stop.is_set() and not self._signal_sent:  # a second signal ends this process at once
            self._channel.send("signal", stop.number)
            self._signal_sent = True
        with suppress(Empty):
            (_, name, args) = self._events.get(timeout=0.1)
            if name == "end":
                raise GroupEnd(*args)
            if name == GONE:
                raise GroupEnd(1, f"{self._process_0} is gone ({args[0]})")
            if name == "start":
                self._start(*args)
            if name == "signal" and self._process:
                self._process.send_signal(args[0])

    def _start(self, port: int, bind: str) -> None:
        """Starts the same command as a child, in another session: a terminal's Ctrl-C reaches only this
        parent. jax's service listens at this port of process 0's address, and at no other address.
        """
        member = self._member
        self._log_dir = Path(self._given_log_dir or tempfile.mkdtemp(prefix="xinfer-jax-"))
        host, bind = (f"[{name}]" if ":" in name else name for name in (member.host, bind))
        jax_args: dict[str, Any] = dict(
            coordinator_address=f"{host}:{port}", num_processes=member.processes, process_id=member.id,
            initialization_timeout=self._seconds, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
        if member.id == 0:
            jax_args["coordinator_bind_address"] = f"{bind}:{port}"
        streams = {} if member.id else dict(stdout=os.dup(1), stderr=os.dup(2))
        parent_pipe, self._lifeline = os.pipe()
        env = os.environ | {_CHILD: json.dumps(dict(jax_args=jax_args, streams=streams, parent=parent_pipe))}
        if self._secret_file:
            env[SECRET_VARIABLE] = self._secret_file
        inherited = [parent_pipe, *streams.values()]
        log_file = self._log_dir / f"process-{member.id}.log"
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]], env=env,
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
        self._channel.send("ended", code, why, blames)

    def _finish(self, end: GroupEnd) -> tuple[int, str]:
        """Ends the child. Returns the exit code, and a line to print."""
        if self._process is None:
            return end.code, end.line
        self._process.kill()  # even where it ended in order: its work is done
        self._waiting.join()
        if end.code == 1 and end.line:
            return 1, f"{end.line}: all have ended, see {self._log_dir}"
        if self._given_log_dir is None and self._log_dir:
            shutil.rmtree(self._log_dir, ignore_errors=True)
        return end.code, end.line
