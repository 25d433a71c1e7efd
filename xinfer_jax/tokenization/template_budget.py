"""Limits the time and memory of a chat template: each operation's cost is counted before it runs.

The unit of cost is one character written. An item of a list or a dict costs `ITEM`, a node of the template
that a loop or a macro executes costs `NODE`. A template may spend `_BASE`, plus an amount for the size of the
conversation and one for every pair of messages, up to a thousand messages (some templates look back from each
message). In any case it has only a few seconds of CPU time.
"""

import re
import string
import time
from collections import abc
from collections.abc import Callable
from itertools import chain
from typing import Any

import jinja2

ITEM = 64
NODE = 4
_BASE = 2_000_000
_PER_UNIT_OF_SIZE = 64
_PER_PAIR = 512
_MAX_PAIRS = 1_000_000
# CPU time, in case an operation costs more than was counted. Collecting the garbage of a large process takes
# tenths of a second.
_SECONDS = 1.0
_SECONDS_PER_UNIT = 1e-7
_MAX_SECONDS = 4.0
_MAX_BITS = 10_000  # of an integer
_MAX_DEPTH = 100  # of nested lists: C code that walks them could overflow its stack

# Filters that cost nothing.
FREE_FILTERS = {"attr", "count", "d", "default", "first", "last", "length"}
# Filters that look only at the outermost list or dict.
_SHALLOW_FILTERS = {
    "batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
}  # fmt: skip
# Methods of a text that write nothing, and those that write no more than they read.
_READING_METHODS = {name for name in dir(str) if name.startswith("is")} | {
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith",
}  # fmt: skip
_COPYING_METHODS = {
    "capitalize", "casefold", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rpartition",
    "rsplit", "rstrip", "split", "splitlines", "strip", "swapcase", "title", "upper",
}  # fmt: skip
# A field of % or of strftime: a name in parentheses, then flags, width and precision.
_PERCENT_FIELD = re.compile(r"%(?:\([^()]*\))?([-+ #0-9.*_^]*)")


