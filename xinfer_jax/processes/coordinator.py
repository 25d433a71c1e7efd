"""The coordinator, a part of process 0's parent. All parents connect to it. It starts and ends all of them
together.
"""

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from .channel import GONE, Channel, Listener, Message, listen

_SETTLE_SECONDS = 2  # to wait for further reports once one has come


class GroupMember(NamedTuple):
    """Process `id` of a group of `processes`, whose coordinator is at process 0's host and port."""

    host: str
    port: int
    processes: int
    id: int


class GroupEnd(Exception):
    """All processes are to end with this exit code. line: to print. "": it has been printed."""

    def __init__(self, code: int, line: str = ""):
        self.code = code
        self.line = line


class Coordinator:
    """Receives messages from all parents, compares their settings, and sends all the start and the end."""

    def __init__(self, member: GroupMember, seconds: int, secret: bytes):
        """Makes the coordinator. member: process 0. seconds: the time for all processes to connect. secret:
        the secret of the run.
        """
        self._member = member
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._events = SimpleQueue[Message]()
        self._channels = dict[int, Channel]()
        self._hosts = dict[int, str]()
        self._settings = dict[int, dict[str, str]]()
        self._failures = list[tuple[int, int, str]]()  # rank, exit code, line
        self._started = False
        self._signal_sent = False
        self._server = listen(member.host, member.port)
        self._listener = Listener(self._server, self._events.put, secret)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._check_deadline()
                with suppress(Empty):
                    self._handle(self._events.get(timeout=0.1))
        except GroupEnd as end:
            # Process 0 comes last: this thread ends with it.
            for number in sorted(self._channels, reverse=True):
                self._channels[number].send("end", end.code, end.line)

    def _check_deadline(self) -> None:
        if time.monotonic() < self._deadline:
            return
        if self._failures:
            raise GroupEnd(*min(self._failures, key=lambda failure: failure[0])[1:])
        missing = next(i for i in range(self._member.processes) if i not in self._settings)
        rejected = self._listener.rejected
        others = f" ({rejected} came with another secret)" if rejected else ""
        raise GroupEnd(1, f"{self._name(missing)} did not connect within {self._seconds} s{others}")

    def _handle(self, message: Message) -> None:
        (channel, name, args) = message
        number = next((i for i, known in self._channels.items() if known is channel), None)
        if number is None:
            if name == "register" and args[0] in range(self._member.processes):
                self._register(channel, *args)
        elif name == "settings":
            self._compare(number, *args)
        elif name == "ended":
            self._child_ended(number, *args)
        elif name == GONE:
            self._fail(0, f"{self._name(number)} is gone ({args[0]})")
        elif name == "signal":  # goes to process 0, once; process 0 decides how to end
            if not self._started:
                raise GroupEnd(128 + args[0])
            if not self._signal_sent:
                self._channels[0].send("signal", args[0])
            self._signal_sent = True

    def _register(self, channel: Channel, number: int, host: str) -> None:
        if number in self._channels:
            where = f"{self._hosts[number]} and {host}"
            channel.send("end", 2, f"--process_id={number} is given twice, on {where}")
            return
        self._channels[number] = channel
        self._hosts[number] = host

    def _compare(self, number: int, settings: dict[str, str], problem: str) -> None:
        """Starts all processes once they have sent the same settings. problem: why this one cannot begin."""
        if problem:
            self._fail(0, f"{self._name(number)} cannot begin: {problem}", 2)
            return
        self._settings[number] = settings
        if difference := find_difference({f"process {i}": self._settings[i] for i in sorted(self._settings)}):
            self._fail(0, difference, 2)
        elif len(self._settings) == self._member.processes:
            own = self._server.getsockname()[0]
            with socket.create_server((own, 0), family=self._server.family) as free:
                port = free.getsockname()[1]
            self._started = True
            self._deadline = float("inf")
            for channel in self._channels.values():
                channel.send("start", port, own)

    def _child_ended(self, number: int, code: int, why: str, blames: int | None) -> None:
        """Ends all if process 0's child ended in order. Otherwise it records the failure."""
        if number == 0 and (code in (0, 1, 2) or code > 128):
            raise GroupEnd(code)
        if blames is not None:
            self._fail(2, f"{self._name(blames)} stopped answering")
        elif code:
            self._fail(0 if code < 0 else 1, f"{self._name(number)} {why}")

    def _fail(self, rank: int, line: str, code: int = 1) -> None:
        """Records a failure. The cause is the first one of the lowest rank within the next seconds."""
        self._failures.append((rank, code, line))
        # After the start others may report a cause; before it others may still connect and hear of the end.
        wait = self._started or len(self._channels) < self._member.processes
        self._deadline = min(self._deadline, time.monotonic() + wait * _SETTLE_SECONDS)

    def _name(self, number: int) -> str:
        return f"process {number} of {self._member.processes} ({self._hosts.get(number, 'never connected')})"


def find_difference(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a message about the first setting that differs between processes. "": none does. settings: the
    settings by the name of each process.
    """
    first, *others = settings
    for other in others:
        for name in [*settings[first], *settings[other]]:
            values = [settings[process].get(name, "missing") for process in (first, other)]
            if values[0] != values[1]:
                where = f"{values[0][:200]} on {first} and {values[1][:200]} on {other}"
                return f"{name} is {where}: start all with the same flags, versions and checkpoint"
    return ""
