"""`StepTimes`: how long the parts of an engine's step take, measured or computed; without jax."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xinfer_jax.errors import InputError

# Seconds as the largest of several lines: (seconds, seconds for each token more).
Lines = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Times of an engine's device calls, as README.md describes them. A program has the same shape whatever
    its rows are, so each time depends on one number of tokens alone.
    """

    chunk: Lines
    page: Lines
    decode: Lines
    first: float = 0.0
    call: float = 0.0
    swap: float = 0.0
    move: float = 0.0
    move_call: float = 0.0
    send: float = 0.0
    place: float = 0.0
    slowdown: Sequence[float] = ()

    def slowdown_at(self, time: float) -> float:
        """The factor at this time in seconds."""
        return self.slowdown[int(time)] if time < len(self.slowdown) else 1.0


def seconds_at(lines: Lines, tokens: float) -> float:
    """Seconds for so many tokens."""
    return max(first + more * tokens for first, more in lines)


def read_step_times(file: str) -> dict[str, StepTimes]:
    """The times of "prefill" and "decode" engines and of one "engine" in a JSON file: an object for each, or
    one object for all. Raises InputError where it is no such file.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--times={file}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"--times={file}: must hold a JSON object, as scripts/goodput/README.md describes")
    sides = {"engine": content} if "chunk" in content or not content else content
    if unknown := {*sides} - {"engine", "prefill", "decode"}:
        raise InputError(
            f"--times={file}: give engine, prefill and decode, or chunk, page, decode: got {unknown.pop()!r}"
        )
    times = {side: _checked(file, side, values) for side, values in sides.items()}
    some = next(iter(times.values()))
    return {side: times.get(side, times.get("engine", some)) for side in ("engine", "prefill", "decode")}


def _checked(file: str, side: str, values: Any) -> StepTimes:
    fields = {field.name: field for field in dataclasses.fields(StepTimes)}
    if (
        not isinstance(values, dict)
        or not {*values} <= {*fields}
        or not {"chunk", "page", "decode"} <= {*values}
    ):
        raise InputError(
            f"--times={file}: {side} needs chunk, page and decode, and may have {', '.join(fields)}"
        )
    for name, value in values.items():
        if not _is_valid(name, value):
            raise InputError(f"--times={file}: {side}.{name} is not a time, got {value!r}")
    return StepTimes(**values)


def _is_valid(name: str, value: Any) -> bool:
    if name in ("chunk", "page", "decode"):
        return isinstance(value, list) and bool(value) and all(map(_is_line, value))
    if name == "slowdown":
        return isinstance(value, list) and all(_is_seconds(factor) and factor > 0 for factor in value)
    return _is_seconds(value)


def _is_line(line: Any) -> bool:
    return isinstance(line, list) and len(line) == 2 and all(map(_is_seconds, line)) and line[0] > 0


def _is_seconds(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0
