"""`GemmaCallParser`: a call as Gemma 4 writes it: call:name{key:<|"|>text<|"|>,other:[1,true]}.

Keys have no quotes, and texts stand between two marks of their own, without escapes. Source: Gemma 4's chat
template.
"""

import json
import re
from collections.abc import Collection

from .call_parser import GEMMA_QUOTE, CallParser, length_of_partial_mark

_NAME = re.compile(r"call:\s{0,64}([^\s{}<>]{1,512})\s{0,64}\{")
_NAME_PART = re.compile(r"(?:c|ca|cal|call|call:\s{0,64}[^\s{}<>]{0,512}\s{0,64})?")
_KEY = re.compile(
    r'(?:<\|"\|>([^:]{0,512}?)<\|"\|>|"([^":]{0,512})"|([^\s:{}\[\],"<][^:{}\[\],<]{0,511}?))\s{0,64}:'
)
_SCALAR = re.compile(r"([^,\]}\[{<]{0,512}+)(.)", re.DOTALL)
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.){0,2048}"', re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", "none": "null", "nil": "null"}
_MAX_DEPTH = 100


class GemmaCallParser(CallParser):
    """Parses one call in this form."""

    def __init__(self, names: Collection[str] | None):
        """names: of the functions that may be called; None: any."""
        super().__init__()
        self._names = names
        self._open: list[str] = []  # "{" and "[" that are not closed yet
        self._keys: list[set[str]] = []  # of each of them
        self._step = self._push_name
        self._verbatim = (self._push_text,)

    def _push_name(self, text: str) -> tuple[int, str]:
        if not (found := _NAME.match(text)):
            self.failed = not _NAME_PART.fullmatch(text)
            return 0, ""
        self.failed = self._names is not None and found[1] not in self._names
        if self.failed:
            return found.end(), ""
        self.name = found[1]
        return found.end(), self._begin("{")

    def _begin(self, bracket: str) -> str:
        self.failed = len(self._open) == _MAX_DEPTH
        self._open.append(bracket)
        self._keys.append(set())
        self._step = self._push_key if bracket == "{" else self._push_value
        return bracket

    def _push_key(self, text: str) -> tuple[int, str]:
        if text.startswith("}"):
            return 1, self._end()
        if not (found := _KEY.match(text)):
            return 0, ""
        key = next(group for group in found.groups() if group is not None)
        self.failed = key in self._keys[-1]
        separator = ", " if self._keys[-1] else ""
        self._keys[-1].add(key)
        self._step = self._push_value
        return found.end(), f"{separator}{json.dumps(key, ensure_ascii=False)}: "

    def _push_value(self, text: str) -> tuple[int, str]:
        first = text[:1]
        if first in ("{", "["):
            return 1, self._begin(first)
        if first == "]" and self._open[-1] == "[":
            return 1, self._end()
        if text.startswith(GEMMA_QUOTE):
            self._step = self._push_text
            return len(GEMMA_QUOTE), '"'
        if first == '"':
            return self._push_json_string(text)
        if GEMMA_QUOTE.startswith(text) or not (found := _SCALAR.match(text)):
            return 0, ""
        self.failed = not found[1] or found[2] not in ",]}"
        self._step = self._push_separator
        return len(found[1]), "" if self.failed else _scalar_json(found[1].strip())

    def _push_json_string(self, text: str) -> tuple[int, str]:
        if not (found := _JSON_STRING.match(text)):
            return 0, ""
        self._step = self._push_separator
        try:
            value = json.loads(found[0], strict=False)
        except ValueError:
            value = found[0][1:-1]
        return found.end(), json.dumps(value, ensure_ascii=False)

    def _push_text(self, text: str) -> tuple[int, str]:
        end = text.find(GEMMA_QUOTE)
        part = text[: end if end >= 0 else len(text) - length_of_partial_mark(text, [GEMMA_QUOTE])]
        piece = json.dumps(part, ensure_ascii=False)[1:-1]
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
        return 1, "" if in_object else ", "

    def _end(self) -> str:
        self._keys.pop()
        bracket = self._open.pop()
        self.ended = not self._open
        self._step = self._push_separator
        return "}" if bracket == "{" else "]"


def _scalar_json(text: str) -> str:
    """The JSON of a value without marks: a number, true, false, null, else a text."""
    word = _WORDS.get(text, text)
    try:
        json.dumps(json.loads(word), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return word
