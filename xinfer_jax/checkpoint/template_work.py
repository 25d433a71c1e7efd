"""What a chat template may do: what takes time or memory is counted before, and refused beyond a limit.

One unit of work is a character written; a part of a list or of a dict is `PART` of them, a node of the
template that a loop or a macro passes through `NODE`. A template has `_WORK`, and more for a long
conversation: for what it weighs, and for every pair of messages (some templates look back from each), up to
those of a thousand messages. Whatever the conversation, it has a few seconds of the processor.
"""

import re
import string
import time
from collections import abc
from collections.abc import Callable
from itertools import chain
from typing import Any

import jinja2

PART = 64
NODE = 4
_WORK = 2_000_000
_WORK_PER_UNIT = 64
_WORK_PER_PAIR = 512
_MOST_PAIRS = 1_000_000
# Of the processor: beneath the count, should an operation be dearer. Collecting garbage in a large process
# takes tenths of a second of it.
_SECONDS = 1.0
_SECONDS_PER_UNIT = 1e-7
_MOST_SECONDS = 4.0
_BITS = 10_000  # of an integer
_DEPTH = 100  # of lists in lists; C code that walks them has no more stack than that is sure to fit

# Filters that look at the outermost list or dict alone.
FREE = {"attr", "count", "d", "default", "first", "last", "length"}
_SHALLOW = {
    "batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
}  # fmt: skip
# Methods of a text that write nothing, and those that write no more than they read.
_READING = {name for name in dir(str) if name.startswith("is")} | {
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith",
}  # fmt: skip
_COPYING = {
    "capitalize", "casefold", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "strip", "swapcase", "title", "upper",
}  # fmt: skip
# A field of % or of strftime: a name in brackets, then flags, width and precision.
_PERCENT = re.compile(r"%(?:\([^()]*\))?([-+ #0-9.*_^]*)")


def _weight(value: Any, most: float = float("inf"), depth: int = _DEPTH) -> int:
    """Units of a value, as a tree, which is what printing or comparing takes; beyond `most` any number."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise refused(f"an integer of {value.bit_length()} bits")
    if not isinstance(value, abc.Collection):
        return PART
    if not depth:
        raise refused(f"a depth of {_DEPTH} lists")
    total = PART
    for part in chain.from_iterable(value.items()) if isinstance(value, abc.Mapping) else value:
        total += PART + _weight(part, most - total, depth - 1)
        if total > most:
            break
    return total


def refused(what: str) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"{what} is more than a conversation needs")


class Work:
    """What a template may still do."""

    def __init__(self, variables: dict[str, Any]):
        pairs = min(len(variables.get("messages", ())) ** 2, _MOST_PAIRS)
        self.left: float = _WORK + _WORK_PER_UNIT * _weight(variables) + _WORK_PER_PAIR * pairs
        self.until = time.thread_time() + min(_MOST_SECONDS, _SECONDS + _SECONDS_PER_UNIT * self.left)

    def spend(self, units: float) -> None:
        self.left -= max(units, 0) + NODE
        if self.left < 0 or time.thread_time() > self.until:
            raise refused("the time or memory that it takes")

    def weigh(self, *values: Any, share: int = 1) -> int:
        """Spends what reading the values takes: their weight, or a share of it where little is made of it."""
        units = _weight(values, share * self.left)
        self.spend(units / share)
        return units

    def made(self, value: Any) -> Any:
        """Spends what a new value takes, without the parts that it only refers to; iterators end as lists."""
        if isinstance(value, abc.Iterator):
            items = []
            for item in value:
                self.spend(PART)
                items.append(item)
            return items
        parts = isinstance(value, abc.Collection) and not isinstance(value, str)
        self.spend(PART * len(value) if parts else _weight(value))
        return value

    def percent(self, text: str, values: Any = ()) -> None:
        """Spends what % makes of a text with values."""
        found = list(_PERCENT.finditer(text))
        if any(text.startswith("(", field.end()) for field in found):
            raise refused("a format with brackets in a name")
        self._fields(text, [field[1] for field in found], values)

    def braces(self, text: str, values: Any) -> None:
        """Spends what str.format makes of a text with values."""
        parsed = string.Formatter().parse(text)
        self._fields(text, [spec or "" for _, name, spec, _ in parsed if name is not None], values)

    def _fields(self, text: str, specs: list[str], values: Any) -> None:
        if any("*" in spec or "{" in spec for spec in specs):
            raise refused("a width that is computed")
        widths = sum(int(digits) for spec in specs for digits in re.findall(r"\d+", spec))
        # Every field may show all values.
        self.spend(len(text) + widths + len(specs) * self.weigh(values))

    def method(self, name: str, text: str, args: tuple, kwargs: dict) -> None:
        """Spends what a method of a text takes."""
        if name not in _READING | _COPYING | _WIDENING.keys():
            raise refused(f"the method {name!r} of a text")
        self.weigh(text, args, kwargs, share=16 if name in _READING else 1)
        if name in _WIDENING:
            self.spend(_WIDENING[name](text, *args, **kwargs))

    def operator(self, operator: str, left: Any, right: Any) -> None:
        """Spends what an operator makes, where it may be large."""
        for value, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(times, int) and isinstance(value, abc.Sized):
                self.spend((1 if isinstance(value, str) else PART) * len(value) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _BITS:
                raise refused(f"an integer of {left.bit_length() * abs(right)} bits")
        if operator == "%" and isinstance(left, str):
            self.percent(left, right)
        elif isinstance(left, bytes):
            raise refused("bytes")

    def filter(self, name: str, args: tuple, kwargs: dict) -> None:
        """Spends what a filter takes."""
        if name in _SHALLOW:
            self.spend(PART * len(args[0]) if isinstance(args[0], abc.Sized) else PART)
            self.weigh(args[1:], kwargs)
        elif name not in FREE:
            self.weigh(args, kwargs)
        if name == "format":
            self.percent(str(args[0]), (args[1:], kwargs))
        elif name in _WIDER:
            self.spend(_WIDER[name](*args, **kwargs))


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


# What methods of a text and filters write beyond what they read, by their own signatures.
_WIDENING: dict[str, Callable[..., float]] = {
    "center": lambda text, width, fill=" ": width,
    "ljust": lambda text, width, fill=" ": width,
    "rjust": lambda text, width, fill=" ": width,
    "zfill": lambda text, width: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "join": lambda text, parts: len(text) * len(parts),
    "replace": _replaced,
}
_WIDER: dict[str, Callable[..., float]] = {
    "batch": lambda value, linecount, fill_with=None: PART * linecount,
    "center": lambda value, width=80: width,
    "indent": lambda s, width=4, first=False, blank=False: (
        (len(str(s).splitlines()) + 2) * (len(width) if isinstance(width, str) else width)
    ),
    "join": lambda value, d="", attribute=None: len(str(d)) * len(value),
    "replace": _replaced,
    "round": lambda value, precision=0, method="common": PART * abs(precision),
    # A sum of lists copies them again and again.
    "sum": lambda iterable, attribute=None, start=0: 0 if isinstance(start, int | float) else float("inf"),
}
