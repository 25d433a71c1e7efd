"""What an engine does and did."""

import dataclasses
from collections import deque

import numpy as np

from .requests import Request
from .scheduler import Counts

_REMEMBERED = 1000  # requests that quantiles are of


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Attributes:
    running, waiting: answers that have a slot, or wait for one.
    pages_used, pages_shared, pages_cached, pages_free: held by rows; of those by several; kept for prompts
        that may come again; neither.
    hits: tokens of prompts that were not read, because pages held them.
    read_tokens, chosen_tokens: by the model.
    preemptions: rows whose pages went to host memory for older ones.
    requests: that have ended.
    ttft_seconds, tpot_seconds: 50th, 90th and 99th percentile over the last 1000 requests, of the time to the
        first token and of the time per token after it; None before the first.
    """

    running: int
    waiting: int
    pages_used: int
    pages_shared: int
    pages_cached: int
    pages_free: int
    hits: int
    read_tokens: int
    chosen_tokens: int
    preemptions: int
    requests: int
    ttft_seconds: tuple[float, ...] | None
    tpot_seconds: tuple[float, ...] | None


class Recent:
    """Sums, and the times of the last requests."""

    def __init__(self) -> None:
        self.read_tokens = self.chosen_tokens = self.requests = 0
        self._ttft: deque[float] = deque(maxlen=_REMEMBERED)
        self._tpot: deque[float] = deque(maxlen=_REMEMBERED)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        times, submitted, tokens = request.times, request.submitted, len(request.answers[0].logprobs)
        self.requests += 1
        if "first" in times:
            self._ttft.append(times["first"] - submitted)
            if tokens > 1:
                self._tpot.append((times["ended"] - times["first"]) / (tokens - 1))

    def stats(self, counts: Counts) -> EngineStats:
        c = counts
        pages = c.used, c.shared, c.cached, c.free
        sums = c.hits, self.read_tokens, self.chosen_tokens, c.preemptions, self.requests
        times = (_quantiles(seconds) for seconds in (self._ttft, self._tpot))
        return EngineStats(c.running + c.reading, c.waiting, *pages, *sums, *times)


def _quantiles(seconds: deque[float]) -> tuple[float, ...] | None:
    return tuple(np.quantile(seconds, (0.5, 0.9, 0.99)).tolist()) if seconds else None
