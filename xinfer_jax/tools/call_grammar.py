"""`call_grammar`: the answers that call a tool, with arguments that are valid for their schema.

The text is in llguidance's Lark syntax: a terminal is a regular expression, & and ~ are intersection and
complement, %json is a JSON Schema.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value
from .harmony import call_rules
from .tool_call_parser import HARMONY, LLAMA3_JSON, QWEN3_CODER
from .xml_call import json_types

# What llguidance lets a backslash be followed by in strings and keys: without u each text has one form, so no
# key is another form of a property's name.
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
# As templates write JSON. Any other whitespace would let a model add it without end.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
# `format` asserts nothing by itself (JSON Schema 2020-12, 7.2.1).
_OF_STRINGS = _NOTES | {"type", "format", "pattern", "minLength", "maxLength"}
_NO_END = r"~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/"  # a text without marks that end a value
_VALUE_END = "\n</parameter>\n"
_KEY = re.compile(r"[^<>\s]{1,512}")


def call_grammar(call_format: str, parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    """The grammar of answers that are one call, or several, and nothing else.

    Properties that a schema of parameters does not describe are left out, though it may allow them.

    Args:
        call_format: of `TOOL_FORMATS`.
        parameters: the schema of each function, one of which each call has.
        several: there may be more than one call. Llama 3 and gpt-oss write one.

    Raises:
        InputError: Qwen3-Coder's form cannot express a keyword of a schema. Whether the others are served is
            known when the grammar is compiled.
    """
    if call_format == HARMONY:
        rules = call_rules({name: f"a{i}" for i, name in enumerate(parameters)})
        rules += [f"a{i}: {_json(name, _closed(parameters[name]))}" for i, name in enumerate(parameters)]
        return "\n".join(rules)
    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        if call_format == QWEN3_CODER:
            rules += _xml_rules(i, name, schema)
        else:
            key = "parameters" if call_format == LLAMA3_JSON else "arguments"
            head = _text(f'{{"name": {json.dumps(name)}, "{key}": ')
            rules += [f"f{i}: {head} a{i} {_text('}')}", f"a{i}: {_json(name, _closed(schema))}"]
    function = " | ".join(f"f{i}" for i in range(len(parameters)))
    if call_format == LLAMA3_JSON:
        return "\n".join([f"start: {function}", *rules])
    more = ' ("\\n" call)*' if several else ""
    call = f'call: "<tool_call>\\n" ({function}) "\\n</tool_call>"'
    return "\n".join([f"start: /\\n{{0,2}}/ call{more}", call, *rules])  # newlines come after reasoning


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(name: str, schema: Mapping[str, Any]) -> str:
    """The end of a rule; the name of the tool is in a comment, for errors."""
    text = json.dumps({**schema, "x-guidance": ESCAPES | _SEPARATORS}, ensure_ascii=False)
    return f"%json {text} // {name}"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object, without properties that it does not describe."""
    if not {*schema} <= _OF_OBJECTS:
        return {**schema, "type": "object"}
    return {"additionalProperties": False, **schema, "type": "object"}


def _xml_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a function in Qwen3-Coder's form; i: its number."""
    where = f"tool {name!r}"
    _check_keywords(where, schema, _OF_OBJECTS)
    required = schema.get("required") or []
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    properties = {key: {} for key in required if key not in properties} | properties
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    rules = []
    for j, (key, value) in enumerate(properties.items()):
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise InputError(f"{where}: a parameter's name has no spaces, < or >, got {format_value(key)}")
        parts.append(f"p{i}_{j}" + ("" if key in required else "?"))
        start = _text(f"<parameter={key}>\n")
        if json_types(value) == {"string"}:
            rules.append(f"p{i}_{j}: {start} V{i}_{j}")
            rules.append(f"V{i}_{j}: ({_string(f'{where}, parameter {key!r}', value)}) {_text(_VALUE_END)}")
        else:
            of_value = {**value, **definitions} if isinstance(value, Mapping) else {}
            rules.append(f"p{i}_{j}: {start} v{i}_{j} {_text(_VALUE_END)}")
            rules.append(f"v{i}_{j}: {_json(name, of_value)}")
    head = _text(f"<function={name}>\n")
    return [f"f{i}: {' '.join([head, *parts, _text('</function>')])}", *rules]


def _string(where: str, schema: Mapping[str, Any]) -> str:
    """The texts that a schema of strings allows, as they stand without quotes."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        _check_keywords(where, schema, _NOTES | {"type", "format", "enum", "const"})
        return " | ".join(_text(value) for value in values if isinstance(value, str))
    _check_keywords(where, schema, _OF_STRINGS)
    length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    parts = [f"/(?s:.{length})/" if {"minLength", "maxLength"} & {*schema} else "/(?s:.*)/", _NO_END]
    if pattern := schema.get("pattern"):
        parts.append(f"/{_searched(where, pattern)}/")
    return " & ".join(parts)


def _searched(where: str, pattern: Any) -> str:
    """A regular expression of the texts in which a pattern is found."""
    if not isinstance(pattern, str):
        raise InputError(f"{where}: pattern must be a regular expression, got {format_value(pattern)}")
    before = "" if pattern.startswith("^") else "(?s:.*)"
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern)
    after = "" if ends else "(?s:.*)"
    body = re.sub(r"(?<!\\)/", r"\/", pattern.removeprefix("^")[: -1 if ends else None])
    return f"{before}({body}){after}"


def _check_keywords(where: str, schema: Mapping[str, Any], known: set[str]) -> None:
    if others := sorted({*schema} - known):
        raise InputError(
            f"{where}: {others[0]!r} cannot be required of a call in this model's form: leave it out"
        )
