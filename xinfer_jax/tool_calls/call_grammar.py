"""The common part of the grammars of calls: rules for values that are valid for their schemas.

The text is in llguidance's Lark syntax: a terminal is a regular expression, & and ~ are intersection and
complement, and %json is a JSON Schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value

# What llguidance lets a backslash be followed by in strings and keys: without u each text has one form, so no
# key is another form of a property's name.
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# As templates write JSON. Any other whitespace would let a model add it without end.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The keywords of JSON Schema since Draft 4 that constrain a value. All others are annotations (2020-12, 6.5):
# its own, and those that OpenAPI, zod and pydantic write (nullable, discriminator, x-…).
KEYWORDS = frozenset(
    "$ref $dynamicRef $recursiveRef type enum const format allOf anyOf oneOf not if then else"
    " properties patternProperties additionalProperties unevaluatedProperties propertyNames required"
    " minProperties maxProperties dependencies dependentRequired dependentSchemas"
    " items prefixItems additionalItems unevaluatedItems contains minContains maxContains minItems maxItems"
    " uniqueItems minLength maxLength pattern"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
# `format` asserts nothing by itself (JSON Schema 2020-12, 7.2.1).
_OF_STRINGS = {"type", "format", "pattern", "minLength", "maxLength"}
OF_CONSTANTS = {"type", "format", "enum", "const"}
CALL_START = "<tool_call>"  # the marks of several forms
CALL_END = "</tool_call>"
_MARKS = (r'"<tool_call>\n"', r'"\n</tool_call>"')


def marked_calls(
    rules: list[str], count: int, several: bool, marks: tuple[str, str] = _MARKS, separator: str = r'"\n"'
) -> str:
    """Returns the grammar of answers that are calls between two marks.

    Args:
        rules: the rules of the functions, which are f0, f1, and so on.
        count: the number of functions.
        several: there may be more than one call.
        marks, separator: the expressions around a call and between two calls.
    """
    more = f" ({separator} call)*" if several else ""
    call = f"call: {marks[0]} ({any_function(count)}) {marks[1]}"
    return "\n".join([f"start: /\\n{{0,2}}/ call{more}", call, *rules])  # newlines come after reasoning


def any_function(count: int) -> str:
    """Returns the expression of one of the rules f0, f1, and so on."""
    return " | ".join(f"f{i}" for i in range(count))


def quoted(text: str) -> str:
    """Returns the expression of a text."""
    return json.dumps(text, ensure_ascii=False)


def json_expression(name: str, schema: Mapping[str, Any]) -> str:
    """Returns the end of a rule: the JSON that a schema allows. A comment names the tool, for errors."""
    text = json.dumps({**schema, "x-guidance": ESCAPES | _SEPARATORS}, ensure_ascii=False)
    return f"%json {text} // {name}"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object, without properties that it does not describe."""
    if not KEYWORDS & {*schema} <= OF_OBJECTS:
        return {**schema, "type": "object"}
    return {"additionalProperties": False, **schema, "type": "object"}


def described_properties(
    where: str, schema: Mapping[str, Any], name: re.Pattern[str], lacks: str
) -> dict[str, Any]:
    """Returns the properties that a schema describes or requires. lacks: characters that their names may not
    have.
    """
    check_keywords(where, schema, OF_OBJECTS)
    described: dict[str, Any] = dict(schema.get("properties") or {})
    others = schema.get("additionalProperties") or {}
    found = {key: others for key in schema.get("required") or [] if key not in described} | described
    for key in found:
        if not isinstance(key, str) or not name.fullmatch(key):
            raise InputError(f"{where}: a parameter's name has no {lacks}, got {format_value(key)}")
    return found


def unquoted_string(where: str, schema: Mapping[str, Any], no_end: str) -> str:
    """Returns the expression of the texts that a schema of strings allows, as they stand without quotes.
    no_end: the expression of the texts that have no mark in which a value ends.
    """
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        check_keywords(where, schema, OF_CONSTANTS)
        return " | ".join(quoted(value) for value in values if isinstance(value, str))
    check_keywords(where, schema, _OF_STRINGS)
    length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    parts = [f"/(?s:.{length})/" if {"minLength", "maxLength"} & {*schema} else "/(?s:.*)/", no_end]
    if pattern := schema.get("pattern"):
        parts.append(f"/{_searched(where, pattern)}/")
    return " & ".join(parts)


def _searched(where: str, pattern: Any) -> str:
    """Returns a regular expression of the texts in which a pattern is found."""
    if not isinstance(pattern, str):
        raise InputError(f"{where}: pattern must be a regular expression, got {format_value(pattern)}")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern)
    after = "" if ends else "(?s:.*)"
    body = re.sub(r"(?<!\\)/", r"\/", pattern.removeprefix("^")[: -1 if ends else None])
    return f"{before}({body}){after}"


def check_keywords(where: str, schema: Mapping[str, Any], known: set[str]) -> None:
    """Raises InputError: the schema has a keyword that is not known here."""
    if others := sorted(KEYWORDS & {*schema} - known):
        said = f"{others[0]!r} cannot be required of a call in this model's form"
        raise InputError(f"{where}: {said}: leave it out")
