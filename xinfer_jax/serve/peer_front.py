"""`PeerEngines`: the engines of other processes behind one queue, in a process without a model. It holds the
requests; processes that prefill or decode register with it, and may come and go.
"""

import dataclasses
import itertools
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, Self

from ..checkpoint.loading import Model
from ..cli.channel import Channel
from ..engine.messages import decode_message, encode_message
from ..engine.pages import PAGE_SIZE, hash_pages
from ..engine.requests import Answer, Request
from ..engine.statistics import EngineCounters, EngineStats, collect_stats
from ..engine.submission import EngineBase
from ..errors import InputError
from .peer_worker import logprobs_from_message

_UNPROVED = 64  # most connections at a time that have not yet proved that they know the secret
_SUMS = {"hits", "preemptions", "read_tokens", "chosen_tokens", "requests", "programs"}  # of `EngineStats`


@dataclasses.dataclass(eq=False)
class Peer:
    """A process that has registered.

    Attributes:
        about: what it said about itself.
        answers: by ticket, that it works for.
        given: hashes of the pages of prompts that it prefilled, the least recent first.
    """

    channel: Channel
    about: dict[str, Any]
    reported: dict[str, int]
    answers: dict[int, list[Answer]] = dataclasses.field(default_factory=dict)
    given: OrderedDict[bytes, None] = dataclasses.field(default_factory=OrderedDict)
    counters: EngineCounters = dataclasses.field(default_factory=EngineCounters)
    error: BaseException | None = None

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def last_turn(self) -> float:
        """Now: a process that does not answer is removed."""
        return time.monotonic()

    def counts(self) -> dict[str, int]:
        """As it reported last."""
        return self.reported

    def send(self, name: str, *args: Any) -> None:
        """Sends a message to it."""
        self.channel.send(message=encode_message([name, *args]).decode())

    @property
    def own_answers(self) -> Iterator[Answer]:
        """Answers that have not ended, and that no other process has."""
        return (a for of in self.answers.values() for a in of if a.engine is self and a.finish_reason is None)


