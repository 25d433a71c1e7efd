"""Simulates engines of one kind, or of two sides; without jax.

arrivals ─► one engine, or a prefill engine ─ pages ─► a decode engine
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from goodput.step_times import Lines, StepTimes, seconds_at
from goodput.workload import Lengths, SimulatedRequest
from xinfer_jax.engine.pacing import Pacing
from xinfer_jax.engine.pages import num_pages_for
from xinfer_jax.engine.row import Action, PrefillChunk, Row, Swap
from xinfer_jax.engine.scheduler import Scheduler

_MAX_EVENTS = 20_000_000  # more: the simulation does not end


class EngineSizes(NamedTuple):
    """The arguments of `Scheduler`: slots, pages, tokens of a row, tokens of a chunk."""

    rows: int
    pages: int
    capacity: int
    chunk: int


class Clock:
    """Events in the order of their times; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Calls `event` at this time."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        """Runs until no event is left."""
        for _ in range(_MAX_EVENTS):
            if not self._events:
                return
            self.now, _, event = heapq.heappop(self._events)
            event()
        raise RuntimeError(f"no end after {_MAX_EVENTS:,} events")


class SimulatedEngine:
    """An engine, whose steps are those of `EngineCore`, with the library's scheduler."""

    def __init__(self, clock: Clock, sizes: EngineSizes, times: StepTimes):
        self.scheduler = Scheduler(*sizes, prefix_cache=False)
        self.requests: dict[Row, SimulatedRequest] = {}
        self._clock = clock
        self._times = times
        self._pacing = Pacing(sizes.chunk)
        self._sampled: dict[Row, int] = {}
        self._submitted: list[Row] = []
        self._calls: list[Callable[[], float | None]] = []
        self._steps = self._run()
        self._idle = True

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that it has not prefilled."""
        rows = [*self._submitted, *self.scheduler.waiting, *self.scheduler.rows_with_slots]
        return sum(max(0, len(row.ids) - row.num_computed) for row in rows)

    def submit(self, request: SimulatedRequest) -> None:
        """Queues a request."""
        self._add(Row(range(request.prompt), request.answer), request, 0)

    def call_soon(self, function: Callable[[], float | None]) -> None:
        """Calls a function before the next step, which begins so many seconds later as it returns."""
        self._calls.append(function)
        self._wake()

    def _add(self, row: Row, request: SimulatedRequest, sampled: int) -> None:
        self.requests[row] = request
        self._sampled[row] = sampled
        self._submitted.append(row)
        self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._clock.at(self._clock.now, self._continue)

    def _continue(self) -> None:
        """Goes on to the next point of time that its steps reach."""
        seconds = next(self._steps)
        if seconds is None:
            self._idle = True
        else:
            self._clock.at(self._clock.now + seconds, self._continue)

    def _run(self) -> Generator[float | None, None, None]:
        """All steps, as `EngineCore.step` takes them. Yields seconds that pass; None: there is nothing to do
        until it is woken.
        """
        while True:
            yield from self._take_queued()
            busy = False
            width = 0
            while self._pacing.may_prefill(width) and (actions := self.scheduler.schedule()):
                busy = True
                yield from self._execute(actions)
                width += sum(action.width for action in actions if isinstance(action, PrefillChunk))
            skips_decoding = self._pacing.skips_decoding(width, live=True)
            if self.scheduler.running and not skips_decoding:
                busy = True
                yield from self._decode()
            if not (busy or self._calls or self._submitted):
                yield None

    def _take_queued(self) -> Generator[float, None, None]:
        calls, self._calls = self._calls, []
        submitted, self._submitted = self._submitted, []
        for call in calls:
            yield call() or 0.0
        for row in submitted:
            self.scheduler.submit(row)

    def _execute(self, actions: Sequence[Action]) -> Generator[float, None, None]:
        for action in actions:
            if isinstance(action, PrefillChunk):
                yield from self._prefill(action)
            else:
                yield self._swap(action)

    def _prefill(self, chunk: PrefillChunk) -> Generator[float, None, None]:
        row = chunk.row
        yield self._seconds(self._times.chunk if chunk.is_full else self._times.page, chunk.start)
        self.scheduler.record_prefill(chunk)
        if chunk.is_last:
            yield self._times.first
            self.requests[row].first = self._clock.now
            self._append(row, 1)

    def _swap(self, swap: Swap) -> float:
        """Seconds to copy pages out or in."""
        return self._times.swap * len(swap.pages)

    def _decode(self) -> Generator[float, None, None]:
        scheduler = self.scheduler
        left = [self._left(row) for row in scheduler.running]
        steps, _ = self._pacing.decode_call(scheduler, left, bool(self._submitted), live=True)
        yield from self._execute(scheduler.reserve_pages(steps))
        # If a row ends before the last step, no other row waits. Over the steps each row holds half of its
        # new tokens on average.
        counts = {row: min(steps, self._left(row)) for row in scheduler.running}
        tokens = sum(row.num_computed + count / 2 for row, count in counts.items())
        seconds = steps * self._seconds(self._times.decode, tokens) + self._times.call
        yield seconds
        self._pacing.record_decode(seconds, steps)
        for row, count in counts.items():
            scheduler.record_decode(row, count)
            self._append(row, count)

    def _seconds(self, lines: Lines, tokens: float) -> float:
        return seconds_at(lines, tokens) * self._times.slowdown_at(self._clock.now)

    def _left(self, row: Row) -> int:
        return row.max_new_tokens - self._sampled[row]

    def _append(self, row: Row, count: int) -> None:
        """A row has so many new tokens."""
        self._sampled[row] += count
        if not self._left(row):
            self.requests[row].ended = self._clock.now
            self._end(row)

    def _end(self, row: Row) -> None:
        self.scheduler.end(row)
        self.requests.pop(row, None)
        self._sampled.pop(row, None)


class SimulatedPrefill(SimulatedEngine):
    """`PrefillCore`, simulated: a row keeps its slot and pages until it has arrived at another engine."""

    on_prefilled: Callable[["SimulatedPrefill", Row, SimulatedRequest], None]
    _link_free = 0.0  # when the last row will have left

    def send(self, row: Row, target: "SimulatedDecode", deliver: Callable[[], None]) -> float:
        """Sends a row to another engine; calls `deliver` once it is there. Returns this engine's seconds."""
        pages = num_pages_for(len(row.ids))
        seconds = self._times.send * pages
        transit = self._times.move_call + self._times.move * pages
        start = max(self._clock.now + seconds, self._link_free, target.link_free)
        self._link_free = target.link_free = start + transit
        self._clock.at(start + transit, deliver)
        return seconds

    def release(self, row: Row) -> None:
        """The row has arrived elsewhere: its slot and pages are free."""
        self._end(row)

    def _append(self, row: Row, count: int) -> None:
        request = self.requests[row]
        super()._append(row, count)
        if not row.ended:
            row.moving = True
            self.on_prefilled(self, row, request)

    def _swap(self, swap: Swap) -> float:
        if swap.row.is_prefilled:  # its pages wait in host memory
            self._end(swap.row)
        return super()._swap(swap)


