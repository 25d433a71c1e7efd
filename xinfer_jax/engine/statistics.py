"""What an engine does and did."""

import dataclasses
from collections import deque
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
    """Sums, and the times of the last requests."""

    def __init__(self) -> None:
        self.read_tokens = self.chosen_tokens = self.requests = 0
        self._seconds: dict[str, deque[float]] = {
            name: deque(maxlen=_REMEMBERED) for name in ("ttft", "tpot")
        }

    def ended(self, request: Request) -> None:
        """A request has ended."""
        times, tokens = request.times, len(request.answers[0].logprobs)
        self.requests += 1
        if "first" in times:
            self._seconds["ttft"].append(times["first"] - request.submitted)
        if tokens > 1:
            self._seconds["tpot"].append((times["ended"] - times["first"]) / (tokens - 1))

    def known(self) -> dict[str, Any]:
        """What `EngineStats` says of these."""
        sums = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        for name, seconds in self._seconds.items():
            three = np.quantile(list(seconds), (0.5, 0.9, 0.99)).tolist() if seconds else None
            sums[f"{name}_seconds"] = three
        return sums
