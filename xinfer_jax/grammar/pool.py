"""`GrammarPool`: compiles the grammars of a server's clients, and computes their masks, in separate
processes. A grammar that takes too long, needs too much memory or breaks the compiler costs its request
alone.

`Turns` chooses the process that does a job. Nothing is lost with a process: a job says at which place its
answer is, so any process can do it.
"""

import array
import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import GrammarError, InputError, NoTokenLeftError
from .automaton import Dfa
from .compiler import vocabulary_of
from .grammars import Grammar
from .matcher import CompiledGrammar
from .turns import CHECK, MASKS, SLOW, Slot, Turns, quick_seconds
from .vocabulary import keep_latest
from .worker import MEMORY

_CHECK_SECONDS = 3.0  # CPU time to compile a grammar and to try it
_MASK_SECONDS = 0.5  # CPU time of the masks of one step
_WALL_SECONDS = 30.0  # of any job: the limit on CPU time ends it first, unless the machine hardly runs it
_BUDGET = 2.0
_BUDGET_PER_TOKEN = 0.005  # CPU seconds of all masks of an answer: BUDGET and so many for each token
_POLL_SECONDS = 0.05
_MOST_CHECKED = 32  # grammars whose automaton, or first masks, are kept
_MOST_FAILED = 256  # grammars that are known to fail
_ERRORS = {error.__name__: error for error in (GrammarError, NoTokenLeftError, InputError)}


@dataclasses.dataclass(frozen=True, repr=False)
class PooledGrammar(Grammar):
    """A grammar of a client, whose masks a pool computes."""

    pool: Any = None
    client: str = ""
    dfa: Dfa | None = dataclasses.field(default=None, compare=False)  # None: it has masks
    first: Any = dataclasses.field(default=None, compare=False)  # those before its first token, if known

    def compile(self, vocab_size: int) -> CompiledGrammar:
        return CompiledGrammar(self, vocab_size, self.dfa, lambda: PooledMasks(self))


class PooledMasks:
    """The masks of an answer, computed by a pool. It has the methods of `LocalMasks`."""

    def __init__(self, grammar: PooledGrammar):
        self._grammar = grammar
        self._number = next(grammar.pool.numbers)
        self._tokens = 0
        self._future: Future = Future()
        self._left = _BUDGET
        self.seconds = 0.0

    def start(self, ids: Sequence[int], draft_ids: Sequence[int]) -> None:
        grammar = self._grammar
        self._left += _BUDGET_PER_TOKEN * (len(ids) - self._tokens)
        self._tokens = len(ids)
        if not ids and not draft_ids and grammar.first is not None:
            self._future = Future()
            self._future.set_result((0.0, (MASKS, grammar.first)))
            return
        job = _Job(grammar.client, MASKS, grammar, self._number, array.array("i", ids), list(draft_ids))
        self._future = grammar.pool.submit(job)

    def wait(self, seconds: float) -> bool:
        if seconds and not self._future.done():
            wait([self._future], seconds)
        return self._future.done()

    def result(self) -> np.ndarray:
        self.seconds, (_, bits) = self._future.result()
        self._left -= self.seconds
        if self._left < 0:
            raise NoTokenLeftError(
                f"the masks of the {self._grammar.kind} grammar take more than {_BUDGET:g} s and"
                f" {1e3 * _BUDGET_PER_TOKEN:g} ms for each token: make it less ambiguous"
            )
        return bits


class _Job:
    """One job of a client. The fields are the ones of `worker`."""

    def __init__(self, client: str, name: str, grammar: Grammar, number: Any, ids: Any, drafts: list[int]):
        self.client = client
        self.name = name
        self.kind = grammar.kind
        self._grammar = grammar.kind, grammar.source
        self.key = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).hexdigest()
        self._rest = number, ids, drafts
        self.future: Future = Future()
        self.end = 0.0  # by time.monotonic(), once it is done
        self.seconds = 0.0  # that it took so far
        self.quick_seconds = 0.0  # that it takes at most if it is quick

    def message(self, with_grammar: bool, pace: str) -> tuple[Any, ...]:
        """Returns the message that a process gets. with_grammar: the process does not know the grammar, and
        compiles it.
        """
        seconds = _CHECK_SECONDS if with_grammar else _MASK_SECONDS
        self.quick_seconds = quick_seconds(with_grammar, 1 + len(self._rest[2]))
        seconds = seconds if pace == SLOW else min(seconds, self.quick_seconds)
        return self.name, self.key, self._grammar if with_grammar else None, *self._rest, seconds

    def failure(self, number: int) -> InputError:
        """Returns the error of a job whose process was ended by this signal."""
        if number == signal.SIGPROF:
            why = f"takes more than {_MASK_SECONDS:g} s for one token"
            if self.name == CHECK:
                why = f"takes more than {_CHECK_SECONDS:g} s to compile"
        elif number == signal.SIGKILL:
            why = f"took more than {_WALL_SECONDS:g} s"
        else:
            why = f"is nested too deeply, or needs more than {MEMORY >> 20} MiB"
        error = GrammarError if self.name == CHECK else NoTokenLeftError
        return error(f"the {self.kind} grammar {why}: simplify it")


