"""`JSONCallParser`: a call as Qwen 2.5 and 3 and Llama 3 write it: {"name": …, "arguments": {…}}.

Models also write other forms. They put {"type": "function", "function": {…}} around it, leave arguments out
if there are none, write them as JSON in a text, or write some of them next to the name. They write a brace
too many, and several objects or a list for one call.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .call_grammar import closed, json_expression, quoted
from .call_parser import CallParser
from .json_scanner import JSONObjectScanner
from .json_values import json_text, parse_json
from .parameter_types import Functions

_ARGUMENTS = ("arguments", "parameters")
_OWN = {"name", "function", "id", *_ARGUMENTS}  # fields of a call
# What precedes the arguments in the usual order of the keys. No name is longer than this.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.){0,512}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_CHARACTERS = 4096  # beyond it the call is parsed when it ends, so the time stays linear


class JSONCallParser(CallParser):
    """Parses one call in this form."""

    def __init__(self, functions: Functions, is_marked: bool = True):
        """Makes a parser. is_marked: True: a mark says that this is a call. Without it, an object that has no
        arguments, or fields that are no parameters of the function, may be an answer in JSON.
        """
        super().__init__()
        self._functions = functions
        self._is_marked = is_marked
        self._text = ""
        self._object = JSONObjectScanner()
        self._arguments = JSONObjectScanner()
        self._start = 0  # of the arguments in the text
        self._place: slice | None = None  # of the arguments in the text, once they have ended

    def push(self, text: str) -> str:
        start = self.length
        self._text += text
        may_begin = self.name is None and start < _HEAD_CHARACTERS
        if may_begin and (head := _HEAD.match(self._text, 0, _HEAD_CHARACTERS)):
            with suppress(ValueError):
                self._set_name(json.loads(head[1]))
                start = self._start = head.end()
            if self.failed:
                self.length = start
                return ""
        piece = ""
        if self.name is not None and self._place is None:
            end = start + self._arguments.push(self._text[start:])
            if self._arguments.ended:
                self._place = slice(self._start, end)
                end -= 1  # further arguments may stand next to the object
            piece = self._text[start:end]
        self.length += self._object.push(text)
        self.failed = self._object.failed
        return piece + self._end() if self._object.ended else piece

    def _set_name(self, name: object) -> None:
        is_name = isinstance(name, str) and name.isprintable()
        self.failed = not is_name or name not in self._functions
        self.name = None if self.failed else str(name)

    def _end(self) -> str:
        """Checks the whole object. Returns the rest of the arguments. It is all of them if their key came
        first.
        """
        try:
            call = parse_json(self._text[: self.length])
            return self._end_call(call)
        except ValueError:
            self.failed = True
            return ""

    def _end_call(self, call: dict[str, Any]) -> str:
        beside = [call]
        name = call.get("name", call.get("function"))
        if isinstance(call.get("function"), dict):
            if "name" in call:
                raise ValueError("two functions")
            call = call["function"]
            beside.append(call)
            name = call.get("name")
        if self.name is None:
            self._set_name(name)
        if self.failed or name != self.name:
            raise ValueError("another name")
        arguments = self._arguments_of(call)
        more = self._further_arguments(beside, arguments)
        if self._place is None:
            piece = json_text(arguments | more)
        else:
            if parse_json(self._text[self._place]) != arguments:
                raise ValueError("two objects of arguments")
            separator = ", " if arguments and more else ""
            piece = separator + json_text(more)[1:]
        self.ended = True
        return piece

    def _arguments_of(self, call: dict[str, Any]) -> dict[str, Any]:
        keys = [key for key in _ARGUMENTS if key in call]
        may_lack = not keys and (self._is_marked or self._functions.schemas is not None)
        arguments = None if may_lack else call[keys[0]] if len(keys) == 1 else 0
        if isinstance(arguments, str) and arguments:
            arguments = parse_json(arguments)
        if arguments in (None, "", []):
            return {}
        if not isinstance(arguments, dict):
            raise ValueError("no arguments")
        return arguments

    def _further_arguments(self, objects: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the parameters of the function that stand next to its name, as fields of the call."""
        has_arguments = any(key in one for one in objects for key in _ARGUMENTS)
        own = _OWN if has_arguments else _OWN - {"id"}
        fields = {key: value for one in objects for key, value in one.items() if key not in own}
        if fields.get("type") == "function":
            del fields["type"]
        described = self._functions.parameters(str(self.name)).described or {}
        found = {key: value for key, value in fields.items() if key in described}
        is_in_doubt = not self._is_marked and fields.keys() - {*found, "id", "type"}
        if is_in_doubt or found.keys() & arguments.keys():
            raise ValueError("fields that are no arguments")
        return found


def json_call_rules(parameters: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Returns the rules f0, f1, and so on of functions.

    Args:
        parameters: the schema of each function's parameters.
        key: the key of the arguments in a call.
    """
    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        # Terminals as those of JSON, which an answer may be instead: llguidance takes the longest.
        head = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{key}"', ": ")
        rules += [
            f"f{i}: {' '.join(map(quoted, head))} a{i} {quoted('}')}",
            f"a{i}: {json_expression(name, closed(schema))}",
        ]
    return rules
