"""`call_grammar`: the answers that call a tool, with arguments that are valid for their schema.

The text is in llguidance's Lark syntax: a terminal is a regular expression, & and ~ are intersection and
complement, %json is a JSON Schema.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, format_value
from .call_parser import GEMMA_END, GEMMA_QUOTE, GEMMA_START
from .harmony import call_rules
from .parameter_types import Parameters
from .tool_call_parser import GEMMA4, HARMONY, LLAMA3_JSON, QWEN3_CODER

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
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
# `format` asserts nothing by itself (JSON Schema 2020-12, 7.2.1).
_OF_STRINGS = {"type", "format", "pattern", "minLength", "maxLength"}
_OF_CONSTANTS = {"type", "format", "enum", "const"}
_NO_END = r"~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/"  # a text without marks that end a value
_NO_QUOTE = r'~/(?s:.*)<\|"\|>(?s:.*)/'
_VALUE_END = "\n</parameter>\n"
_KEYWORDS = dict(  # of each type, beside those of all
    string=("format", "pattern", "minLength", "maxLength"),
    array=("items", "minItems", "maxItems"),
    object=("properties", "required", "additionalProperties"),
    integer=("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    number=("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_GEMMA_KEY = re.compile(r"[^\s:{}\[\],<\"]{1,512}")
_KEY = re.compile(r"[^<>\s]{1,512}")


def call_grammar(call_format: str, parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    """The grammar of answers that are one call, or several, and nothing else.

    Properties that a schema of parameters does not describe are left out, though it may allow them. Llama 3
    and gpt-oss write one call.

    Args:
        call_format: of `TOOL_FORMATS`.
        parameters: the schema of each function.
        several: there may be more than one call.

    Raises:
        InputError: Qwen3-Coder's or Gemma 4's form cannot express a keyword of a schema. Whether the others
            are served is known when the grammar is compiled.
    """
    if call_format == HARMONY:
        rules = call_rules({name: f"a{i}" for i, name in enumerate(parameters)})
        rules += [f"a{i}: {_json(name, _closed(parameters[name]))}" for i, name in enumerate(parameters)]
        return "\n".join(rules)
    if call_format == GEMMA4:
        return _gemma_grammar(parameters, several)
    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        if call_format == QWEN3_CODER:
            rules += _xml_rules(i, name, schema)
        else:
            key = "parameters" if call_format == LLAMA3_JSON else "arguments"
            # Terminals as those of JSON, which an answer may be instead: llguidance takes the longest.
            head = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{key}"', ": ")
            rules += [
                f"f{i}: {' '.join(map(_text, head))} a{i} {_text('}')}",
                f"a{i}: {_json(name, _closed(schema))}",
            ]
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
    if not KEYWORDS & {*schema} <= _OF_OBJECTS:
        return {**schema, "type": "object"}
    return {"additionalProperties": False, **schema, "type": "object"}


def _xml_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """The rules of a function in Qwen3-Coder's form; i: its number."""
    where = f"tool {name!r}"
    required = schema.get("required") or []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    described = Parameters(schema)
    parts = []
    rules = []
    for j, (key, value) in enumerate(_properties(where, schema, _KEY, "spaces, < or >").items()):
        parts.append(f"p{i}_{j}" + ("" if key in required else "?"))
        start = _text(f"<parameter={key}>\n")
        if described.json_types(value) == {"string"}:
            value = described.merged(value)
            rules.append(f"p{i}_{j}: {start} V{i}_{j}")
            rules.append(f"V{i}_{j}: ({_string(f'{where}, parameter {key!r}', value)}) {_text(_VALUE_END)}")
        else:
            of_value = {**value, **definitions} if isinstance(value, Mapping) else {}
            rules.append(f"p{i}_{j}: {start} v{i}_{j} {_text(_VALUE_END)}")
            rules.append(f"v{i}_{j}: {_json(name, of_value)}")
    head = _text(f"<function={name}>\n")
    return [f"f{i}: {' '.join([head, *parts, _text('</function>')])}", *rules]


def _properties(where: str, schema: Mapping[str, Any], name: re.Pattern[str], lacks: str) -> dict[str, Any]:
    """The properties that a schema describes or requires. lacks: what their names may not have."""
    _check_keywords(where, schema, _OF_OBJECTS)
    described: dict[str, Any] = dict(schema.get("properties") or {})
    others = schema.get("additionalProperties") or {}
    found = {key: others for key in schema.get("required") or [] if key not in described} | described
    for key in found:
        if not isinstance(key, str) or not name.fullmatch(key):
            raise InputError(f"{where}: a parameter's name has no {lacks}, got {format_value(key)}")
    return found


