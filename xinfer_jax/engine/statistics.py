"""What an engine does and did."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .requests import Request

_REMEMBERED = 1000  # requests that quantiles are of


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Of an engine.

    Attributes:
        running, reading, waiting: answers that decode, whose prompts are read, that wait for a slot.
        pages_used, pages_shared, pages_cached, pages_free: held by rows; of those by several; kept for
            prompts that may come again; neither.
        hits: tokens of prompts that were not read, because pages held them.
        preemptions: rows whose pages went to host memory for older ones.
        read_tokens, chosen_tokens: by the model.
        requests: that have ended.
        ttft_seconds, tpot_seconds: 50th, 90th and 99th percentile over the last 1000 requests, of the time to
            the first token and of the time per token after it; None before the first.
    """

    running: int
    reading: int
    waiting: int
    pages_used: int
    pages_shared: int
    pages_cached: int
    pages_free: int
    hits: int
    preemptions: int
    read_tokens: int
    chosen_tokens: int
    requests: int
    ttft_seconds: list[float] | None
    tpot_seconds: list[float] | None


class Recent:
    """Sums, and the times of the last requests in seconds."""

    def __init__(self) -> None:
        self.read_tokens = self.chosen_tokens = self.requests = 0
        self.seconds: dict[str, deque[float]] = {name: deque(maxlen=_REMEMBERED) for name in ("ttft", "tpot")}

    @property
    def sums(self) -> dict[str, int]:
        """Without the times."""
        return {name: value for name, value in vars(self).items() if name != "seconds"}

    def ended(self, request: Request) -> None:
        """A request has ended."""
        times = request.times
        tokens = len(request.answers[0].logprobs)
        self.requests += 1
        if "first" in times:
            self.seconds["ttft"].append(times["first"] - request.submitted)
        if tokens > 1:
            self.seconds["tpot"].append((times["ended"] - times["first"]) / (tokens - 1))


def stats_of(engines: Sequence[Any]) -> EngineStats:
    """Of all of them together."""
    each = [engine.counts() for engine in engines]
    found: dict[str, Any] = {name: sum(counts[name] for counts in each) for name in each[0]}
    for name in ("ttft", "tpot"):
        seconds = [x for engine in engines for x in list(engine.recent.seconds[name])]
        found[f"{name}_seconds"] = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist() if seconds else None
    return EngineStats(**found)
