"""Goodput: the highest rate at which enough requests are within their limits; without jax."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from simulator import Deployment, simulate
from workload import Attainment, Lengths, attainment, draw_arrivals, draw_lengths

FRACTION = 0.9  # of the requests must be within both limits (DistServe)
_DOUBLINGS = 24
_HALVINGS = 6  # the rate found is within 1.6% of the step that was halved


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests, and what they are measured by.

    Attributes:
        lengths: tokens of prompt and answer, of each request.
        unit_arrivals: times at one request a second on average.
        ttft, tpot: limits in seconds.
    """

    lengths: Sequence[Lengths]
    unit_arrivals: np.ndarray
    ttft: float
    tpot: float

    @property
    def mean_tokens(self) -> float:
        """Tokens in the pages of a row, on average over the time that it decodes."""
        tokens = [(prompt + answer / 2, answer) for prompt, answer in self.lengths]
        return sum(held * steps for held, steps in tokens) / sum(steps for _, steps in tokens)


def draw_workload(
    kind: str, count: int, most: int, cv: float, ttft: float, tpot: float, seed: int
) -> Workload:
    """Random requests; the same for the same seed. kind, most: of `draw_lengths`; cv: of `draw_arrivals`."""
    lengths_rng, arrivals_rng = (np.random.default_rng([seed, number]) for number in range(2))
    lengths = draw_lengths(kind, count, most, lengths_rng)
    return Workload(lengths, draw_arrivals(count, cv, arrivals_rng), ttft, tpot)


def simulated_times(
    deployment: Deployment, workload: Workload, rate: float, phase: str = "both"
) -> list[tuple[float, float]]:
    """(TTFT, TPOT) of each request at this many requests per second."""
    requests = simulate(deployment, workload.unit_arrivals / rate, workload.lengths, phase)
    return [(request.ttft, request.tpot) for request in requests]


def simulated_attainment(
    deployment: Deployment, workload: Workload, rate: float, phase: str = "both"
) -> Attainment:
    """The attainment at this many requests per second."""
    return attainment(simulated_times(deployment, workload, rate, phase), workload.ttft, workload.tpot)


def goodput(deployment: Deployment, workload: Workload, phase: str = "both") -> float:
    """Requests per second of which 90% are within the limits: within both, or in one phase alone within that
    of the phase; 0: even few are not.
    """
    which = {"prefill": "ttft", "decode": "tpot"}.get(phase, "both")

    def attains(rate: float) -> bool:
        return getattr(simulated_attainment(deployment, workload, rate, phase), which) >= FRACTION

    return highest_rate(attains)


def highest_rate(attains: Callable[[float], bool], lowest: float = 1 / 64) -> float:
    """The highest rate for which `attains` holds, which holds up to some rate; 0: not even for the lowest."""
    if not attains(lowest):
        return 0.0
    low = lowest
    for _ in range(_DOUBLINGS):
        if not attains(2 * low):
            break
        low *= 2
    high = 2 * low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if attains(middle):
            low = middle
        else:
            high = middle
    return low