def _string(where: str, schema: Mapping[str, Any], no_end: str = _NO_END) -> str:
    """The texts that a schema of strings allows, as they stand without quotes. no_end: what they lack."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        _check_keywords(where, schema, _OF_CONSTANTS)
        return " | ".join(_text(value) for value in values if isinstance(value, str))
    _check_keywords(where, schema, _OF_STRINGS)
    length = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    parts = [f"/(?s:.{length})/" if {"minLength", "maxLength"} & {*schema} else "/(?s:.*)/", no_end]
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
    if others := sorted(KEYWORDS & {*schema} - known):
        said = f"{others[0]!r} cannot be required of a call in this model's form"
        raise InputError(f"{where}: {said}: leave it out")


def _gemma_grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    functions = []
    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        values = _GemmaValues(name, f"v{i}_", schema)
        try:
            arguments = values.object(_closed(schema))
        except RecursionError as error:
            raise InputError(f"tool {name!r}: its schema is nested too deeply: flatten it") from error
        functions.append(f"{_text(f'call:{name}')} {arguments}")
        rules += values.rules
    call = f"call: {GEMMA_START} ({' | '.join(functions)}) {GEMMA_END}"
    return "\n".join([f"start: call{'+' if several else ''}", call, *rules, *_GEMMA_ANY])


_GEMMA_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of a property that no schema describes
# Any value, for schemas that say nothing.
_GEMMA_ANY = (
    f"any: {GEMMA_QUOTE} ANY_TEXT? {GEMMA_QUOTE} | any_scalar | any_list | any_object",
    f"ANY_TEXT: /(?s:.+)/ & {_NO_QUOTE}",
    'any_scalar: %json {"type": ["number", "boolean", "null"]}',
    'any_list: "[" (any ("," any)*)? "]"',
    'any_object: "{" (any_member ("," any_member)*)? "}"',
    f'any_member: {_GEMMA_NAME} ":" any',
)


@dataclasses.dataclass
class _GemmaValues:
    """The rules of values as Gemma 4 writes them: keys without quotes, texts between marks, no spaces."""

    _name: str  # of the function
    _prefix: str  # of the rules' names
    _root: Mapping[str, Any]  # has the definitions
    rules: list[str] = dataclasses.field(default_factory=list)  # that the expressions need
    _references: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def _where(self) -> str:
        return f"tool {self._name!r}"

    def _rule(self, text: str, is_terminal: bool = False) -> str:
        name = f"{self._prefix}{len(self.rules)}"
        name = name.upper() if is_terminal else name
        self.rules.append(f"{name}: {text}")
        return name

    def value(self, schema: Any) -> str:
        """The expression of the values that a schema allows."""
        if schema is True or isinstance(schema, Mapping) and not KEYWORDS & {*schema}:
            return "any"
        if not isinstance(schema, Mapping):
            raise InputError(f"{self._where}: a schema must be an object, got {format_value(schema)}")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "enum" in schema or "const" in schema:
            _check_keywords(self._where, schema, _OF_CONSTANTS)
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return f"({' | '.join(map(self._constant, values))})"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                _check_keywords(self._where, schema, {key})
                return f"({' | '.join(map(self.value, schema[key]))})"
        types = schema.get("type", "object" if "properties" in schema else None)
        types = [types] if isinstance(types, str) else types or [None]
        return f"({' | '.join(self._typed(kind, schema, types) for kind in types)})"

    def _reference(self, path: Any) -> str:
        _, _, rest = str(path).partition("#/")
        place, _, name = rest.partition("/")
        definitions = self._root.get(place)
        known = definitions if place in ("$defs", "definitions") and isinstance(definitions, Mapping) else {}
        if name not in known:
            raise InputError(f"{self._where}: $ref {format_value(path)} is not one of its $defs: correct it")
        if path not in self._references:
            self._references[path] = f"{self._prefix}d{len(self._references)}"
            self.rules.append(f"{self._references[path]}: {self.value(known[name])}")
        return self._references[path]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{GEMMA_QUOTE} {_text(value) if value else ''} {GEMMA_QUOTE}"
        if isinstance(value, dict | list):
            said = f"the constant {format_value(value)} cannot be required of a call in this model's form"
            raise InputError(f"{self._where}: {said}: leave it out")
        return _text(json.dumps(value))

    def _typed(self, kind: Any, schema: Mapping[str, Any], types: Sequence[Any]) -> str:
        own = dict(schema)
        if len(types) > 1:
            own = {key: schema[key] for key in schema if key in _KEYWORDS.get(kind, ())}
        if kind == "string":
            text = self._rule(f"({_string(self._where, {**own, 'type': kind}, _NO_QUOTE)}) & /(?s:.+)/", True)
            may_be_empty = not own.get("minLength") and "pattern" not in own
            return f"{GEMMA_QUOTE} {text}{'?' if may_be_empty else ''} {GEMMA_QUOTE}"
        if kind == "array":
            return self._array(own)
        if kind == "object":
            return self.object(own) if "properties" in own else self._map(own)
        if kind not in ("integer", "number", "boolean", "null"):
            said = f"type {format_value(kind)} is not one of JSON Schema"
            raise InputError(f"{self._where}: {said}: correct it")
        return self._rule(_json(self._name, {**own, "type": kind}))

    def _array(self, schema: Mapping[str, Any]) -> str:
        _check_keywords(self._where, schema, {"type", *_KEYWORDS["array"]})
        item = self.value(schema.get("items", True))
        least = int(schema.get("minItems", 0))
        most = schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def _map(self, schema: Mapping[str, Any]) -> str:
        """The expression of an object that describes no property: all its values are of one schema."""
        _check_keywords(self._where, schema, _OF_OBJECTS)
        if schema.get("required"):
            return self.object(schema)
        values = schema.get("additionalProperties", True)
        if values is False:
            return '"{" "}"'
        if (value := self.value(values)) == "any":
            return "any_object"
        member = self._rule(f'{_GEMMA_NAME} ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def object(self, schema: Mapping[str, Any]) -> str:
        """The expression of an object: the properties that a schema describes, in its order."""
        lacks = "spaces, quotes, commas, colons or brackets"
        properties = _properties(self._where, schema, _GEMMA_KEY, lacks)
        required = schema.get("required") or []
        first = ""  # the rule of the members from here on, where none precedes them
        after = ""  # where one does
        for key, value in reversed(properties.items()):
            member = self._rule(f"{_text(f'{key}:')} {self.value(value)}")
            without = ["", ""] if key in required else [f" | {first}", f" | {after}"]
            first = self._rule(f"{member} {after}{without[0]}")
            after = self._rule(f'"," {member} {after}{without[1]}')
        return f'"{{" {first} "}}"'
