"""Goodput: the highest rate at which enough requests are within their limits; without jax."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from goodput.simulator import Deployment, simulate
from goodput.workload import Attainment, Lengths, attainment, draw_arrivals, draw_lengths

FRACTION = 0.9  # of the requests must be within both limits (DistServe)
_HALVINGS = 5  # the rate found is within 3%
_FILLS = 4  # requests for each slot, to find the throughput


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
    of the phase; 0: even few are not. No more than the engines end per second if all come at once: a
    simulation of few requests ends before queues are long.
    """
    which = {"prefill": "ttft", "decode": "tpot"}.get(phase, "both")

    def attains(rate: float) -> bool:
        return getattr(simulated_attainment(deployment, workload, rate, phase), which) >= FRACTION

    return highest_rate(attains, most=throughput(deployment, workload, phase))


def throughput(deployment: Deployment, workload: Workload, phase: str = "both") -> float:
    """Requests per second that end between the first and the last quarter, if all come at once."""
    sizes = deployment.decode_sizes or deployment.sizes
    slots = sizes.rows * max(deployment.engines, deployment.decode)
    times = -(-_FILLS * slots // len(workload.lengths))
    lengths = [*workload.lengths] * max(1, times)
    ended = np.sort([request.ended for request in simulate(deployment, [0.0] * len(lengths), lengths, phase)])
    first = len(ended) // 4
    last = 3 * len(ended) // 4
    return (last - first) / (ended[last] - ended[first])


def highest_rate(attains: Callable[[float], bool], most: float) -> float:
    """The highest rate for which `attains` holds, of those up to `most`; it holds up to some rate.
    0: not even for a thousandth of `most`.
    """
    if attains(most):
        return most
    high = most
    low = most / 2
    while not attains(low):
        high = low
        low /= 2
        if low < most / 1000:
            return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if attains(middle):
            low = middle
        else:
            high = middle
    return low
