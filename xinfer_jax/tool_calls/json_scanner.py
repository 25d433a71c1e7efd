"""`JSONObjectScanner`: finds the end of a JSON object in a text that is still being generated."""

import dataclasses
import re

_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_MAX_DEPTH = 100
_HEX = "0123456789abcdefABCDEF"
# What is skipped in each state; in the others whitespace.
_SKIPPED = {"string": r'[^"\\\x00-\x1f]*', "literal": "[-+.0-9a-zA-Z]*"} | dict.fromkeys(
    ["escape", *"1234"], ""
)
_SPACES = re.compile(r"[ \t\n\r]*")
_RUNS = {state: re.compile(pattern) for state, pattern in _SKIPPED.items()}
# For each state, the characters that may come next, and the state after each of them.
_VALUE = {'"': "string", "{": "open", "[": "open"} | dict.fromkeys("-0123456789tfn", "literal")
_NEXT = {
    "start": {"{": "open"},
    "value": _VALUE,
    "first item": _VALUE | {"]": "close"},
    "first key": {'"': "string", "}": "close"},
    "key": {'"': "string"},
    "colon": {":": "value"},
    "after item": {",": "value", "]": "close"},
    "after field": {",": "key", "}": "close"},
    "string": {'"': "end", "\\": "escape"},
    "escape": dict.fromkeys('"\\/bfnrt', "string") | {"u": "4"},
    "4": dict.fromkeys(_HEX, "3"),  # hexadecimal digits that are left
    "3": dict.fromkeys(_HEX, "2"),
    "2": dict.fromkeys(_HEX, "1"),
    "1": dict.fromkeys(_HEX, "string"),
}


@dataclasses.dataclass
class JSONObjectScanner:
    """Checks the characters of one object as they arrive, each of them once."""

    ended: bool = False  # the object is complete
    failed: bool = False  # the text is not a JSON object
    _state: str = "start"
    _open: list[str] = dataclasses.field(default_factory=list)  # "{" and "[" that are not closed yet
    _is_key: bool = False  # of a string
    _literal: str = ""

    def push(self, text: str) -> int:
        """Returns the number of characters of the text that belong to the object, up to its end or to a
        character that is not JSON.
        """
        at = 0
        while at < len(text) and not self.ended and not self.failed:
            end = _RUNS.get(self._state, _SPACES).match(text, at).end()  # type: ignore[union-attr]
            if self._state == "literal":
                self._literal += text[at:end]
            at = end
            if at < len(text):
                at += self._take(text[at])
        return at

    def _take(self, character: str) -> bool:
        """Moves to the next state. Returns True if this character belongs to the part before."""
        if self._state == "literal":
            self.failed = not _LITERAL.fullmatch(self._literal)
            self._literal = ""
            self._end_value()
            return False
        after = _NEXT[self._state].get(character)
        if after is None or after == "open" and len(self._open) == _MAX_DEPTH:
            self.failed = True
            return False
        if after == "string" and character == '"' and self._state != "escape":
            self._is_key = self._state in ("key", "first key")
        if after == "open":
            self._open.append(character)
            after = "first key" if character == "{" else "first item"
        if after == "close":
            self._open.pop()
        if after == "close" or after == "end" and not self._is_key:
            self._end_value()
        else:
            self._state = "colon" if after == "end" else after
        return after != "literal"

    def _end_value(self) -> None:
        self.ended = not self._open
        self._state = "after field" if self._open and self._open[-1] == "{" else "after item"
