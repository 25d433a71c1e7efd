"""`TaggedCallParser`: the common part of forms whose arguments stand between tags, for example Qwen3-Coder's
and GLM's.

The values have no types in such a form: the schema of the parameters tells them.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from .call_grammar import described_properties, json_expression, quoted, unquoted_string
from .call_parser import CallParser
from .gemma_call import parse_loosely
from .json_values import json_text, parse_json, type_names
from .parameter_types import Functions, Parameters

_PYTHON = {"True": True, "False": False, "None": None}  # as templates write them
_NAMES = re.compile(r"[^<>\s]{1,512}")  # of parameters, within tags


class TaggedCallParser(CallParser):
    """Parses one call. A subclass has the steps that read tags, and finds the end of a value."""

    def __init__(self, functions: Functions):
        super().__init__()
        self._functions = functions
        self._parameters = Parameters({})  # of the function
        self._keys: set[str] = set()
        self._types: set[str] | None = None  # of the value; None: not known
        self._value: str | None = None  # of a value that is no text, until it ends
        self._verbatim = (self._push_value,)

    def _begin_function(self, name: str) -> str:
        """Notes the name of the function. Returns the beginning of its arguments."""
        self.failed = name not in self._functions
        self._step = self._push_key
        if self.failed:
            return ""
        self.name = name
        self._parameters = self._functions.parameters(name)
        return "{"

    def _push_key(self, text: str) -> tuple[int, str]:
        """Reads the tag before a value, with the name of the parameter, or the end of the call."""
        raise NotImplementedError

    def _begin_parameter(self, key: str) -> str:
        """Notes the name of a parameter. Returns its JSON, with the separator before it."""
        self.failed = key in self._keys
        self._keys.add(key)
        self._types = self._parameters.types(key)
        separator = ", " if len(self._keys) > 1 else ""
        return f"{separator}{json_text(key)}: "

    def _begin_value(self) -> str:
        """Begins the value of the latest parameter. Returns its quote, if it is a text."""
        self._value = None if self._types == {"string"} else ""
        self._step = self._push_value
        return '"' if self._value is None else ""

    def _push_value(self, text: str) -> tuple[int, str]:
        length, end = self._value_end(text)
        part = text[:length]
        if self._value is None:
            piece = json_text(part)[1:-1]
        else:
            self._value += part
            piece = ""
        if end is None:
            return length, piece
        self._step = self._push_key
        return end, piece + ('"' if self._value is None else value_json(self._value, self._types))

    def _value_end(self, text: str) -> tuple[int, int | None]:
        """Returns the index of the end of a value, and the index after the mark that ends it. None: the value
        continues, and the first number says how many characters are known to belong to it.
        """
        raise NotImplementedError


def value_json(text: str, types: set[str] | None) -> str:
    """Returns the JSON of a value: the text read as JSON if the types allow that, or read as Python writes it
    if they allow no text. Else it is the text itself.
    """
    found = None
    with suppress(ValueError):
        found = [_PYTHON[text] if text in _PYTHON else parse_json(text)]
    if found is None and types is not None and "string" not in types:
        with suppress(ValueError):
            found = [parse_loosely(text)]
    fits = found is not None and (types is None or types & type_names(found[0]))
    return json_text(found[0] if found and fits else text)


@dataclasses.dataclass(frozen=True)
class Tags:
    """The tags of a form for its grammar. The expressions are Lark's."""

    function: Callable[[str], str]  # the expression before parameters, from the name of the function
    parameter: Callable[[str], str]  # the expression before a value, from the name of the parameter
    value_end: str  # the text after a value
    function_end: str  # the expression after the parameters
    no_end: str  # the expression of the texts that do not end a value


def tagged_rules(parameters: Mapping[str, Mapping[str, Any]], tags: Tags) -> list[str]:
    """Returns the rules f0, f1, and so on of functions. parameters: the schema of each one's parameters."""
    functions = enumerate(parameters.items())
    return [rule for i, (name, schema) in functions for rule in _function_rules(i, name, schema, tags)]


def _function_rules(i: int, name: str, schema: Mapping[str, Any], tags: Tags) -> list[str]:
    where = f"tool {name!r}"
    required = schema.get("required") or []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    described = Parameters(schema)
    end = quoted(tags.value_end)
    parts = [tags.function(name)]
    rules = []
    for j, (key, value) in enumerate(described_properties(where, schema, _NAMES, "spaces, < or >").items()):
        parts.append(f"p{i}_{j}" + ("" if key in required else "?"))
        start = tags.parameter(key)
        if described.json_types(value) == {"string"}:
            value = described.merged(value)
            text = unquoted_string(f"{where}, parameter {key!r}", value, tags.no_end)
            rules.append(f"p{i}_{j}: {start} V{i}_{j}")
            rules.append(f"V{i}_{j}: ({text}) {end}")
        else:
            of_value = {**value, **definitions} if isinstance(value, Mapping) else {}
            rules.append(f"p{i}_{j}: {start} v{i}_{j} {end}")
            rules.append(f"v{i}_{j}: {json_expression(name, of_value)}")
    return [f"f{i}: {' '.join([*parts, tags.function_end])}", *rules]
