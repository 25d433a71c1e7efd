"""`XMLCallParser`: a call as Qwen3-Coder writes it, <function=name> <parameter=name> value </parameter> … .

The values have no types in this form: the schema of the parameters tells them. Models leave out </parameter>
at times: then the next parameter ends a value, or the end of the call.
"""

import re
from contextlib import suppress

from .call_parser import CallParser, length_of_partial_mark
from .gemma_call import parse_loosely
from .json_values import json_text, parse_json, type_names
from .parameter_types import Functions, Parameters

CALL_END = "</tool_call>"
FUNCTION_START = "<function="
_VALUE_END = "</parameter>"
_FUNCTION = re.compile(r"<function=([^<>\s]{1,512})>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,512})>")
_FUNCTION_END = "</function>"
_END_OF_VALUE = re.compile(
    rf"\n?{_VALUE_END}|{CALL_END}|\n?(?=<parameter=(?P<key>[^<>\s]{{1,512}})>)"
    rf"|\n?(?={_FUNCTION_END}\s{{0,64}}(?:{CALL_END}|<tool_call>|{FUNCTION_START}))"
)
# What may become such an end, at the end of a text.
_PARTIAL_END = re.compile(
    rf"\n?(?:<parameter=[^<>\s]{{0,512}}|{_FUNCTION_END}\s{{0,64}}(?:<[a-z_/]{{0,12}})?)\Z"
)
_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them


class XMLCallParser(CallParser):
    """Parses one call in this form."""

    def __init__(self, functions: Functions):
        super().__init__()
        self._functions = functions
        self._parameters = Parameters({})  # of the function
        self._keys: set[str] = set()
        self._types: set[str] | None = None  # of the value; None: not known
        self._value: str | None = None  # of a value that is no text, until it ends
        self._step = self._push_function
        self._verbatim = self._push_first_of_value, self._push_value

    def _push_function(self, text: str) -> tuple[int, str]:
        used, name = self._match(text, "<function=", _FUNCTION)
        if name is not None:
            self.failed = name not in self._functions
            if not self.failed:
                self.name = name
                self._parameters = self._functions.parameters(name)
            self._step = self._push_parameter
        return used, "{" if self.name else ""

    def _push_parameter(self, text: str) -> tuple[int, str]:
        if text.startswith(_FUNCTION_END):
            self.ended = True
            return len(_FUNCTION_END), "}"
        if _FUNCTION_END.startswith(text):
            return 0, ""
        used, key = self._match(text, "<parameter=", _PARAMETER)
        if key is None:
            return used, ""
        self.failed = key in self._keys
        self._keys.add(key)
        self._types = self._parameters.types(key)
        self._step = self._push_first_of_value
        separator = ", " if len(self._keys) > 1 else ""
        return used, f"{separator}{json_text(key)}: "

    def _may_have(self, key: str) -> bool:
        """Whether a parameter of this name may follow; else its tag is text within a value."""
        described = self._parameters.described
        return (described is None or key in described) and key not in self._keys

    def _push_first_of_value(self, text: str) -> tuple[int, str]:
        if not text:
            return 0, ""
        self._value = None if self._types == {"string"} else ""
        self._step = self._push_value
        return int(text[0] == "\n"), '"' if self._value is None else ""

    def _push_value(self, text: str) -> tuple[int, str]:
        ends = _END_OF_VALUE.finditer(text)
        end = next((end for end in ends if end["key"] is None or self._may_have(end["key"])), None)
        part = text[: end.start() if end else _undecided(text)]
        if self._value is None:
            piece = json_text(part)[1:-1]
        else:
            self._value += part
            piece = ""
        if end is None:
            return len(part), piece
        if end[0] == CALL_END:
            self.failed = True
            return len(part), ""
        self._step = self._push_parameter
        return end.end(), piece + ('"' if self._value is None else value_json(self._value, self._types))

    def _match(self, text: str, start: str, pattern: re.Pattern[str]) -> tuple[int, str | None]:
        """Matches an opening tag. Returns how far it got, and the name in the tag."""
        if found := pattern.match(text):
            return found.end(), found[1]
        self.failed = not (start.startswith(text) or re.fullmatch(rf"{start}[^<>\s]{{0,512}}", text))
        return 0, None


def _undecided(text: str) -> int:
    """Where the last characters begin that may become the end of a value."""
    if partial := _PARTIAL_END.search(text):
        return partial.start()
    marks = (_VALUE_END, CALL_END, _FUNCTION_END, "<parameter=")
    return len(text) - length_of_partial_mark(text, (*marks, *(f"\n{mark}" for mark in marks)))


def value_json(text: str, types: set[str] | None) -> str:
    """The JSON of a value: the text read as JSON if the types allow that, or read as Python writes it if they
    allow no text. Else it is the text itself.
    """
    found = None
    with suppress(ValueError):
        found = [_PYTHON[text] if text in _PYTHON else parse_json(text)]
    if found is None and types is not None and "string" not in types:
        with suppress(ValueError):
            found = [parse_loosely(text)]
    fits = found is not None and (types is None or types & type_names(found[0]))
    return json_text(found[0] if found and fits else text)
