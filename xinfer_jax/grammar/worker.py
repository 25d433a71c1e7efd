"""The processes of `pool`: the first one reads a vocabulary, and forks another for each slot. They import no
jax, so they start in a moment and are small.

The first process takes commands of two bytes on a socket, the command and a slot, and answers with a byte:

- "F", or "S" for slow jobs, comes with a socket. It forks a process that does the jobs of this socket. The
  answer is 0.
- "W" waits for the slot's process, which has ended. The answer is the signal that ended it.
- "K" kills the slot's process. The answer is that signal.

A job is (name, key, grammar, number, ids, draft ids, seconds of CPU time). "check" compiles a grammar and
tries it. "masks" are masks of an answer, and of a grammar that was checked.

The answer of a job is its CPU time and a tuple: "dfa" and its arrays, "masks" and the bits, "missing", or the
name of an exception and its text.
"""

import array
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections import OrderedDict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from ..errors import InputError
from .regex_parser import NotRegularError
from .token_automaton import token_automaton
from .token_masks import TokenMasks, compile_matcher, make_tokenizer
from .vocabulary import keep_latest

MEMORY = 96 * 2**20  # bytes that the jobs of a process may need beyond its vocabulary
_STACK = 64 * 2**20  # bytes, of the thread that compiles: llguidance recurses
_NICENESS = {"F": 5, "S": 15}  # the server's own threads go first
_MOST_COMPILED = 32  # grammars that a process keeps
_MOST_ANSWERS = 64  # whose places it keeps


class Jobs:
    """Does the jobs of a slot. Its process may end at any job: all that it keeps can be made again."""

    def __init__(self, tokens: list[bytes], special: list[int], tokenizer: Any):
        """Makes the jobs of a process. tokenizer: the result of `make_tokenizer`. None: llguidance is not
        installed.
        """
        self._tokens = tokens
        self._special = special
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._answers: OrderedDict[int, TokenMasks] = OrderedDict()

    def check(self, kind: str, source: str) -> tuple[Any, ...]:
        """Compiles a grammar: the arrays of its automaton, or the masks of its first token."""
        try:
            if kind != "regex":
                raise NotRegularError
            return "dfa", *token_automaton(source, self._tokens, self._special)
        except NotRegularError:
            size = len(self._tokens)
            return "masks", TokenMasks(compile_matcher(self._tokenizer, size, kind, source), size).after([])

    def masks(
        self, key: str, grammar: tuple[str, str] | None, number: int, ids: array.array, drafts: list[int]
    ) -> tuple[Any, ...]:
        """Returns `TokenMasks.after` of the answer with this number. If the answer is not known, it is
        followed again from its beginning.
        """
        masks = self._answers.get(number)
        if masks is None or masks.count > len(ids):
            if key not in self._compiled:
                if grammar is None:
                    return ("missing",)
                made = compile_matcher(self._tokenizer, len(self._tokens), *grammar, walks=0)
                keep_latest(self._compiled, key, made, _MOST_COMPILED)
            masks = TokenMasks(self._compiled[key].deep_copy(), len(self._tokens))
        keep_latest(self._answers, number, masks, _MOST_ANSWERS)
        return "masks", masks.after(ids, drafts)

    def run(self, connection: Connection) -> None:
        """Does jobs until the connection is closed. A job that takes too long ends the process."""
        _limit_memory()
        while True:
            try:
                name, key, grammar, *answer, seconds = connection.recv()
            except EOFError:
                return
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                done = self.check(*grammar) if name == "check" else self.masks(key, grammar, *answer)
            except InputError as error:
                done = type(error).__name__, str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((time.process_time() - began, done))


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: the time is limited alone
        return
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def _do_jobs(jobs: Jobs, descriptor: int, control: socket.socket, niceness: int) -> None:
    """Runs as the process of a slot."""
    control.close()
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the compiler prints as it fails
    threading.stack_size(_STACK)
    thread = threading.Thread(target=jobs.run, args=(Connection(descriptor),))
    thread.start()
    thread.join()


def main(descriptor: int) -> None:
    """Runs the first process. It ends, with the others, when the socket is closed."""
    control = socket.socket(fileno=descriptor)
    tokens, special = Connection(os.dup(descriptor)).recv()
    try:
        tokenizer = make_tokenizer(tokens, special)
    except InputError:
        tokenizer = None
    jobs = Jobs(tokens, special, tokenizer)
    gc.freeze()
    control.sendall(b"\0")
    slots: dict[int, Any] = {}  # the process of each
    while len((received := socket.recv_fds(control, 2, 1))[0]) == 2:
        (command, slot), descriptors, _, _ = received
        number = 0
        if process := slots.pop(slot, None):  # of a "W" without one, another first process may have forked it
            if command != ord("W"):
                process.kill()
            process.join()
            number = max(0, -process.exitcode)
        if niceness := _NICENESS.get(chr(command)):
            args = jobs, descriptors[0], control, niceness
            slots[slot] = get_context("fork").Process(target=_do_jobs, args=args, daemon=True)
            slots[slot].start()
            os.close(descriptors[0])
        control.sendall(bytes([number]))
