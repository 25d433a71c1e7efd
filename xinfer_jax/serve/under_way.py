"""A call that the engine answers, until it is over: what it holds, and what the log says of it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..api.bodies import Asked
from ..api.responses import usage
from ..engine.requests import Request
from .admission import Ticket
from .metrics import Metrics
from .settings import Settings


class _Server(Protocol):
    settings: Settings
    metrics: Metrics
    say: Callable[[str], None]


class UnderWay:
    """Until it is answered, or whoever asked has gone.

    Attributes:
        name: of the call, in the log.
        ticket: what it holds of the server's limits.
        number: of all calls that the server answers.
        received: when it arrived, by time.monotonic().
        requests: to the engine.
    """

    def __init__(self, server: _Server, name: str, ticket: Ticket, number: int, received: float):
        self._server = server
        self.name = name
        self.ticket = ticket
        self.number = number
        self.received = received
        self._over = False
        self._lock = threading.Lock()
        self.asked: Asked | None = None
        self.requests: list[Request] = []

    def begin(self, asked: Asked, requests: list[Request]) -> None:
        """The engine has it, in a thread; where the client has gone meanwhile it is cancelled."""
        with self._lock:
            self.asked = asked
            self.requests = requests
            over = self._over
        if over:
            self._end(asked, requests)

    def end(self) -> None:
        """It is over; once is enough."""
        with self._lock:
            over = self._over
            self._over = True
            asked = self.asked
            requests = self.requests
        if not over:
            self._end(asked, requests)

    def _end(self, asked: Asked | None, requests: Sequence[Request]) -> None:
        self.ticket.leave()
        for request in requests:
            if not request.ended:
                request.cancel()
            self._server.metrics.ended(request)
        if asked is not None:
            self._server.say(f"{self.name} {self._said(asked)}")

    def _said(self, asked: Asked) -> str:
        answers = [answer for request in self.requests for answer in request.answers]
        counts = usage(asked, [answer.logprobs for answer in answers])
        firsts = [r.times["first"] - r.submitted for r in self.requests if "first" in r.times]
        first = f", first after {1e3 * min(firsts):.0f} ms" if firsts else ""
        prompts = f", {asked.prompts}" if self._server.settings.log_prompts else ""
        reasons = ",".join(dict.fromkeys(answer.finish_reason or "gone" for answer in answers))
        tokens = f"{counts['prompt_tokens']} + {counts['completion_tokens']} tokens"
        seconds = time.monotonic() - self.received
        return f"{asked.kind}: {tokens} in {seconds:.2f} s{first}, {reasons}, seed {asked.seed}{prompts}"


def usage_of(asked: Asked, requests: Sequence[Request]) -> dict[str, Any]:
    """Tokens of the prompts and answers, and those that came from pages of earlier prompts."""
    cached = dict(cached_tokens=sum(request.answers[0].row.hits for request in requests))
    rows = [answer.logprobs for request in requests for answer in request.answers]
    return dict(usage(asked, rows), prompt_tokens_details=cached)
