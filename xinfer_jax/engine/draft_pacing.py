"""The number of draft tokens of each decode step: plain Python, without arrays."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_PROBE_STEPS = 16  # decode steps of a call that measures another width
_PROBE_SHARE = 0.02  # of the time may be lost in such calls
_LEAST_LOSS = 0.1  # of the time of such a call counts as lost, even if it was as fast
_NEW_PART = 0.25  # of an average is its last value
_LARGEST_CHANGE = 2.0  # a value counts as at most this multiple of the average: the machine paused
_HALF_TRIALS = 256  # draft tokens after which earlier ones count half in the acceptance rate
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
        if width not in times:
            times[width] = _Time(seconds)
        times[width].add(seconds, self._calls)
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
        """Returns a width to measure, or None: the largest width that may be better than the best one and was
        not measured twice, or else, if enough time has passed, the one that was not measured for the longest
        time. A step of a larger width takes at least as long as a step of a smaller one.
        """
        best_rate = self._rate(best, times[best].seconds)
        for width in sorted(self._widths, reverse=True):
            smaller = [time.seconds for other, time in times.items() if other < width]
            is_known = width in times and times[width].count > 1
            if not is_known and width != best and self._rate(width, max(smaller, default=0.0)) > best_rate:
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
    """An average of seconds per step."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.last_call = 0  # the number of the call that measured it last
        self.count = 0

    def add(self, seconds: float, call: int) -> None:
        """Adds a measurement. The first one may have waited for memory or a program, so the smaller one of
        the first two counts.
        """
        self.count += 1
        self.last_call = call
        if self.count <= 2:
            self.seconds = min(self.seconds, seconds)
        else:
            self.seconds += _NEW_PART * (min(seconds, _LARGEST_CHANGE * self.seconds) - self.seconds)


def _situation(rows: int, masked: bool) -> tuple[int, bool]:
    """Returns the key under which times are kept: for 1, 2, up to 4, up to 8 rows and so on."""
    return (rows - 1).bit_length(), masked
