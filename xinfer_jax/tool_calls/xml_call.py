"""`XMLCallParser`: a call as Qwen3-Coder writes it, <function=name> <parameter=name> value </parameter> … .

The values have no types in this form: the schema of the parameters tells them. Models leave out </parameter>
at times: then the next parameter ends a value, or the end of the call.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from .call_parser import CallParser, length_of_partial_mark

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

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]] | None):
        """parameters: the schema of each function that may be called; None: any, all values are texts."""
        super().__init__()
        self._schemas = parameters
        self._properties: Any = None  # of the function
        self._keys: set[str] = set()
        self._types: set[str] | None = None  # of the value; None: not known
        self._value: str | None = None  # of a value that is no text, until it ends
        self._step = self._push_function
        self._verbatim = self._push_first_of_value, self._push_value

    def _push_function(self, text: str) -> tuple[int, str]:
        used, name = self._match(text, "<function=", _FUNCTION)
        if name is not None:
            self.failed = self._schemas is not None and name not in self._schemas
            self.name = None if self.failed else name
            self._properties = (self._schemas or {}).get(name, {}).get("properties")
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
        is_described = isinstance(self._properties, Mapping) and key in self._properties
        self._types = json_types(self._properties[key]) if is_described else {"string"}
        self._step = self._push_first_of_value
        separator = ", " if len(self._keys) > 1 else ""
        return used, f"{separator}{json.dumps(key, ensure_ascii=False)}: "

    def _may_have(self, key: str) -> bool:
        """Whether a parameter of this name may follow; else its tag is text within a value."""
        is_known = not isinstance(self._properties, Mapping) or key in self._properties
        return is_known and key not in self._keys

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
            piece = json.dumps(part, ensure_ascii=False)[1:-1]
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


def json_types(schema: Any) -> set[str] | None:
    """The names of the JSON types that a schema allows, as far as it lists them; None: it does not."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(types := schema.get("type"), str | list):
        return {types} if isinstance(types, str) else {str(one) for one in types}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return set[str]().union(*map(_type_names, values))
    branches = schema.get("anyOf") or schema.get("oneOf")
    found = [json_types(branch) for branch in branches] if isinstance(branches, list) else []
    if not found or any(types is None for types in found):
        return None
    return set[str]().union(*(types or () for types in found))


def value_json(text: str, types: set[str] | None) -> str:
    """The JSON of a value: what the text is as JSON where the types allow that, else the text."""
    try:
        value = _PYTHON[text] if text in _PYTHON else json.loads(text)
        if types is None or types & _type_names(value):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # no JSON, or NaN, or a number that is too large
        pass
    return json.dumps(text, ensure_ascii=False)


def _type_names(value: Any) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if is_whole else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"object" if isinstance(value, dict) else "array"}
