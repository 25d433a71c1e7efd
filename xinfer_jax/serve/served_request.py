"""An HTTP request that the engine answers: its engine requests, its reservation and its line of the log."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..api.bodies import ParsedBody
from ..api.responses import draft_details, usage
from ..engine.answers import sums_by_place
from ..engine.requests import Request
from .admission import Reservation


@dataclasses.dataclass(eq=False)
class ServedRequest:
    """An HTTP request, until its response is sent or its client disconnects. Thread-safe."""

    _server: Any  # a `Service`
    request_id: str
    reservation: Reservation
    number: int  # of this request for completions
    received: float  # by time.monotonic()
    parsed: ParsedBody | None = None  # until it is submitted
    requests: Sequence[Request] = ()  # to the engine
    _finished: bool = False
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def set_submitted(self, parsed: ParsedBody, requests: list[Request]) -> None:
        """Sets the engine requests, from any thread. If the client has disconnected they are cancelled."""
        with self._lock:
            self.parsed = parsed
            self.requests = requests
            finished = self._finished
        if finished:
            self._end(parsed, requests)

    def finish(self) -> None:
        """Cancels engine requests, releases the reservation and logs. Further calls do nothing."""
        with self._lock:
            finished = self._finished
            self._finished = True
            submitted = self.parsed, self.requests
        if not finished:
            self._end(*submitted)

    def _end(self, parsed: ParsedBody | None, requests: Sequence[Request]) -> None:
        self.reservation.release()
        for request in requests:
            if not request.ended:
                request.cancel()
            self._server.metrics.observe(request)
        if parsed is not None:
            self._server.log(f"{self.request_id} {self._summary(parsed)}")

    def _summary(self, parsed: ParsedBody) -> str:
        answers = [answer for request in self.requests for answer in request.answers]
        counts = usage(parsed, [answer.logprobs for answer in answers])
        firsts = [r.times["first"] - r.submitted for r in self.requests if "first" in r.times]
        first = f", first after {1e3 * min(firsts):.0f} ms" if firsts else ""
        prompts = f", {parsed.prompts}" if self._server.settings.log_prompts else ""
        reasons = ",".join(dict.fromkeys(answer.ended_by or "gone" for answer in answers))
        tokens = f"{counts['prompt_tokens']} + {counts['completion_tokens']} tokens"
        seconds = time.monotonic() - self.received
        return f"{parsed.kind}: {tokens} in {seconds:.2f} s{first}, {reasons}, seed {parsed.seed}{prompts}"


def usage_with_cached(parsed: ParsedBody, requests: Sequence[Request]) -> dict[str, Any]:
    """Returns the response's `usage`: tokens of the prompts and answers, and cached tokens of the prompts. If
    the engine drafts, it also has the numbers of draft tokens, together and at each place of a pass.
    """
    cached = dict(cached_tokens=sum(request.answers[0].row.hits for request in requests))
    answers = [answer for request in requests for answer in request.answers]
    found = dict(usage(parsed, [answer.logprobs for answer in answers]), prompt_tokens_details=cached)
    if requests[0].engine.num_draft_tokens:
        counted = answers if parsed.max_tokens else []
        drafted = sums_by_place(*(answer.drafted for answer in counted))
        accepted = sums_by_place(*(answer.accepted for answer in counted))
        found["completion_tokens_details"] = draft_details(sum(drafted), sum(accepted))
        found["draft_tokens_details"] = dict(drafted=drafted, accepted=accepted)
    return found
