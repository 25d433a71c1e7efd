"""`JSONObjectScanner`: finds where a JSON object ends in a text that is still being generated."""

import re

_SPACES = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_IN_LITERAL = re.compile(r"[-+.0-9a-zA-Z]*")
_LITERAL = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = "0123456789abcdefABCDEF"
_MAX_DEPTH = 100
# For each state, the characters that may come next, and the state after each of them. A state of several
# words begins a string or a literal, or opens or closes an object or a list.
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
}


class JSONObjectScanner:
    """Checks the characters of one object as they arrive, each of them once.

    Attributes:
        ended: the object is complete.
        failed: the text is not a JSON object.
    """

    def __init__(self) -> None:
        self.ended = False
        self.failed = False
        self._state = "start"
        self._open: list[str] = []  # "{" and "[" that are not closed yet
        self._is_key = False  # of a string
        self._literal = ""
        self._hex_left = 0  # digits of a \u escape

    def push(self, text: str) -> int:
        """How many characters of the text belong to the object, up to its end or to what is not JSON."""
        at = 0
        while at < len(text) and not self.ended and not self.failed:
            if self._state == "string":
                at = self._push_string(text, at)
            elif self._state == "escape":
                at = self._push_escape(text, at)
            elif self._state == "literal":
                at = self._push_literal(text, at)
            else:
                at = self._push_structure(text, at)
        return at

    def _push_structure(self, text: str, at: int) -> int:
        at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        character = text[at]
        after = _NEXT[self._state].get(character)
        if after is None or after == "open" and len(self._open) == _MAX_DEPTH:
            self.failed = True
            return at
        if after == "literal":
            self._state = "literal"
            return at
        if after == "string":
            self._is_key = self._state in ("key", "first key")
        if after == "open":
            self._open.append(character)
            after = "first key" if character == "{" else "first item"
        if after == "close":
            self._open.pop()
            self._end_value()
        else:
            self._state = after
        return at + 1

    def _end_value(self) -> None:
        self.ended = not self._open
        self._state = "after field" if self._open and self._open[-1] == "{" else "after item"

    def _push_string(self, text: str, at: int) -> int:
        at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = "escape"
        elif text[at] != '"':
            self.failed = True
            return at
        elif self._is_key:
            self._state = "colon"
        else:
            self._end_value()
        return at + 1

    def _push_escape(self, text: str, at: int) -> int:
        character = text[at]
        if character not in (_HEX if self._hex_left else '"\\/bfnrtu'):
            self.failed = True
            return at
        self._hex_left = 4 if character == "u" else max(0, self._hex_left - 1)
        if not self._hex_left:
            self._state = "string"
        return at + 1

    def _push_literal(self, text: str, at: int) -> int:
        end = _IN_LITERAL.match(text, at).end()  # type: ignore[union-attr]
        self._literal += text[at:end]
        if end < len(text):
            self.failed = not _LITERAL.fullmatch(self._literal)
            self._literal = ""
            self._end_value()
        return end
