"""The processes of `pool`: the first one reads a vocabulary, and forks another for each slot. They import no
jax, so they start in a moment and are small.

The first process takes commands of two bytes on a socket, what to do and a slot, and answers with a byte:
- "F", with a socket beside it: forks a process that does the jobs of this socket; 0.
- "W": waits for the slot's process, which has ended; the signal that ended it.
- "K": kills the slot's process; that signal.

A job is (name, key, grammar, number, ids, draft ids, seconds of CPU time). The answer is its CPU time and a
tuple: "dfa" and its arrays; "masks" and the bits; "missing"; or the name of an exception and its text.
"""

import array
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any

from ..errors import InputError
from .regex_parser import NotRegularError
from .token_automaton import token_automaton
from .token_masks import TokenMasks, compile_matcher, make_tokenizer

MEMORY = 96 * 2**20  # bytes that the jobs of a process may need beyond its vocabulary
_STACK = 64 * 2**20  # bytes, of the thread that compiles: llguidance recurses
_NICENESS = 5  # the server's own threads go first
_MOST_COMPILED = 32  # grammars, and answers of checks, that a process keeps
_MOST_ANSWERS = 64  # whose places it keeps


class Jobs:
    """Does the jobs of a slot. Its process may end at any job: all that it keeps can be made again."""

    def __init__(self, tokens: list[bytes], special: list[int], tokenizer: Any):
        """tokenizer: from `make_tokenizer`; None: llguidance is not installed."""
        self._tokens = tokens
        self._special = special
        self._tokenizer = tokenizer
        self._checked: OrderedDict[str, tuple[Any, ...]] = OrderedDict()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._answers: OrderedDict[int, TokenMasks] = OrderedDict()

    def check(self, key: str, grammar: tuple[str, str] | None) -> tuple[Any, ...]:
        """Compiles a grammar: the arrays of its automaton, or the masks of its first token."""
        if key in self._checked:
            return self._checked[key]
        if grammar is None:
            return ("missing",)
        found: tuple[Any, ...]
        try:
            if grammar[0] != "regex":
                raise NotRegularError
            found = "dfa", *token_automaton(grammar[1], self._tokens, self._special)
        except NotRegularError:
            found = self.masks(key, grammar, None, array.array("i"), [])
        _keep(self._checked, key, found, _MOST_COMPILED)
        return found

    def masks(
        self, key: str, grammar: tuple[str, str] | None, number: int | None, ids: array.array,
        drafts: list[int],
    ) -> tuple[Any, ...]:  # fmt: skip
        """`TokenMasks.after` of the answer with this number, which is followed from its beginning where it is
        not known.
        """
        masks = self._answers.get(number) if number is not None else None
        if masks is None or masks.count > len(ids):
            if key not in self._compiled:
                if grammar is None:
                    return ("missing",)
                made = compile_matcher(self._tokenizer, len(self._tokens), *grammar)
                _keep(self._compiled, key, made, _MOST_COMPILED)
            masks = TokenMasks(self._compiled[key].deep_copy(), len(self._tokens))
        if number is not None:
            _keep(self._answers, number, masks, _MOST_ANSWERS)
        return "masks", masks.after(ids, drafts)

    def run(self, connection: Connection) -> None:
        """Does jobs until the connection is closed. A job that takes too long ends the process."""
        _limit_memory()
        while True:
            try:
                name, key, grammar, number, ids, drafts, seconds = connection.recv()
            except EOFError:
                return
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                done = (
                    self.check(key, grammar)
                    if name == "check"
                    else self.masks(key, grammar, number, ids, drafts)
                )
            except InputError as error:
                done = type(error).__name__, str(error)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((time.process_time() - began, done))


def _keep(kept: OrderedDict, key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: the time is limited alone
        return
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


def _do_jobs(jobs: Jobs, descriptor: int) -> None:
    """The process of a slot."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the compiler prints as it fails
    threading.stack_size(_STACK)
    thread = threading.Thread(target=jobs.run, args=(Connection(descriptor),))
    thread.start()
    thread.join()


def main(descriptor: int) -> None:
    """The first process; it ends, with the others, when the socket is closed."""
    control = socket.socket(fileno=descriptor)
    tokens, special = Connection(os.dup(descriptor)).recv()
    try:
        tokenizer = make_tokenizer(tokens, special)
    except InputError:
        tokenizer = None
    jobs = Jobs(tokens, special, tokenizer)
    gc.freeze()
    control.sendall(b"\0")
    pids: dict[int, int] = {}
    killed: list[int] = []
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, 2, 1)
        if len(command) < 2:
            break
        pid = pids.pop(command[1], 0)
        number = 0
        if command[:1] == b"W" and pid:  # another first process may have forked it
            number = max(0, -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        elif pid:
            number = signal.SIGKILL
            os.kill(pid, number)
            killed.append(pid)
        killed = [pid for pid in killed if not os.waitpid(pid, os.WNOHANG)[0]]
        if command[:1] == b"F":
            pid = os.fork()
            if not pid:
                control.close()
                try:
                    _do_jobs(jobs, descriptors[0])
                finally:
                    os._exit(0)
            pids[command[1]] = pid
            os.close(descriptors[0])
        control.sendall(bytes([number]))
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
