"""`GemmaCallParser`: a call as Gemma 4 writes it: call:name{key:<|"|>text<|"|>,other:[1,true]}.

Keys have no quotes, and texts stand between two marks of their own, without escapes. Models also write texts
and keys as JSON and Python do, and a comma after the last item. Source: Gemma 4's chat template.
"""

import json
import re
from typing import Any

from .call_parser import GEMMA_QUOTE, CallParser, length_of_partial_mark
from .json_values import MAX_DEPTH, json_text, parse_json
from .parameter_types import Functions

_NAME = re.compile(r"call:\s{0,64}([^\s{}<>]{1,512})\s{0,64}\{")
_NAME_PART = re.compile(r"(?:c|ca|cal|call|call:\s{0,64}[^\s{}<>]{0,512}\s{0,64})?")
_DOUBLE = r'"(?:[^"\\]|\\.){0,2048}+"'
# A quote within a text, as in 'it's', is not followed by one of these.
_SINGLE = r"'(?:[^'\\]|\\.|'(?!\s{0,64}+[ENDS])){0,2048}+'(?=\s{0,64}[ENDS])"
_STRINGS = {
    '"': re.compile(_DOUBLE, re.DOTALL),
    "'": re.compile(_SINGLE.replace("ENDS", r",\]}"), re.DOTALL),
}
_KEY = re.compile(
    r'(?:<\|"\|>((?:(?!<\|"\|>).){0,512})<\|"\|>|('
    + _DOUBLE + "|" + _SINGLE.replace("ENDS", ":")
    + r""")|([^\s:{}\[\],"'<][^:{}\[\],<]{0,511}?))\s{0,64}:""",
    re.DOTALL,
)  # fmt: skip
_SCALAR = re.compile(r"([^,\]}\[{<]{0,512}+)(.)", re.DOTALL)
_ESCAPED = re.compile(r"\\.|\"", re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", "none": "null", "nil": "null"}


class GemmaCallParser(CallParser):
    """Parses one call in this form."""

    def __init__(self, functions: Functions):
        super().__init__()
        self._functions = functions
        self._open: list[str] = []  # "{" and "[" that are not closed yet
        self._keys: list[set[str]] = []  # of each of them; of a list the numbers of its items
        self._step = self._push_name
        self._verbatim = (self._push_text,)

    def _push_name(self, text: str) -> tuple[int, str]:
        if not (found := _NAME.match(text)):
            self.failed = not _NAME_PART.fullmatch(text)
            return 0, ""
        self.failed = found[1] not in self._functions
        if self.failed:
            return found.end(), ""
        self.name = found[1]
        return found.end(), self._begin("{")

    def _begin(self, bracket: str) -> str:
        self.failed = len(self._open) == MAX_DEPTH
        self._open.append(bracket)
        self._keys.append(set())
        self._step = self._push_key if bracket == "{" else self._push_value
        return bracket

    def _push_key(self, text: str) -> tuple[int, str]:
        if text.startswith("}"):
            return 1, self._end()
        if not (found := _KEY.match(text)):
            return 0, ""
        key = (
            _text_of(found[2])
            if found[2]
            else next(group for group in (found[1], found[3]) if group is not None)
        )
        piece = self._begin_item(key)
        self._step = self._push_value
        return found.end(), f"{piece}{json_text(key)}: "

    def _begin_item(self, key: str) -> str:
        """Notes a key. Returns the separator before it."""
        keys = self._keys[-1]
        self.failed = key in keys
        separator = ", " if keys else ""
        keys.add(key)
        return separator

    def _push_value(self, text: str) -> tuple[int, str]:
        if self._open[-1] == "{":
            return self._push_item(text)
        if text.startswith("]"):
            return 1, self._end()
        place = self._keys[-1]
        used, piece = self._push_item(text)
        if not used:
            return 0, ""
        separator = ", " if place else ""
        place.add(str(len(place)))
        return used, separator + piece

    def _push_item(self, text: str) -> tuple[int, str]:
        first = text[:1]
        if first in ("{", "["):
            return 1, self._begin(first)
        if text.startswith(GEMMA_QUOTE):
            self._step = self._push_text
            return len(GEMMA_QUOTE), '"'
        if first in _STRINGS:
            found = _STRINGS[first].match(text)
            if found:
                self._step = self._push_separator
            return (found.end(), json_text(_text_of(found[0]))) if found else (0, "")
        if GEMMA_QUOTE.startswith(text) or not (found := _SCALAR.match(text)):
            return 0, ""
        self.failed = not found[1] or found[2] not in ",]}"
        self._step = self._push_separator
        return len(found[1]), "" if self.failed else _scalar_json(found[1].strip())

    def _push_text(self, text: str) -> tuple[int, str]:
        end = text.find(GEMMA_QUOTE)
        part = text[: end if end >= 0 else len(text) - length_of_partial_mark(text, [GEMMA_QUOTE])]
        piece = json_text(part)[1:-1]
        if end < 0:
            return len(part), piece
        self._step = self._push_separator
        return len(part) + len(GEMMA_QUOTE), f'{piece}"'

    def _push_separator(self, text: str) -> tuple[int, str]:
        in_object = self._open[-1] == "{"
        mark = text[:1]
        if mark == ("}" if in_object else "]"):
            return 1, self._end()
        self.failed = mark not in ("", ",")
        if mark != ",":
            return 0, ""
        self._step = self._push_key if in_object else self._push_value
        return 1, ""

    def _end(self) -> str:
        self._keys.pop()
        bracket = self._open.pop()
        self.ended = not self._open
        self._step = self._push_separator
        return "}" if bracket == "{" else "]"


def _text_of(quoted: str) -> str:
    """The text of a string in quotes of JSON or Python."""
    body = quoted[1:-1]
    if quoted[0] == "'":
        body = _ESCAPED.sub(lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), body)
    try:
        return str(json.loads(f'"{body}"', strict=False))
    except ValueError:
        return quoted[1:-1]


def _scalar_json(text: str) -> str:
    """The JSON of a value without marks: a number, true, false, null, else a text."""
    word = _WORDS.get(text, text)
    try:
        parse_json(word)
    except ValueError:
        return json_text(text)
    return word


def parse_loosely(text: str) -> Any:
    """The value that a text is as JSON, as a Python literal or in Gemma's form. Raises ValueError: none."""
    parser = GemmaCallParser(Functions(None))
    call = f"call:f{{v:{text}}}"
    found = parser.push(call)
    if not parser.ended or parser.length < len(call):
        raise ValueError("no value")
    arguments = parse_json(found)
    if len(arguments) > 1:
        raise ValueError("several values")
    return arguments["v"]
