"""Requests of a simulation or a measurement: when they arrive and how long they are; without jax."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xinfer_jax.errors import InputError


class Lognormal(NamedTuple):
    """Means of the lengths in tokens, and standard deviations of their logarithms."""

    prompt: float
    answer: float
    prompt_sigma: float
    answer_sigma: float


# Means as in DistServe's Figure 7 (arXiv 2401.09670v3); the widths are assumed.
KINDS = {
    "chat": Lognormal(755.5, 200.3, 0.8, 0.8),  # ShareGPT
    "code": Lognormal(171.3, 98.2, 0.5, 0.6),  # HumanEval
    "summarization": Lognormal(1738.3, 90.7, 0.4, 0.6),  # LongBench
}

Lengths = tuple[int, int]  # tokens of the prompt and of the answer


def draw_lengths(kind: str, count: int, most: int, rng: np.random.Generator) -> list[Lengths]:
    """Lengths of so many requests. Longer ones are cut: together they have at most `most` tokens. Raises
    InputError where the kind is none of those that --lengths of simulate.py describes.
    """
    if shape := _lognormal(kind):
        means = np.array([shape.prompt, shape.answer])
        sigmas = np.array([shape.prompt_sigma, shape.answer_sigma])
        pairs = rng.lognormal(np.log(means) - sigmas**2 / 2, sigmas, (count, 2))
    else:
        lines = read_lengths(kind)
        pairs = np.array(lines)[rng.integers(0, len(lines), count)]
    prompts = np.clip(np.rint(pairs[:, 0]), 1, most - 1).astype(int)
    answers = np.clip(np.rint(pairs[:, 1]), 1, most - prompts).astype(int)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


def _lognormal(kind: str) -> Lognormal | None:
    """The distribution of this name or of these numbers; None: the kind is a file."""
    if not kind.startswith("lognormal:"):
        return KINDS.get("chat" if kind == "lognormal" else kind)
    try:
        shape = Lognormal(*map(float, kind.partition(":")[2].split(",")))
    except (TypeError, ValueError):
        shape = None
    if not shape or not all(math.isfinite(x) and x >= 0 for x in shape):
        raise InputError(f"lengths {kind!r}: give lognormal:P,A,SP,SA, as in lognormal:755,200,1.1,0.9")
    return shape


def read_lengths(file: str) -> list[Lengths]:
    """The lengths in a file, a request in each line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"lengths {file!r} are neither {', '.join(KINDS)} nor a readable file: {error}"
        ) from error
    lengths = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace(",", " ").split()
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise InputError(
                f"{file}, line {number}: give the tokens of prompt and answer, got {line[:60]!r}"
            )
        lengths.append((int(words[0]), int(words[1])))
    if not lengths:
        raise InputError(f"{file} has no line")
    return lengths


def draw_arrivals(count: int, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Times [count] of arrivals at one request a second on average; divide by a rate. The gaps are gamma
    distributed with this coefficient of variation; 1: a Poisson process.
    """
    shape = 1 / cv**2
    return rng.gamma(shape, 1 / shape, count).cumsum()


@dataclasses.dataclass
class SimulatedRequest:
    """A request, and when its first and its last token came; in seconds."""

    arrival: float
    prompt: int
    answer: int
    first: float = math.inf
    ended: float = math.inf

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is no other."""
        return (self.ended - self.first) / (self.answer - 1) if self.answer > 1 else 0.0


class Attainment(NamedTuple):
    """Fractions of requests within both limits, within that of TTFT, within that of TPOT."""

    both: float
    ttft: float
    tpot: float


def attainment(times: Sequence[tuple[float, float]], ttft: float, tpot: float) -> Attainment:
    """The attainment of requests with these (TTFT, TPOT)."""
    within = np.array(times) <= (ttft, tpot)
    return Attainment(float(within.all(1).mean()), *within.mean(0).tolist())


def draw_workload(kind: str, count: int, most: int, cv: float, seed: int) -> tuple[np.ndarray, list[Lengths]]:
    """Arrivals and lengths of random requests; the same for the same seed. kind, most: of `draw_lengths`; cv:
    of `draw_arrivals`.
    """
    lengths_rng, arrivals_rng = (np.random.default_rng([seed, number]) for number in range(2))
    return draw_arrivals(count, cv, arrivals_rng), draw_lengths(kind, count, most, lengths_rng)
