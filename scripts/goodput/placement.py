"""Which meshes prefill and decode, and how many of each: DistServe's two searches (Zhong et al., OSDI 2024,
algorithms 1 and 2), without pipeline parallelism, which the library does not have; without jax.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from goodput.goodput_search import Workload, goodput
from goodput.simulated_engine import EngineSizes
from goodput.simulator import Deployment
from goodput.step_times import StepTimes

_NEAR = 0.97  # of the best estimate: the smallest group of engines that reaches this is taken


@dataclasses.dataclass(frozen=True)
class Option:
    """An engine on a mesh, and the requests per second that it serves within its limit.

    Attributes:
        devices: of the mesh.
    """

    devices: int
    sizes: EngineSizes
    times: StepTimes
    goodput: float

    @property
    def per_device(self) -> float:
        return self.goodput / self.devices


@dataclasses.dataclass(frozen=True)
class Group:
    """Engines of two sides, and the requests per second that they serve together within both limits."""

    prefill: Option
    decode: Option
    num_prefill: int
    num_decode: int
    goodput: float

    @property
    def devices(self) -> int:
        return self.num_prefill * self.prefill.devices + self.num_decode * self.decode.devices

    @property
    def estimate(self) -> float:
        """Requests per second and device, if the sides did not depend on each other."""
        least = min(self.num_prefill * self.prefill.goodput, self.num_decode * self.decode.goodput)
        return least / self.devices

    @property
    def per_device(self) -> float:
        return self.goodput / self.devices


def phase_options(
    engines: Sequence[tuple[int, EngineSizes, StepTimes]], workload: Workload, phase: str
) -> list[Option]:
    """Each mesh for one phase, or for "both", alone. engines: devices, sizes and times."""
    return [
        Option(devices, sizes, times, goodput(Deployment(sizes, times), workload, phase))
        for devices, sizes, times in engines
    ]


def best_option(options: Sequence[Option]) -> Option | None:
    """The one with the most requests per second and device; None if all serve none."""
    best = max(options, key=lambda option: option.per_device, default=None)
    return best if best and best.goodput else None


def count_for(rate: float, option: Option) -> int:
    """Engines that serve so many requests per second."""
    return math.ceil(rate / option.goodput)


def smallest_group(prefill: Option, decode: Option, devices: int) -> Group | None:
    """The smallest group on at most so many devices whose estimate is near the best one."""
    groups = [
        Group(prefill, decode, num_prefill, num_decode, 0.0)
        for num_prefill in range(1, devices // prefill.devices + 1)
        for num_decode in range(1, (devices - num_prefill * prefill.devices) // decode.devices + 1)
    ]
    if not groups:
        return None
    enough = _NEAR * max(group.estimate for group in groups)
    return min((group for group in groups if group.estimate >= enough), key=lambda group: group.devices)


def simulate_group(group: Group, workload_of: Callable[[int], Workload], move: float) -> Group:
    """The group with its goodput, by simulation of both sides.

    Args:
        workload_of: requests for so many engines.
        move: seconds of a page on the way.
    """
    times = dataclasses.replace(group.prefill.times, move=move)
    deployment = Deployment(
        group.prefill.sizes, times, 0, group.num_prefill, group.num_decode, group.decode.sizes,
        group.decode.times,
    )  # fmt: skip
    workload = workload_of(max(group.num_prefill, group.num_decode))
    return dataclasses.replace(group, goodput=goodput(deployment, workload))


def group_with_fast_links(
    prefill: Sequence[Option], decode: Sequence[Option], devices: int, simulate: Callable[[Group], Group]
) -> Group | None:
    """Algorithm 1: the best mesh of each side, on any devices."""
    best = best_option(prefill), best_option(decode)
    group = smallest_group(*best, devices) if best[0] and best[1] else None
    return group and simulate(group)


def group_in_a_node(
    prefill: Sequence[Option], decode: Sequence[Option], devices: int, simulate: Callable[[Group], Group],
    tries: int = 3,
) -> Group | None:  # fmt: skip
    """Algorithm 2: both sides inside one node of so many devices, because links between nodes are slow. The
    pairs of meshes with the best estimates are simulated.
    """
    groups = [
        group
        for of_prefill in prefill
        for of_decode in decode
        if of_prefill.goodput and of_decode.goodput
        if (group := smallest_group(of_prefill, of_decode, devices))
    ]
    first = sorted(groups, key=lambda group: -group.estimate)[:tries]
    return max(map(simulate, first), key=lambda group: group.per_device, default=None)