def _size(value: Any, most: float = float("inf"), depth: int = _MAX_DEPTH) -> int:
    """Returns the cost of printing or comparing a value with all its items. Beyond `most`, it is any number
    above it.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise limit_error(f"an integer of {value.bit_length()} bits")
    if not isinstance(value, abc.Collection):
        return ITEM
    if not depth:
        raise limit_error(f"a depth of {_MAX_DEPTH} lists")
    total = ITEM
    for item in chain.from_iterable(value.items()) if isinstance(value, abc.Mapping) else value:
        total += ITEM + _size(item, most - total, depth - 1)
        if total > most:
            break
    return total


def limit_error(what: str) -> jinja2.TemplateError:
    """Returns the error for an operation that is not allowed."""
    return jinja2.TemplateError(f"{what} is more than a conversation needs")


class TemplateBudget:
    """The budget of a template: the units of cost and the thread's CPU time that it may still spend. All
    methods raise jinja2.TemplateError if one of them is used up.
    """

    def __init__(self, variables: dict[str, Any]):
        pairs = min(len(variables.get("messages", ())) ** 2, _MAX_PAIRS)
        self.left: float = _BASE + _PER_UNIT_OF_SIZE * _size(variables) + _PER_PAIR * pairs
        self.until = time.thread_time() + min(_MAX_SECONDS, _SECONDS + _SECONDS_PER_UNIT * self.left)

    def spend(self, units: float) -> None:
        self.left -= max(units, 0) + NODE
        if self.left < 0 or time.thread_time() > self.until:
            raise limit_error("the time or memory that it takes")

    def spend_read(self, *values: Any, share: int = 1) -> int:
        """Spends the cost of reading the values, and returns their size. share: divides the cost of an
        operation that writes little.
        """
        units = _size(values, share * self.left)
        self.spend(units / share)
        return units

    def spend_result(self, value: Any) -> Any:
        """Spends the cost of a new value, without the items that it only refers to. Returns the value. An
        iterator is returned as a list.
        """
        if isinstance(value, abc.Iterator):
            items = []
            for item in value:
                self.spend(ITEM)
                items.append(item)
            return items
        has_items = isinstance(value, abc.Collection) and not isinstance(value, str)
        self.spend(ITEM * len(value) if has_items else _size(value))
        return value

    def spend_percent_format(self, text: str, values: Any = ()) -> None:
        """Spends the cost of `text % values`, and of strftime."""
        found = list(_PERCENT_FIELD.finditer(text))
        if any(text.startswith("(", field.end()) for field in found):
            raise limit_error("a format with parentheses in a name")
        self._spend_fields(text, [field[1] for field in found], values)

    def spend_str_format(self, text: str, values: Any) -> None:
        """Spends the cost of `text.format(values)`."""
        parsed = string.Formatter().parse(text)
        self._spend_fields(text, [spec or "" for _, name, spec, _ in parsed if name is not None], values)

    def _spend_fields(self, text: str, specs: list[str], values: Any) -> None:
        if any("*" in spec or "{" in spec for spec in specs):
            raise limit_error("a width that is computed")
        widths = sum(int(digits) for spec in specs for digits in re.findall(r"\d+", spec))
        # Every field may print all values.
        self.spend(len(text) + widths + len(specs) * self.spend_read(values))

    def spend_method(self, name: str, text: str, args: tuple, kwargs: dict) -> None:
        """Spends the cost of a method of a text."""
        if name not in _READING_METHODS | _COPYING_METHODS | _METHOD_OUTPUT.keys():
            raise limit_error(f"the method {name!r} of a text")
        self.spend_read(text, args, kwargs, share=16 if name in _READING_METHODS else 1)
        if name in _METHOD_OUTPUT:
            self.spend(_METHOD_OUTPUT[name](text, *args, **kwargs))

    def spend_operator(self, operator: str, left: Any, right: Any) -> None:
        """Spends the cost of an operator whose result may be large."""
        if operator == "*":
            self._spend_repeat(left, right)
            self._spend_repeat(right, left)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_BITS:
                raise limit_error(f"an integer of {left.bit_length() * abs(right)} bits")
        if operator == "%" and isinstance(left, str):
            self.spend_percent_format(left, right)
        elif isinstance(left, bytes):
            raise limit_error("bytes")

    def _spend_repeat(self, value: Any, times: Any) -> None:
        if isinstance(times, int) and isinstance(value, abc.Sized):
            self.spend((1 if isinstance(value, str) else ITEM) * len(value) * times)

    def spend_filter(self, name: str, args: tuple, kwargs: dict) -> None:
        """Spends the cost of a filter."""
        if name in _SHALLOW_FILTERS:
            self.spend(ITEM * len(args[0]) if isinstance(args[0], abc.Sized) else ITEM)
            self.spend_read(args[1:], kwargs)
        elif name not in FREE_FILTERS:
            self.spend_read(args, kwargs)
        if name == "format":
            self.spend_percent_format(str(args[0]), (args[1:], kwargs))
        elif name in _FILTER_OUTPUT:
            self.spend(_FILTER_OUTPUT[name](*args, **kwargs))


def _replace_output(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


# What methods of a text, and filters, write beyond what they read; with the signatures of the originals.
_METHOD_OUTPUT: dict[str, Callable[..., float]] = {
    "center": lambda text, width, fill=" ": width,
    "ljust": lambda text, width, fill=" ": width,
    "rjust": lambda text, width, fill=" ": width,
    "zfill": lambda text, width: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "join": lambda text, parts: len(text) * len(parts),
    "replace": _replace_output,
}
_FILTER_OUTPUT: dict[str, Callable[..., float]] = {
    "batch": lambda value, linecount, fill_with=None: ITEM * linecount,
    "center": lambda value, width=80: width,
    "indent": lambda s, width=4, first=False, blank=False: (
        (len(str(s).splitlines()) + 2) * (len(width) if isinstance(width, str) else width)
    ),
    "join": lambda value, d="", attribute=None: len(str(d)) * len(value),
    "replace": _replace_output,
    "round": lambda value, precision=0, method="common": ITEM * abs(precision),
    # A sum of lists copies them again and again: not allowed.
    "sum": lambda iterable, attribute=None, start=0: 0 if isinstance(start, int | float) else float("inf"),
}
