r"""Parses regular expressions into trees over sets of characters.

The syntax is the part of Rust's (and llguidance's) syntax that is regular and common: literals, `.`, classes,
groups, `|`, `* + ? {m,n}`, and ^ and $ around the whole. `\d`, `\w` and `\s` are the ASCII classes.
"""

import dataclasses
import re
from typing import Any

# A set of characters, as ranges; ("join", trees); ("or", trees); or ("repeat", tree, least, most or None).
Ranges = tuple[tuple[int, int], ...]
Tree = Any

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_DIGIT = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = ((9, 13), (32, 32))
_LETTERS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
_QUANTIFIER = re.compile(r"([*+?]|\{\s*(\d+)\s*(,)?\s*(\d*)\s*\})")
_MAX_DEPTH = 50  # of groups
_MAX_DIGITS = 9  # of a bound
_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class NotRegularError(Exception):
    """Syntax that this parser does not know. Its text names the syntax."""


def parse_regex(pattern: str) -> Tree:
    """Returns the tree of an expression. Raises NotRegularError."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        pattern = pattern[:-1]
    parser = _Parser(pattern)
    tree = parser.alternatives()
    if parser.at < len(pattern):
        raise NotRegularError(f"an unmatched {pattern[parser.at]!r}")
    return tree


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters, without surrogates."""
    found = []
    first = 0
    for low, high in sorted((*ranges, _SURROGATES)):
        if low > first:
            found.append((first, low - 1))
        first = max(first, high + 1)
    if first <= _LAST:
        found.append((first, _LAST))
    return tuple(found)


@dataclasses.dataclass
class _Parser:
    _pattern: str
    _depth: int = 0  # of groups
    at: int = 0

    def alternatives(self) -> Tree:
        trees = [self._sequence()]
        while self._take("|"):
            trees.append(self._sequence())
        return trees[0] if len(trees) == 1 else ("or", trees)

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self.at)
        self.at += found * len(text)
        return found

    def _next(self) -> str:
        if self.at >= len(self._pattern):
            raise NotRegularError("an expression that ends too soon")
        self.at += 1
        return self._pattern[self.at - 1]

    def _sequence(self) -> Tree:
        trees = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            tree = self._atom()
            if found := _QUANTIFIER.match(self._pattern, self.at):
                self.at = found.end()
                self._take("?")  # lazy: the same texts
                tree = ("repeat", tree, *_bounds(found))
                if _QUANTIFIER.match(self._pattern, self.at):
                    raise NotRegularError("a quantifier of a quantifier")
            trees.append(tree)
        return ("join", trees)

    def _atom(self) -> Tree:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise NotRegularError("a group with (?")
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NotRegularError(f"groups nested deeper than {_MAX_DEPTH}")
            tree = self.alternatives()
            self._depth -= 1
            if not self._take(")"):
                raise NotRegularError("an unclosed group")
            return tree
        if char == "[":
            return self._class()
        if char == ".":
            return complement(((10, 10),))
        if char == "\\":
            return self._escape()
        if char in "*+?{^$":
            raise NotRegularError(f"{char!r} there")
        return _one(ord(char))

    def _escape(self) -> Ranges:
        char = self._next()
        sets = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
        if char.lower() in sets:
            return sets[char] if char in sets else complement(sets[char.lower()])
        if char in _LETTERS:
            return _one(_LETTERS[char])
        if char in "xu":
            digits = {"x": 2, "u": 4}[char]
            number = self._pattern[self.at : self.at + digits]
            if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", number):
                raise NotRegularError(f"\\{char} without {digits} hexadecimal digits")
            self.at += digits
            return _one(int(number, 16))
        if char.isascii() and not char.isalnum() and char not in "<>":
            return _one(ord(char))
        raise NotRegularError(f"\\{char}")

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        begun = self.at
        while self.at == begun or not self._take("]"):
            if any(self._pattern.startswith(text, self.at) for text in ("[", "&&", "--", "~~", "]")):
                raise NotRegularError("set operations in a class")
            low = self._member()
            if re.match("-[^]]", self._pattern[self.at :], re.DOTALL):
                self.at += 1
                low = _range(low, self._member())
            found += low
        return complement(tuple(found)) if negated else tuple(found)

    def _member(self) -> Ranges:
        char = self._next()
        return self._escape() if char == "\\" else _one(ord(char))


def _one(code: int) -> Ranges:
    return ((code, code),)


def _range(low: Ranges, high: Ranges) -> Ranges:
    """Returns the range from one character to another."""
    codes = [code for pair in (*low, *high) for code in pair]
    if len(codes) != 4 or codes[0] != codes[1] or codes[2] != codes[3] or codes[0] > codes[2]:
        raise NotRegularError("a range in a class that is none")
    return ((codes[0], codes[2]),)


def _bounds(found: re.Match) -> tuple[int, int | None]:
    if found[1] in _BOUNDS:
        return _BOUNDS[found[1]]
    if max(len(found[2]), len(found[4])) > _MAX_DIGITS:
        raise NotRegularError(f"a bound of more than {_MAX_DIGITS} digits")
    least = int(found[2])
    if not found[3]:
        return least, least
    most = int(found[4]) if found[4] else None
    if most is not None and most < least:
        raise NotRegularError("a quantifier whose bounds are exchanged")
    return least, most
