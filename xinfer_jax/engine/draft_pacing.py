"""The number of draft tokens of each decode step: plain Python, without arrays."""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_PROBE_STEPS = 8  # decode steps of a call that measures another width
_PROBE_SHARE = 0.02  # of the time may be lost in such calls
_LEAST_LOSS = 0.1  # of the time of such a call counts as lost, even if it was as fast
_LAST_CALLS = 3  # whose times count
_HALF_TRIALS = 64  # draft tokens after which earlier ones count half in the acceptance rate
_FIRST_RATE = 0.8  # the acceptance rate before any draft token
_FIRST_TRIALS = 2.0  # that it counts for


class DraftChoice(NamedTuple):
    """The draft tokens of the steps of one call."""

    width: int  # draft tokens of each step
    most_steps: int | None = None  # None: as many steps as the call has time for


class DraftResult(NamedTuple):
    """What a call of a `DraftChoice` took and gave."""

    seconds: float
    steps: int
    passes: int = 0  # of all rows together
    accepted: Sequence[int] = ()  # draft tokens of all rows at each place of a pass
    change_seconds: float = 0.0  # that the head read tokens, because the width changed


class DraftPacing:
    """Chooses how many draft tokens the next steps verify, by measured times and acceptance rates. Equal
    calls give equal choices.

    The expected tokens of a row per step are 1 + p1 + p1 p2 + ..., with the acceptance rate p of each place.
    The width with the most expected tokens per second is chosen. Other widths are measured now and then, in
    short calls, which lose at most 2% of the time. Times are measured separately for numbers of rows up to 1,
    2, 4, 8 and so on, and for rows whose grammars need the host.

    Args:
        widths: the numbers of draft tokens to choose from. With a single one nothing is measured.
    """

    def __init__(self, widths: Sequence[int]):
        self._widths = tuple(widths)
        most = max(widths)
        self._tried = [_FIRST_TRIALS] * most  # by place: draft tokens before which all were accepted
        self._accepted = [_FIRST_RATE * _FIRST_TRIALS] * most
        self._times: dict[tuple[int, bool], dict[int, _Time]] = {}
        self._loss = 0.0  # seconds that measuring has lost, and steps since have not paid for yet
        self._calls = 0

    def choose(self, rows: int, masked: bool, is_ready: Callable[[int], bool]) -> DraftChoice:
        """Returns the width of the next steps, and the most steps until `choose` is asked again.

        Args:
            rows: the number of running rows.
            masked: True: some rows have masks from the host.
            is_ready: returns True if the programs of a width are compiled. It begins to compile them if they
                are not. The first width is always ready.
        """
        if len(self._widths) == 1:
            return DraftChoice(self._widths[0])
        times = self._times.get(_situation(rows, masked))
        if not times:
            return DraftChoice(self._widths[0], _PROBE_STEPS)
        best = max(times, key=lambda width: self._rate(width, times[width].seconds))
        other = self._next_probe(times, best)
        if other is not None and is_ready(other):
            return DraftChoice(other, _PROBE_STEPS)
        return DraftChoice(best)

    def record(self, choice: DraftChoice, rows: int, masked: bool, result: DraftResult) -> None:
        """Records the result of a call. rows, masked: the values of `choose`."""
        if len(self._widths) == 1 or not result.steps:
            return
        self._calls += 1
        tokens = result.passes + sum(result.accepted)
        self._record_acceptance(result)
        times = self._times.setdefault(_situation(rows, masked), {})
        rates = [self._rate(width, time.seconds) for width, time in times.items()]
        width = choice.width
        seconds = result.seconds / result.steps
        times.setdefault(width, _Time()).add(seconds, self._calls)
        spent = result.seconds + result.change_seconds
        if choice.most_steps is None:
            self._loss = max(0.0, self._loss - _PROBE_SHARE * result.seconds) + result.change_seconds
        elif rates:
            self._loss += max(_LEAST_LOSS * spent, spent - tokens / (rows * max(rates)))

    def expected_tokens(self, width: int) -> float:
        """Returns the tokens that a row gets per step."""
        total = together = 1.0
        for accepted, tried in zip(self._accepted[:width], self._tried[:width], strict=True):
            together *= accepted / tried
            total += together
        return total

    def _rate(self, width: int, seconds: float) -> float:
        """Returns the tokens per second of a row. seconds: of a step."""
        return self.expected_tokens(width) / max(seconds, 1e-9)

    def _next_probe(self, times: "dict[int, _Time]", best: int) -> int | None:
        """Returns a width to measure, or None: the largest width that was measured less than twice and may be
        better than the best one, or else, if enough time has passed, the one that was not measured for the
        longest time. A step of a larger width takes at least as long as a step of a smaller one.
        """
        best_rate = self._rate(best, times[best].seconds)
        for width in sorted(self._widths, reverse=True):
            least = max((time.least_seconds for other, time in times.items() if other <= width), default=0.0)
            if width != best and self._rate(width, least) > best_rate:
                return width
        others = [width for width in times if width != best]
        if self._loss > 0 or not others:
            return None
        return min(others, key=lambda width: times[width].last_call)

    def _record_acceptance(self, result: DraftResult) -> None:
        tried = result.passes
        for place, accepted in enumerate(result.accepted):
            kept = 0.5 ** (tried / _HALF_TRIALS)
            self._tried[place] = kept * self._tried[place] + tried
            self._accepted[place] = kept * self._accepted[place] + accepted
            tried = accepted


class _Time:
    """The seconds per step of the last calls. Their median counts, so that one call during which the machine
    paused, or waited for a program, does not matter.
    """

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_LAST_CALLS)
        self.last_call = 0  # the number of the call that measured it last

    @property
    def seconds(self) -> float:
        return statistics.median_low(self._last)

    @property
    def least_seconds(self) -> float:
        """The least that it may be: a single call may have taken too long."""
        return 0.5 * self.seconds if len(self._last) == 1 else self.seconds

    def add(self, seconds: float, call: int) -> None:
        self._last.append(seconds)
        self.last_call = call


def _situation(rows: int, masked: bool) -> tuple[int, bool]:
    """Returns the key under which times are kept: for 1, 2, up to 4, up to 8 rows and so on."""
    return (rows - 1).bit_length(), masked
