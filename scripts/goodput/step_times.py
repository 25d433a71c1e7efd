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
    """Times of an engine's device calls. A program has the same shape whatever its rows are, so each time
    depends on one number of tokens alone.

    Attributes:
        chunk: a full chunk of a prompt, over the tokens before it.
        page: a page of a prompt, over the tokens before it.
        decode: a decode step, over the tokens in the pages of all rows that run.
        first: seconds of a row's first token, after its last chunk.
        call: seconds of a call of several decode steps beside these steps.
        swap: seconds to copy a page to host memory, or back.
        move: seconds of a page on the way from a prefill engine to a decode engine, which go on meanwhile.
        move_call: seconds of each such move beside its pages.
        send, place: seconds in which the prefill engine copies such a page, and the decode engine.
        slowdown: factors of chunk, page and decode in each second of a measurement; after it, and if there
            are none, 1.
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
    one object for all.

    Raises:
        InputError: the file is missing, or is no such JSON.
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
