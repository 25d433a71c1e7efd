"""Which of the processes that are connected to a front process prefills a prompt, and which one decodes its
answers; and what happens to their rows when one of them is lost.
"""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..cli.channel import Channel
from ..engine.messages import encode_message
from ..engine.pages import PAGE_SIZE
from ..engine.requests import Answer, Request
from ..engine.routing import GivenPages, prompt_hashes
from ..engine.statistics import EngineCounters
from ..errors import InputError

_SUMS = {
    "hits",
    "preemptions",
    "prefill_tokens",
    "generated_tokens",
    "requests",
    "programs",
}  # of `EngineStats`


@dataclasses.dataclass(eq=False)
class Peer:
    """A process that has registered.

    Attributes:
        about: what it said about itself.
        answers: by ticket, that it works for.
        given: the pages of the prompts that it was given.
    """

    channel: Channel
    about: dict[str, Any]
    reported: dict[str, int]
    answers: dict[int, list[Answer]] = dataclasses.field(default_factory=dict)
    counters: EngineCounters = dataclasses.field(default_factory=EngineCounters)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.given = GivenPages(self.about["pages"])

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def last_step_time(self) -> float:
        """Now: a process that does not answer is removed."""
        return time.monotonic()

    def counts(self) -> dict[str, int]:
        """The counters that it reported last."""
        return self.reported

    def send(self, name: str, *args: Any) -> None:
        """Sends a message to it."""
        self.channel.send(message=encode_message([name, *args]).decode())

    @property
    def own_answers(self) -> Iterator[Answer]:
        """Answers that have not ended, and that no other process has."""
        return (a for of in self.answers.values() for a in of if a.engine is self and a.finish_reason is None)


class PeerDispatch:
    """The processes, and the rows that each has. Whoever calls a method holds `_condition`.

    Attributes:
        peers: the processes that are connected.
    """

    def __init__(self, log: Callable[[str], None]):
        """log: writes a line."""
        self.peers: list[Peer] = []
        self._log = log
        self._condition = threading.Condition()  # is notified of all changes
        self._unfinished: dict[Request, None] = {}
        self._tickets = itertools.count(1)
        self._places: dict[int, Peer] = {}  # the process of each ticket
        self._sources: dict[Answer, tuple[Peer, int]] = {}  # who has its pages until they have arrived
        self._past: list[Peer] = []

    def _of(self, role: str) -> list[Peer]:
        return [peer for peer in self.peers if peer.about["role"] == role]

    def _prefill(self, request: Request, answers: list[Answer]) -> None:
        """Gives answers to the process that will have prefilled the prompt first."""
        row = answers[0].row
        hashes = prompt_hashes(row)

        def tokens_until_prefilled(peer: Peer) -> int:
            return sum(len(a.row.ids) for a in peer.own_answers) - peer.given.hits(hashes) * PAGE_SIZE

        peer = min(self._of("prefill"), key=tokens_until_prefilled)
        peer.given.add(hashes)
        ticket = self._place(peer, answers)
        peer.send("submit", ticket, _arguments(request), [a.number for a in answers])
        if request.cancelled:
            peer.send("cancel", ticket)

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


def _arguments(request: Request) -> dict[str, Any]:
    """What a process needs to make the same request."""
    call = request.call
    row = request.answers[0].row
    options = dataclasses.replace(call.options, stop_strings=tuple(request.stop_strings), impl=None)
    left = request.deadline - time.monotonic()
    fields = ("priority", "client", "share_answers")
    return dict(
        ids=list(request.ids), options=options, key=call.key, number=request.number, live=request.live,
        text=dict(skip_special_tokens=request.skip_special_tokens, content_after=request.content_after),
        prompt_logprobs=request.num_prompt_logprobs,
        seconds=None if left == float("inf") else max(left, 0.001), salt=row.salt.hex(),
        logprobs_from=row.logprobs_from, row={name: getattr(row, name) for name in fields},
    )  # fmt: skip
