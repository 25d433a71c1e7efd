"""What `repr` says of what holds arrays and long lists: kinds, sizes and counts, in a line or two."""

import dataclasses
from collections.abc import Sequence
from typing import Any


class Brief:
    """A dataclass whose `repr` gives arrays by type and shape, a tuple by its length and first entry."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields if f.repr)
        return f"{type(self).__name__}({given})"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{getattr(value, 'name', value.dtype)}{list(value.shape)}"
    if isinstance(value, tuple) and value:
        first = value[0]
        return f"{len(value)} × {repr(first) if isinstance(first, Brief) else _short(first)}"
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)


def counted(lists: Sequence[Sequence[Any]], noun: str) -> str:
    """How many lists there are, and between how many tokens they have."""
    sizes = sorted({len(entries) for entries in lists})
    between = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else "0"
    plural = "" if len(lists) == 1 else "s"
    tokens = "token" if sizes == [1] else "tokens"
    return f"{len(lists)} {noun}{plural} of {between} {tokens}"


def mib(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f} MiB" if count < 10 * 2**20 else f"{count / 2**20:.0f} MiB"
