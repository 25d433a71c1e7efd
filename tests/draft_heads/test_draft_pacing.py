"""`DraftPacing` against simulated machines: it finds the width with the most tokens per second, and measuring
the other widths costs little.
"""

import itertools

import numpy as np
import pytest

from xinfer_jax.engine.draft_pacing import DraftPacing, DraftResult

WIDTHS = range(5)
STEPS = 30  # of a call


class Machine:
    """A machine with given times of a step, and acceptance rates by place.

    Attributes:
        seconds: seconds of a step by its width.
        rates: the acceptance rate of each place, if all earlier draft tokens were accepted.
        chosen: seconds by width.
    """

    def __init__(self, seconds, rates, rows=1, seed=0):
        self.seconds = seconds
        self.rates = rates
        self.rows = rows
        self.tokens = 0.0
        self.chosen = dict.fromkeys(WIDTHS, 0.0)
        self._draws = np.random.RandomState(seed)

    def best_rate(self):
        """Tokens per second with the best width."""
        expected = [sum(np.cumprod([1, *self.rates[:width]])) for width in WIDTHS]
        return self.rows * max(n / self.seconds(width) for width, n in zip(WIDTHS, expected, strict=True))

    def call(self, pacing):
        choice = pacing.choose(self.rows, False, lambda width: True)
        steps = min(STEPS, choice.most_steps or STEPS)
        passes = steps * self.rows
        tries = itertools.accumulate(
            self.rates[: choice.width], lambda n, rate: self._draws.binomial(n, rate), initial=passes
        )
        accepted = list(tries)[1:]
        seconds = steps * self.seconds(choice.width)
        self.tokens += passes + sum(accepted)
        self.chosen[choice.width] += seconds
        pacing.record(choice, self.rows, False, DraftResult(seconds, steps, passes, accepted))
        return choice.width

    def run(self, pacing, seconds):
        """Runs for some simulated seconds. Returns the width with most of them, and tokens per second by
        those of the best width.
        """
        self.tokens = 0.0
        self.chosen = dict.fromkeys(WIDTHS, 0.0)
        while sum(self.chosen.values()) < seconds:
            self.call(pacing)
        rate = self.tokens / sum(self.chosen.values())
        return max(self.chosen, key=self.chosen.get), rate / self.best_rate()


def cheap(width):
    """One row, whose passes take little more time with draft tokens."""
    return 0.01 * (1 + 0.1 * width)


def dear(width):
    """Many rows, whose passes take almost as much longer as they have tokens."""
    return 0.01 * (1 + 0.8 * width)


@pytest.mark.parametrize(
    ("seconds", "rates", "rows", "best"),
    [
        (cheap, (0.95, 0.95, 0.95, 0.95), 1, 4),
        (cheap, (0.9, 0.05, 0.05, 0.05), 1, 1),
        (cheap, (0.02, 0.02, 0.02, 0.02), 1, 0),
        (dear, (0.6, 0.6, 0.6, 0.6), 8, 0),
        (dear, (0.95, 0.5, 0.3, 0.3), 8, 1),
    ],
)
def test_the_width_with_most_tokens_per_second_is_chosen(seconds, rates, rows, best):
    pacing = DraftPacing(WIDTHS)
    machine = Machine(seconds, rates, rows)
    machine.run(pacing, 10)
    chosen, part = machine.run(pacing, 60)
    assert chosen == best and part > 0.96


def test_other_requests_and_loads_change_the_width():
    pacing = DraftPacing(WIDTHS)
    machine = Machine(cheap, (0.95,) * 4)
    assert machine.run(pacing, 10)[0] == 4
    machine.rates = (0.02,) * 4
    assert machine.run(pacing, 20)[0] == 0
    machine.rates = (0.95,) * 4  # found by the calls that measure
    machine.run(pacing, 60)
    assert machine.run(pacing, 60)[0] == 4
    machine.rows, machine.seconds = 8, dear
    machine.run(pacing, 5)
    assert machine.run(pacing, 30)[0] < 4
    machine.rows, machine.seconds = 1, cheap
    assert machine.run(pacing, 10)[0] == 4  # it knows both


def test_one_long_pause_does_not_matter():
    pacing = DraftPacing(WIDTHS)
    machine = Machine(cheap, (0.95,) * 4)
    machine.run(pacing, 10)
    choice = pacing.choose(1, False, lambda width: True)
    pacing.record(choice, 1, False, DraftResult(30.0, 30, 30, [30] * choice.width))
    assert machine.run(pacing, 10)[0] == 4


def test_a_width_is_used_only_once_it_is_compiled():
    pacing = DraftPacing(WIDTHS)
    machine = Machine(cheap, (0.95,) * 4)
    asked = []
    for _ in range(50):
        choice = pacing.choose(1, False, lambda width: asked.append(width))
        assert choice.width == 0
        pacing.record(choice, 1, False, DraftResult(0.1, 10, 10))
    assert set(asked) == {4}  # one compiles at a time
    machine.run(pacing, 10)
    assert machine.run(pacing, 10)[0] == 4


def test_equal_calls_give_equal_choices():
    one, other = DraftPacing(WIDTHS), DraftPacing(WIDTHS)
    machines = [Machine(cheap, (0.6, 0.5, 0.4, 0.3), seed=3) for _ in range(2)]
    for _ in range(300):
        assert machines[0].call(one) == machines[1].call(other)


def test_a_single_width_needs_no_measurement():
    pacing = DraftPacing([3])
    choice = pacing.choose(5, False, lambda width: False)
    assert choice == (3, None)
    pacing.record(choice, 5, False, DraftResult(1.0, 10, 50, [5, 5, 5]))
    assert pacing.choose(5, False, lambda width: False) == (3, None)
