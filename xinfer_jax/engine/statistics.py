"""`EngineStats`, and the counters that it is made from."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .answers import sums_by_place
from .requests import Request

_MAX_TIMED_REQUESTS = 1000  # the last ones, for percentiles


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine, or of several engines behind one queue, from `Engine.stats`.

    Attributes:
        running: the number of answers that decode.
        prefilling: the number of answers that prefill.
        waiting: the number of answers that wait for a slot.
        pages_used: the number of pages that rows use.
        pages_shared: the number of pages that several rows use.
        pages_cached: the number of pages that no row uses, and that stay in the prefix cache.
        pages_free: the number of all other pages.
        hits: tokens of prompts that were found in the prefix cache.
        host_hits: the part of `hits` that came from host memory.
        file_hits: the part of `hits` that came from files.
        host_pages: the number of pages of the prefix cache in host memory.
        preemptions: how often a row was preempted.
        prefill_tokens: the number of prefilled tokens.
        generated_tokens: the number of sampled tokens.
        passes: the number of forward passes that rows took part in to verify draft tokens. 0: the engine has
            no draft tokens.
        drafted: the number of draft tokens in these passes.
        drafted_by_place: the number of draft tokens at each place of a pass.
        accepted: the number of accepted draft tokens at each place of a pass.
        requests: the number of requests that have ended.
        programs: the number of programs that were compiled ahead of their first run. 0 over a mesh.
        warming_up: the number of engines that still compile programs in the background.
        waiting_for_programs: the part of `waiting` whose programs are not compiled yet, or that waits for an
            `update`.
        ttft_seconds: the 50th, 90th and 99th percentile of the time to the first token (TTFT), in seconds,
            over the last 1000 requests. None: no request has ended.
        tpot_seconds: the 50th, 90th and 99th percentile of the time per token after the first one (TPOT), in
            seconds, over the last 1000 requests. None: no request has ended.
    """

    running: int
    prefilling: int
    waiting: int
    pages_used: int
    pages_shared: int
    pages_cached: int
    pages_free: int
    hits: int
    host_hits: int
    file_hits: int
    host_pages: int
    preemptions: int
    prefill_tokens: int
    generated_tokens: int
    passes: int
    drafted: int
    drafted_by_place: list[int]
    accepted: list[int]
    requests: int
    programs: int
    warming_up: int
    waiting_for_programs: int
    ttft_seconds: list[float] | None
    tpot_seconds: list[float] | None


class EngineCounters:
    """Sums since the start, and the times of the last requests in seconds."""

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.generated_tokens = 0
        self.passes = 0
        self.drafted = 0
        self.drafted_by_place: list[int] = []
        self.accepted: list[int] = []
        self.requests = 0
        names = ("ttft", "tpot")
        self.seconds: dict[str, deque[float]] = {name: deque(maxlen=_MAX_TIMED_REQUESTS) for name in names}

    @property
    def sums(self) -> dict[str, Any]:
        """All but the times."""
        return {name: value for name, value in vars(self).items() if name != "seconds"}

    def count_passes(self, passes: int, accepted: Sequence[int]) -> None:
        """Counts forward passes that one row took part in, and accepted draft tokens at each place. Passes
        without draft tokens do not count.
        """
        drafted = [passes] * len(accepted)
        self.passes += passes if drafted else 0
        self.drafted += sum(drafted)
        self.drafted_by_place = sums_by_place(self.drafted_by_place, drafted)
        self.accepted = sums_by_place(self.accepted, accepted)

    def add(self, request: Request) -> None:
        times = request.times
        tokens = len(request.answers[0].logprobs)
        self.requests += 1
        if "first" in times:
            self.seconds["ttft"].append(times["first"] - request.submitted)
        if tokens > 1:
            self.seconds["tpot"].append((times["ended"] - times["first"]) / (tokens - 1))


def collect_stats(engines: Sequence[Any], counters: Sequence[EngineCounters]) -> EngineStats:
    """Returns the statistics of all these engines together. counters: counters of the requests that callers
    gave them.
    """
    each = [engine.counts() for engine in engines]
    by_place = {
        name: sums_by_place(*(counts.pop(name) for counts in each))
        for name in ("drafted_by_place", "accepted")
    }
    stats: dict[str, Any] = {name: sum(counts[name] for counts in each) for name in each[0]}
    stats |= by_place
    stats["requests"] = sum(own.requests for own in counters)
    for name in ("ttft", "tpot"):
        seconds = [x for own in counters for x in list(own.seconds[name])]
        stats[f"{name}_seconds"] = np.quantile(seconds, (0.5, 0.9, 0.99)).tolist() if seconds else None
    return EngineStats(**stats)