class SimulatedDecode(SimulatedEngine):
    """A simulated `DecodeCore`: rows come prefilled, and are pulled once they have a slot and pages here."""

    link_free = 0.0

    def __init__(self, clock: Clock, sizes: EngineSizes, times: StepTimes):
        super().__init__(clock, sizes, times)
        self._sources: dict[Row, Callable[[Callable[[], None]], None]] = {}

    @property
    def free_pages(self) -> int:
        """Pages that are left once all rows have those that they need soon."""
        return self.scheduler.pool.size - sum(row.pages_to_continue for row in self.requests)

    def receive(
        self, ids: Sequence[int], request: SimulatedRequest, pull: Callable[[Callable[[], None]], None]
    ) -> None:
        """Queues a row that has its first token. `pull` is called once it has pages; it calls its argument
        when the row has arrived.
        """
        row = Row(ids, request.answer, num_computed=len(ids))
        self._sources[row] = pull
        self._add(row, request, 1)

    def _swap(self, swap: Swap) -> float:
        row = swap.row
        if row not in self._sources:
            return super()._swap(swap)
        row.moving = not swap.out
        if row.moving:
            self._sources[row](lambda: self.call_soon(lambda: self._arrive(row)))
        return 0.0

    def _arrive(self, row: Row) -> float:
        """The row decodes from now on, if it was not preempted meanwhile."""
        if not self._sources.pop(row, None):  # it arrived before
            return 0.0
        row.moving = False
        return self._times.place * num_pages_for(row.num_computed)


class Deployment(NamedTuple):
    """Engines that do both, or of two sides where there are none. Sizes and times are those of each."""

    sizes: EngineSizes
    times: StepTimes
    engines: int = 1
    prefill: int = 0
    decode: int = 0
    decode_times: StepTimes | None = None


def simulate(
    deployment: Deployment, arrivals: Sequence[float], lengths: Sequence[Lengths]
) -> list[SimulatedRequest]:
    """Requests with their times. arrivals: in seconds; lengths: of each request."""
    clock = Clock()
    requests = [
        SimulatedRequest(float(time), prompt, answer)
        for time, (prompt, answer) in zip(arrivals, lengths, strict=True)
    ]
    route = _router(clock, deployment)
    for request in requests:
        clock.at(request.arrival, lambda request=request: route(request))
    clock.run()
    return requests


def _router(clock: Clock, deployment: Deployment) -> Callable[[SimulatedRequest], Any]:
    """Creates the engines. Returns what gives an arriving request to one of them."""
    sizes, times, count = deployment[:3]
    if count:
        engines = [SimulatedEngine(clock, sizes, times) for _ in range(count)]
        return lambda request: min(engines, key=lambda engine: len(engine.requests)).submit(request)
    decode_times = deployment.decode_times or times
    decode = [SimulatedDecode(clock, sizes, decode_times) for _ in range(deployment.decode)]
    prefill = [SimulatedPrefill(clock, sizes, times) for _ in range(deployment.prefill)]
    for engine in prefill:
        engine.on_prefilled = lambda source, row, request: _move(source, row, decode, request)
    return lambda request: min(prefill, key=lambda engine: engine.queued_tokens).submit(request)


def _move(
    source: SimulatedPrefill, row: Row, engines: list[SimulatedDecode], request: SimulatedRequest
) -> None:
    """Gives a prefilled row to the engine that has the most free pages."""
    target = max(engines, key=lambda engine: engine.free_pages)

    def pull(arrive: Callable[[], None]) -> None:
        def deliver() -> None:
            arrive()
            source.call_soon(lambda: source.release(row))

        source.call_soon(lambda: source.send(row, target, deliver))

    target.receive(row.ids, request, pull)
