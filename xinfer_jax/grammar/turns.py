"""`Turns`: which process does a job of a client, and whose job it does next.

Jobs that compile grammars have other processes than the masks of grammars that compiled. Some processes of
each kind are for quick jobs: they end a job after `quick_seconds` of CPU time. A slow process does it again,
and at once all later jobs of its grammar and the next jobs of its client. The first grammars of a client, of
which nothing is known, have a process of their own. So a client whose jobs are quick waits for quick jobs
alone. In a process, the client goes first whose jobs took the least time lately, with what the next one may
take.
"""

import dataclasses
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any

from .vocabulary import keep_latest

CHECK = "check"  # compiles a grammar
MASKS = "masks"
NEW = "new"  # of a client that no grammar was compiled for
QUICK = "quick"
SLOW = "slow"
_QUICK_SECONDS = {CHECK: 0.15, MASKS: 0.03}  # ten times what grammars of ordinary schemas need
_PROCESSES = {(CHECK, NEW): 1, (CHECK, QUICK): 1, (CHECK, SLOW): 2, (MASKS, QUICK): 3, (MASKS, SLOW): 1}
_HALF_LIFE = 10.0  # seconds, in which half of the time that a client used is forgotten
_SLOW_JOBS = 16  # of a client, after one that was not quick
_MOST_CLIENTS = 1024  # that are known
_MOST_SLOW = 256  # grammars that are known not to be quick


@dataclasses.dataclass(eq=False)
class Slot:
    """A process, and the thread that gives it jobs."""

    number: int
    name: str  # of its jobs
    pace: str  # of these
    condition: threading.Condition
    jobs: list[Any] = dataclasses.field(default_factory=list)
    client: str | None = None  # whose job is done now
    used: float = 0.0  # when it got its last job
    connection: Connection | None = None
    done: int = 0  # jobs of this process

    @property
    def clients(self) -> set[str]:
        """Returns the clients whose jobs the slot does or has."""
        return {self.client, *(job.client for job in self.jobs)} - {None}


@dataclasses.dataclass
class _Client:
    seconds: float = 0.0  # that its jobs took, of which half is forgotten in each half-life
    when: float = 0.0  # up to which
    slow: dict[str, int] = dataclasses.field(default_factory=lambda: {CHECK: 0, MASKS: 0})  # jobs, yet
    expected: dict[str, float] = dataclasses.field(default_factory=_QUICK_SECONDS.copy)  # seconds of a job
    is_new: bool = True
    slot: Slot | None = None  # of its last masks, which knows their grammar


def quick_seconds(compiles: bool, masks: int) -> float:
    """Returns the CPU time that a quick job takes at most."""
    return _QUICK_SECONDS[CHECK] if compiles else masks * _QUICK_SECONDS[MASKS]


class Turns:
    """The slots, and the facts that are known about clients and grammars. The caller holds the lock.

    A job has a client, a name, the key of its grammar, and `quick_seconds`.
    """

    def __init__(self, lock: Any):
        kinds = [kind for kind, count in _PROCESSES.items() for _ in range(count)]
        self.slots = [Slot(i, *kind, threading.Condition(lock)) for i, kind in enumerate(kinds)]
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._slow: OrderedDict[tuple[str, str], None] = OrderedDict()  # grammars, and masks of clients

    def add(self, job: Any) -> None:
        """Queues a job. Masks go to the slot of the client's last ones, unless another client uses it and
        another slot is free.
        """
        client = self._client(job.client)
        pace = NEW if client.is_new and job.name == CHECK else QUICK
        pace = SLOW if client.slow[job.name] or _kind(job) in self._slow else pace
        slots = [slot for slot in self.slots if (slot.name, slot.pace) == (job.name, pace)]
        slot = client.slot if client.slot in slots else None
        if slot is None or slot.clients and job.client not in slot.clients:
            free = [other for other in slots if not other.clients]
            if free or slot is None:
                load = lambda other: (len(other.jobs) + (other.client is not None), other.used)  # noqa: E731
                slot = min(free or slots, key=load)
        if job.name == MASKS:
            client.slot = slot
        slot.used = time.monotonic()
        slot.jobs.append(job)
        slot.condition.notify()

    def take(self, slot: Slot) -> Any:
        """Returns the job that a slot does next."""
        cost = lambda job: self._used(job.client) + self._client(job.client).expected[job.name]  # noqa: E731
        job = min(slot.jobs, key=cost)
        slot.jobs.remove(job)
        slot.client = job.client
        return job

    def end(self, slot: Slot, job: Any, seconds: float) -> None:
        """Counts the time of a job that was done or failed. seconds: 0 if the job did not begin."""
        slot.client = None
        if not seconds:
            return
        client = self._client(job.client)
        client.seconds = self._used(job.client) + seconds
        client.when = time.monotonic()
        client.expected[job.name] += (seconds - client.expected[job.name]) / 2
        is_quick = seconds < job.quick_seconds
        client.is_new &= not (is_quick and job.name == CHECK)
        client.slow[job.name] = max(0, client.slow[job.name] - 1) if is_quick else _SLOW_JOBS

    def set_slow(self, job: Any) -> None:
        """Notes that a grammar does not compile quickly, or that its masks take this client long."""
        keep_latest(self._slow, _kind(job), None, _MOST_SLOW)

    def _used(self, name: str) -> float:
        client = self._client(name)
        return client.seconds * 0.5 ** ((time.monotonic() - client.when) / _HALF_LIFE)

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name) or _Client()
        keep_latest(self._clients, name, client, _MOST_CLIENTS)
        return client


def _kind(job: Any) -> tuple[str, str]:
    """Returns jobs that take about as long: compiling a grammar, or its masks in a client's answers."""
    return job.key, job.client if job.name == MASKS else ""
