"""Short texts for arrays and long lists: types, shapes and counts instead of contents; JSON on one line."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # that JSON does not escape


class ShortRepr:
    """A dataclass whose `repr` has types and shapes of arrays, and length and first entry of tuples."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields if f.repr)
        return f"{type(self).__name__}({given})"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{getattr(value, 'name', value.dtype)}{list(value.shape)}"
    if isinstance(value, tuple) and value:
        first = value[0]
        return f"{len(value)} × {repr(first) if isinstance(first, ShortRepr) else _short(first)}"
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)


def format_token_counts(lists: Sequence[Sequence[Any]], noun: str) -> str:
    """Returns the number of lists and of their tokens, as "3 prompts of 2 to 5 tokens"."""
    sizes = sorted({len(entries) for entries in lists})
    between = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else "0"
    plural = "" if len(lists) == 1 else "s"
    tokens = "token" if sizes == [1] else "tokens"
    return f"{len(lists)} {noun}{plural} of {between} {tokens}"


def format_mib(count: int) -> str:
    """Returns a number of bytes in MiB."""
    return f"{count / 2**20:.1f} MiB" if count < 10 * 2**20 else f"{count / 2**20:.0f} MiB"


def json_line(value: Any) -> str:
    """JSON on one line also for readers that split lines as `str.splitlines` does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
