"""`JSONCallParser`: a call as Qwen 2.5 and 3 and Llama 3 write it: {"name": …, "arguments": {…}}.

Models also write {"type": "function", "function": {…}} around it, leave arguments out where there are none,
and write them as JSON in a text.
"""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from .call_parser import CallParser
from .json_scanner import JSONObjectScanner

_ARGUMENTS = ("arguments", "parameters")
# What precedes the arguments in the usual order of the keys. No name is longer than this.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.){0,512}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_CHARACTERS = 4096  # beyond it the call is parsed when it ends, so the time stays linear


class JSONCallParser(CallParser):
    """Parses one call in this form."""

    def __init__(self, names: Collection[str] | None, may_lack_arguments: bool = True):
        """names: of the functions that may be called; None: any."""
        super().__init__()
        self._names = names
        self._may_lack_arguments = may_lack_arguments
        self._text = ""
        self._object = JSONObjectScanner()
        self._arguments = JSONObjectScanner()

    def push(self, text: str) -> str:
        start = self.length
        self._text += text
        may_begin = self.name is None and start < _HEAD_CHARACTERS
        if may_begin and (head := _HEAD.match(self._text, 0, _HEAD_CHARACTERS)):
            with suppress(ValueError):
                self._set_name(json.loads(head[1]))
                start = head.end()
            if self.failed:
                self.length = start
                return ""
        piece = ""
        if self.name is not None and not self._arguments.ended:
            end = start + self._arguments.push(self._text[start:])
            piece = self._text[start:end]
        self.length += self._object.push(text)
        self.failed = self._object.failed
        return self._end(piece) if self._object.ended else piece

    def _set_name(self, name: object) -> None:
        self.failed = not isinstance(name, str) or self._names is not None and name not in self._names
        self.name = None if self.failed else str(name)

    def _end(self, piece: str) -> str:
        """Checks the whole object. Returns the arguments' last piece: all, if their key came first."""
        try:
            call = json.loads(self._text[: self.length])
            function = call.get("function")
            if isinstance(function, dict) and "name" not in call:
                call = function
            arguments = self._arguments_of(call)
            json.dumps(call, allow_nan=False)
            found = json.dumps(arguments, allow_nan=False)
        except (ValueError, RecursionError):  # a number that is too large
            self.failed = True
            return ""
        name = call.get("name", function)
        if not isinstance(arguments, dict) or self.name is not None and name != self.name:
            self.failed = True
            return ""
        if self.name is None:
            self._set_name(name)
            piece = found
        self.ended = not self.failed
        return piece

    def _arguments_of(self, call: dict[str, Any]) -> Any:
        keys = [key for key in _ARGUMENTS if key in call]
        if len(keys) != 1:
            return {} if not keys and self._may_lack_arguments else None
        arguments = call[keys[0]]
        if isinstance(arguments, str) and arguments:
            arguments = json.loads(arguments)
        return {} if arguments in (None, "", []) else arguments