class _CrashError(Exception):
    """The process has ended. number: the signal that ended it."""

    def __init__(self, number: int):
        self.number = number


class _NotQuickError(Exception):
    """A job takes too long for a quick process."""


class GrammarPool:
    """A few processes, each of which starts with its first job. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.numbers = itertools.count()  # of answers
        self._lock = threading.Lock()
        self._turns = Turns(self._lock)
        self._threads: list[threading.Thread] = []
        self._checked: OrderedDict[str, tuple[Any, ...]] = OrderedDict()  # what `worker` answered
        self._failed: OrderedDict[str, str] = OrderedDict()  # and why
        self._control: socket.socket | None = None
        self._control_lock = threading.Lock()
        self._closed = False

    def prepare(self, client: str, grammar: Grammar) -> PooledGrammar:
        """Returns a grammar that was compiled elsewhere. If it is a regular expression, its automaton is
        waited for.
        """
        if grammar.kind == "regex":
            return self._checked_grammar(client, grammar, self._check(client, grammar).result())
        return self._checked_grammar(client, grammar, (0.0, (MASKS, None)))

    async def compile(self, client: str, grammar: Grammar) -> PooledGrammar:
        """Compiles a grammar. If this call is cancelled, the job ends. Raises GrammarError if the grammar is
        not served.
        """
        done = await asyncio.wrap_future(self._check(client, grammar))
        return self._checked_grammar(client, grammar, done)

    def _check(self, client: str, grammar: Grammar) -> Future:
        job = _Job(client, CHECK, grammar, None, None, [])
        with self._lock:
            if (found := self._checked.get(job.key)) is None:
                self._add(job)
            else:
                job.future.set_result((0.0, found))
        return job.future

    def _checked_grammar(self, client: str, grammar: Grammar, done: tuple[float, Any]) -> PooledGrammar:
        _, (name, *arrays) = done
        fields = {field.name: getattr(grammar, field.name) for field in dataclasses.fields(Grammar)}
        fields["tokenizer"] = self._tokenizer
        dfa = Dfa(*arrays) if name == "dfa" else None
        return PooledGrammar(**fields, pool=self, client=client, dfa=dfa, first=None if dfa else arrays[0])

    def submit(self, job: _Job) -> Future:
        """Queues a job. Its future has the answer of `worker`. If the future is cancelled, the job ends."""
        with self._lock:
            self._add(job)
        return job.future

    def _add(self, job: _Job) -> None:
        if self._closed:
            raise InputError("the server is shutting down")
        if not self._threads:
            slots = self._turns.slots
            self._threads = [threading.Thread(target=self._run, args=(slot,), daemon=True) for slot in slots]
            for thread in self._threads:
                thread.start()
        self._turns.add(job)

    def close(self) -> None:
        """Ends the processes and the threads. Jobs that are not done fail."""
        with self._lock:
            self._closed = True
            for slot in self._turns.slots:
                slot.condition.notify()
        with self._control_lock:
            if self._control is not None:
                self._control.close()
                self._process.wait()
        for thread in self._threads:
            thread.join()

    def _run(self, slot: Slot) -> None:
        """Runs as the thread of a slot."""
        while True:
            with self._lock:
                while not slot.jobs and not self._closed:
                    slot.condition.wait()
                if self._closed:
                    break
                job = self._turns.take(slot)
            before = job.seconds
            found = error = None
            try:
                found = self._do(slot, job)
            except BaseException as raised:
                error = raised
            with self._lock:
                self._turns.end(slot, job, job.seconds - before)
                if isinstance(error, _NotQuickError) and not self._closed:
                    self._turns.set_slow(job)
                    self._turns.add(job)
                    continue
                if job.name == CHECK and found is not None:
                    keep_latest(self._checked, job.key, found[1], _MOST_CHECKED)
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                if error is None:
                    job.future.set_result(found)
                else:
                    job.future.set_exception(error)
        for job in slot.jobs:
            job.future.cancel()

    def _do(self, slot: Slot, job: _Job) -> Any:
        if job.future.cancelled():
            return None
        if job.name == CHECK and (why := self._failed.get(job.key)):
            raise GrammarError(why)  # a new one: an error keeps the frames of all that raised it
        job.end = time.monotonic() + _WALL_SECONDS
        while True:
            is_new = not slot.done
            began = time.monotonic()
            try:
                seconds, found = self._call(slot, job)
                job.seconds += seconds
                break
            except _CrashError as crash:
                job.seconds += time.monotonic() - began
                if crash.number == signal.SIGPROF and slot.pace != SLOW:
                    raise _NotQuickError from None
                if is_new or crash.number in (signal.SIGPROF, signal.SIGKILL):
                    error = job.failure(crash.number)
                    if job.name == CHECK and crash.number != signal.SIGKILL:
                        with self._lock:
                            keep_latest(self._failed, job.key, str(error), _MOST_FAILED)
                    raise error from None
                # Else what it kept of other grammars may have been too much: once more, alone.
        if found[0] in _ERRORS:
            raise _ERRORS[found[0] if job.name == CHECK else "NoTokenLeftError"](found[1])
        return seconds, found

    def _call(self, slot: Slot, job: _Job) -> Any:
        if slot.connection is None:
            self._fork(slot)
        assert slot.connection is not None
        found: Any = 0.0, ("missing",)
        try:
            for with_grammar in (True,) if job.name == CHECK else (False, True):
                if found[1][0] == "missing":
                    slot.connection.send(job.message(with_grammar, slot.pace))
                    if not self._wait(slot.connection, job):
                        raise _CrashError(self._end(slot, b"K"))
                    found = slot.connection.recv()
        except (OSError, EOFError):
            raise _CrashError(self._end(slot, b"W")) from None
        slot.done += 1
        return found

    def _wait(self, connection: Connection, job: _Job) -> bool:
        """Waits for an answer. Returns False if nobody waits for it any more, or it takes too long."""
        while not connection.poll(_POLL_SECONDS):
            if job.future.cancelled() or self._closed or time.monotonic() > job.end:
                return False
        return True

    def _fork(self, slot: Slot) -> None:
        own, its = socket.socketpair()
        with its:
            self._command(b"S" if slot.pace == SLOW else b"F", slot, [its.fileno()])
        slot.connection = Connection(own.detach())
        slot.done = 0

    def _end(self, slot: Slot, name: bytes) -> int:
        """Waits for, or kills, the process of a slot. Returns the signal that ended it."""
        assert slot.connection is not None
        slot.connection.close()
        slot.connection = None
        return self._command(name, slot)

    def _command(self, name: bytes, slot: Slot, descriptors: Sequence[int] = ()) -> int:
        """Sends a command of `worker` to the first process, which is started if there is none."""
        with self._control_lock:
            for _ in range(2):
                if self._closed:
                    raise InputError("the server is shutting down")
                control = self._control = self._control or self._start()
                with contextlib.suppress(OSError):
                    socket.send_fds(control, [name + bytes([slot.number])], descriptors)
                    if answer := control.recv(1):
                        return answer[0]
                control.close()  # it has ended, and the others with it
                self._control = None
        raise InputError("the process that compiles grammars does not start")

    def _start(self) -> socket.socket:
        vocabulary = vocabulary_of(self._tokenizer, self._vocab_size)
        own, its = socket.socketpair()
        root = str(Path(__file__).parents[2])
        code = "import sys; sys.path.insert(0, sys.argv[1]); from xinfer_jax.grammar.worker import main;"
        command = [sys.executable, "-c", f"{code} main(int(sys.argv[2]))", root, str(its.fileno())]
        with its:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[its.fileno()],
                start_new_session=True, env=os.environ | {"MALLOC_ARENA_MAX": "1"},
            )  # fmt: skip
        with contextlib.suppress(OSError):
            sender = Connection(own.dup().detach())
            sender.send((vocabulary.tokens, vocabulary.special))
            sender.close()
            own.recv(1)
        return own