class PeerEngines(EngineBase):
    """Gives prompts to processes that prefill, and prefilled rows to processes that decode, as
    `DisaggregatedEngine` does within a process. If a process that prefills ends, its prompts go to another.
    If a process that decodes ends, the requests of its rows fail.

    Attributes:
        model: without weights.
        peers: the processes that are connected.
    """

    def __init__(self, model: Model, listening: socket.socket, secret: bytes, log: Callable[[str], None]):
        """Accepts processes from now on.

        Args:
            model: of a `Checkpoint`.
            listening: where they connect.
            secret: that they know.
            log: writes a line.
        """
        self.model = model
        self.peers: list[Peer] = []
        self.impl = None
        self._log = log
        self._secret = secret
        self._listening = listening
        self._condition = threading.Condition()
        self._unfinished: dict[Request, None] = {}
        self._tickets = itertools.count(1)
        self._places: dict[int, Peer] = {}  # the process of each ticket
        self._sources: dict[Answer, tuple[Peer, int]] = {}  # who has its pages until they have arrived
        self._closed: BaseException | None = None
        self._about: dict[str, Any] = {}  # sizes of the first process that registered
        self._past: list[Peer] = []
        self._unproved = threading.BoundedSemaphore(_UNPROVED)
        self._events: SimpleQueue = SimpleQueue()
        for work in (self._accept, self._handle_events):
            threading.Thread(target=work, daemon=True).start()

    # --- as an engine -------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Any]:
        return list(self.peers)

    @property
    def started(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        """Slots of all processes that decode."""
        return max(1, sum(peer.about["rows"] for peer in self._of("decode")))

    @property
    def load(self) -> int:
        """Answers of unfinished requests."""
        with self._condition:
            return sum(len(request.answers) for request in self._unfinished)

    def __getattr__(self, name: str) -> Any:
        if name not in ("room", "switches_at", "guesses", "weight_bytes", "cache_bytes"):
            raise AttributeError(name)
        return self._about[name]

    @property
    def missing(self) -> str:
        """The role that no process has; "": none."""
        roles = (role for role in ("prefill", "decode") if not self._of(role))
        return next((f"no {role} process is connected" for role in roles), "")

    @property
    def alive(self) -> bool:
        return self._closed is None and not self.missing

    @property
    def stats(self) -> EngineStats:
        """Also of processes that have ended."""
        return collect_stats([*self.peers, *self._past])

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Ends all requests with an error, and the connections."""
        with self._condition:
            self._closed = InputError("the engine was closed before the request ended")
            for request in list(self._unfinished):
                self._end(request, self._closed)
            for peer in self.peers:
                peer.send("close")
        with suppress(OSError):
            self._listening.close()

    def wait_for_both(self, stop: Callable[[], bool]) -> None:
        """Waits until a process that prefills and one that decodes are connected, or `stop` returns True."""
        with self._condition:
            while not stop() and self.missing:
                self._condition.wait(0.2)

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Waits until a condition holds.

        Raises:
            TimeoutError: it does not hold after `timeout` seconds.
        """
        with self._condition:
            if not self._condition.wait_for(until, timeout):
                raise TimeoutError(f"no end after {timeout} seconds")

    def wake(self) -> None:
        """Wakes all threads that wait."""
        with self._condition:
            self._condition.notify_all()

    def cancel(self, request: Request) -> None:
        """Ends a request soon."""
        with self._condition:
            self._send_cancels(request)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed
        if self.missing:
            raise InputError(self.missing)

    def _enqueue(self, requests: list[Request]) -> None:
        with self._condition:
            self._check_open()
            for request in requests:
                request.engine = self
                self._unfinished[request] = None
                self._prefill(request, request.answers)

    # --- rows and processes -------------------------------------------------------------------------------

    def _of(self, role: str) -> list[Peer]:
        return [peer for peer in self.peers if peer.about["role"] == role]

    def _prefill(self, request: Request, answers: list[Answer]) -> None:
        """Gives answers to the process that will have prefilled the prompt first."""
        row = answers[0].row
        hashes = hash_pages(row.salt, row.ids, [0] * (len(row.ids) // PAGE_SIZE))

        def tokens_until_prefilled(peer: Peer) -> int:
            hits = sum(1 for _ in takewhile(peer.given.__contains__, hashes))
            return sum(len(a.row.ids) for a in peer.own_answers) - hits * PAGE_SIZE

        peer = min(self._of("prefill"), key=tokens_until_prefilled)
        for page_hash in reversed(hashes):
            peer.given[page_hash] = None
            peer.given.move_to_end(page_hash)
        while len(peer.given) > peer.about["pages"]:
            peer.given.popitem(last=False)
        ticket = self._place(peer, answers)
        peer.send("submit", ticket, _arguments(request), [a.number for a in answers])

    def _decode(self, answer: Answer) -> None:
        """Gives a prefilled row to the process with the most free pages."""
        peers = self._of("decode")
        request = answer.request
        if not peers:
            self._end(request, InputError("no decode process is connected"))
            return
        used = {peer: sum(a.row.pages_to_continue for a in peer.own_answers) for peer in peers}
        peer = max(peers, key=lambda peer: peer.about["pages"] - used[peer])
        ticket = self._place(peer, [answer])
        first = answer.sampled, answer.logprobs, answer.alternatives
        peer.send("decode", ticket, _arguments(request), answer.number, first, answer.row.hits)
        if request.cancelled:
            peer.send("cancel", ticket)

    def _place(self, peer: Peer, answers: list[Answer]) -> int:
        ticket = next(self._tickets)
        self._places[ticket] = peer
        peer.answers[ticket] = list(answers)
        for answer in answers:
            answer.engine = peer
        return ticket

    def _release(self, answer: Answer) -> None:
        """The process that prefilled a row may free its pages."""
        if at := self._sources.pop(answer, None):
            peer, ticket = at
            peer.send("release", ticket, answer.number)

    def _end(self, request: Request, error: BaseException | None) -> None:
        if request in self._unfinished:
            del self._unfinished[request]
            request.end(error)
            if error is not None:
                self._send_cancels(request)
            for answer in request.answers:
                self._release(answer)
            if isinstance(peer := request.answers[0].engine, Peer):
                peer.counters.add(request)
        self._condition.notify_all()
        request.notify()

    def _send_cancels(self, request: Request) -> None:
        for ticket, peer in self._places.items():
            if any(a.request is request and a.engine is peer for a in peer.answers.get(ticket, ())):
                peer.send("cancel", ticket)

    def _remove(self, peer: Peer, why: str) -> None:
        """A process has ended: its prompts go to another, the requests of its decoding rows fail."""
        self.peers.remove(peer)
        peer.error = InputError(f"the {peer.name} is gone ({why})")
        self._log(str(peer.error))
        peer.reported = {name: x if name in _SUMS else 0 for name, x in peer.reported.items()}
        self._past.append(peer)
        for ticket in peer.answers:
            self._places.pop(ticket, None)
        lost = list(peer.own_answers)
        for answer, (source, _) in list(self._sources.items()):
            if source is peer:  # it was to be decoded elsewhere, and its pages are lost
                del self._sources[answer]
                if answer.finish_reason is None:
                    self._withdraw(answer)
                    lost.append(answer)
        prefills = peer.about["role"] == "prefill"
        for request, answers in itertools.groupby(lost, key=lambda answer: answer.request):
            if request not in self._unfinished:
                continue
            answers_left = list(answers)
            if prefills and self._of("prefill"):
                self._prefill(request, answers_left)
            elif not prefills and self._of("decode") and all(a in self._sources for a in answers_left):
                for answer in answers_left:  # their pages have not left the process that prefilled them
                    self._decode(answer)
            else:
                self._end(request, peer.error)
        self._condition.notify_all()

    def _withdraw(self, answer: Answer) -> None:
        """Takes an answer back from the process that was to decode it."""
        peer = answer.engine
        for ticket, answers in list(peer.answers.items()):
            if answer in answers:
                self._drop(peer, ticket)
                peer.send("cancel", ticket)

    def _drop(self, peer: Peer, ticket: int) -> None:
        """A process has no more to do for a ticket."""
        peer.answers.pop(ticket, None)
        self._places.pop(ticket, None)

    # --- messages -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)
                continue
            if self._unproved.acquire(blocking=False):
                threading.Thread(target=self._prove, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _prove(self, connection: socket.socket) -> None:
        try:
            with suppress(InputError, OSError):
                Channel(connection, self._events, self._secret, listens=True)
        finally:
            self._unproved.release()

    def _handle_events(self) -> None:
        while True:
            channel, message = self._events.get()
            peer = next((peer for peer in self.peers if peer.channel is channel), None)
            with self._condition:
                try:
                    self._handle(channel, peer, message)
                except Exception as error:  # the others go on
                    if peer in self.peers:
                        self._remove(peer, f"{type(error).__name__} in a message: {error}")

    def _handle(self, channel: Channel, peer: Peer | None, message: dict[str, Any]) -> None:
        if "gone" in message and peer:
            self._remove(peer, message["gone"])
        elif "message" in message:
            name, *args = decode_message(message["message"].encode())
            if peer is None and name == "register":
                self._register(channel, *args)
            elif peer is not None:
                self._HANDLERS[name](self, peer, *args)

    def _register(self, channel: Channel, about: dict[str, Any], counts: dict[str, int]) -> None:
        peer = Peer(channel, about, counts)
        own = dict(config=str(self.model.config)) if not self.peers else self.peers[0].about["same"]
        for name, value in own.items():
            if about["same"].get(name) != value:
                there = about["same"].get(name)
                values = f"{str(there)[:200]} there and {str(value)[:200]} here"
                text = f"{name} is {values}: start all processes alike"
                self._log(f"the {peer.name} was rejected: {text}")
                peer.send("reject", text)
                return
        self.peers.append(peer)
        self._about = self._about or about
        self._log(f"the {peer.name} is connected")
        self._condition.notify_all()

    def _progress(  # noqa: PLR0913  the fields of the message
        self, peer: Peer, ticket: int, news: list[Any], of_prompt: list[Any], seconds: float | None,
        error: str | None,
    ) -> None:  # fmt: skip
        """New tokens. After a prompt was given to another process, its first token comes again."""
        answers = {answer.number: answer for answer in peer.answers.get(ticket, ())}
        if not answers:
            return
        request = next(iter(answers.values())).request
        if error is not None:
            self._end(request, InputError(error))
            self._drop(peer, ticket)
            return
        now = time.monotonic()
        (before, of_prompt) = of_prompt
        more = of_prompt[max(0, len(request.prompt_logprobs) - before) :]
        request.prompt_logprobs += map(logprobs_from_message, more)
        for number, start, sampled, logprobs, alternatives, tokens, reason, hits, passes, accepted in news:
            answer = answers.get(number)
            if answer is None or answer.finish_reason is not None or answer.engine is not peer:
                continue
            if seconds is not None:
                request.times.setdefault("prefill", now - seconds)
            request.times.setdefault("first", now)
            answer.row.hits = hits
            answer.passes = passes
            answer.accepted = accepted
            new = max(0, len(answer.logprobs) - start)
            answer.alternatives += map(logprobs_from_message, alternatives[new:])
            answer.logprobs += logprobs[new:]
            answer.sampled += sampled[new:]
            answer.tokens += answer.sampled[len(answer.tokens) : tokens]
            answer.row.num_computed = len(answer.row.ids) + len(answer.logprobs)
            if reason is not None:
                answer.finish_reason = reason
                self._release(answer)
        if all(a.finish_reason is not None for a in answers.values()):
            self._drop(peer, ticket)
        if request.answered:
            self._end(request, None)
        else:
            self._condition.notify_all()
            request.notify()

    def _prefilled(self, peer: Peer, ticket: int, number: int) -> None:
        answer = next((a for a in peer.answers.get(ticket, ()) if a.number == number), None)
        if answer is None or answer.finish_reason is not None:
            peer.send("release", ticket, number)
            return
        peer.answers[ticket].remove(answer)
        if not peer.answers[ticket]:
            self._drop(peer, ticket)
        self._sources[answer] = peer, ticket
        self._decode(answer)

    def _pull(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            if at := self._sources.get(answer):
                at[0].send("send", at[1], answer.number, ticket)

    def _pass_on(self, peer: Peer, name: str, ticket: int, *args: Any) -> None:
        if target := self._places.get(ticket):
            target.send(name, ticket, *args)

    def _released(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            self._release(answer)

    def _forget(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            if at := self._sources.get(answer):
                at[0].send("forget", at[1], answer.number)

    def _counts(self, peer: Peer, counts: dict[str, int]) -> None:
        peer.reported = counts

    _HANDLERS: dict[str, Callable[..., None]] = dict(
        progress=_progress, prefilled=_prefilled, pull=_pull, release=_released, counts=_counts,
        offer=lambda self, peer, *args: self._pass_on(peer, "offer", *args),
        part=lambda self, peer, *args: self._pass_on(peer, "part", *args),
        forget=_forget,
    )  # fmt: skip


def _arguments(request: Request) -> dict[str, Any]:
    """What a process needs to make the same request."""
    call = request.call
    row = request.answers[0].row
    options = dataclasses.replace(call.options, stop_strings=tuple(request.stop_strings), impl=None)
    left = request.deadline - time.monotonic()
    fields = ("priority", "client", "share_answers")
    return dict(
        ids=list(request.ids), options=options, key=call.key, number=request.number, live=request.live,
        skip_special_tokens=request.skip_special_tokens, prompt_logprobs=request.num_prompt_logprobs,
        seconds=None if left == float("inf") else max(left, 0.001), salt=row.salt.hex(),
        logprobs_from=row.logprobs_from, row={name: getattr(row, name) for name in fields},
    )  # fmt: skip
