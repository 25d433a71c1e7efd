"""Flags of simulate.py that describe requests; without jax."""

import math
from typing import Any, NamedTuple

from absl import flags

from goodput.workload import Workload, draw_workload
from xinfer_jax.errors import InputError

Flag = flags.FlagHolder[Any]


class WorkloadFlags(NamedTuple):
    """The flags of `define_workload_flags`."""

    lengths: Flag
    ttft: Flag
    tpot: Flag
    requests: Flag
    burstiness: Flag
    seed: Flag

    def workload(self, most: int) -> Workload:
        """The requests that the flags ask for; each has at most `most` tokens."""
        for flag in (self.ttft, self.tpot, self.burstiness):
            if flag.value is None:
                raise InputError(f"--{flag.name}=SECONDS is needed")
            if not (math.isfinite(flag.value) and flag.value > 0):
                raise InputError(f"--{flag.name} must be more than 0, got {flag.value}")
        sizes = self.requests.value, most, self.burstiness.value
        return draw_workload(self.lengths.value, *sizes, self.ttft.value, self.tpot.value, self.seed.value)


def define_workload_flags() -> WorkloadFlags:
    """Defines the flags."""
    return WorkloadFlags(
        flags.DEFINE_string(
            "lengths", "chat",
            "Tokens of prompts and answers: chat (or lognormal), code, summarization: lognormal with the"
            " means of DistServe's data sets; lognormal:P,A,SP,SA: means, and standard deviations of"
            " logarithms;"
            " or a file with two whole numbers in each line.",
        ),
        flags.DEFINE_float("ttft", None, "Limit of the seconds to the first token."),
        flags.DEFINE_float("tpot", None, "Limit of the seconds per later token."),
        flags.DEFINE_integer("requests", 300, "Requests of a simulation.", lower_bound=1),
        flags.DEFINE_float(
            "burstiness", 1.0, "Coefficient of variation of the gaps between arrivals (gamma); 1: Poisson."
        ),
        flags.DEFINE_integer("workload_seed", 0, "Seed of lengths and arrivals.", lower_bound=0),
    )  # fmt: skip


def positive_numbers(flag: Flag) -> list[float]:
    """The numbers of a list flag."""
    try:
        numbers = [float(text) for text in flag.value]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(x) and x > 0 for x in numbers):
        raise InputError(f"--{flag.name}={','.join(flag.value)}: give numbers above 0, as in 1,2,4")
    return numbers
