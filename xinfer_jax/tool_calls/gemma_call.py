"""`GEMMA4`: calls as Gemma 4 writes them, call:name{key:<|"|>text<|"|>,other:[1,true]}.

Keys have no quotes, and texts stand between two marks of their own, without escapes. Models also write texts
and keys as JSON and Python do, and a comma after the last item. Source: Gemma 4's chat template.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, format_value
from .call_grammar import (
    KEYWORDS,
    OF_CONSTANTS,
    OF_OBJECTS,
    check_keywords,
    closed,
    described_properties,
    json_expression,
    quoted,
    unquoted_string,
)
from .call_parser import CallParser, length_of_partial_mark
from .json_values import MAX_DEPTH, json_text, parse_json
from .parameter_types import Functions
from .tool_call_form import FILLER, PROBE, ToolCallForm

_START = "<|tool_call>"
_END = "<tool_call|>"
_QUOTE = '<|"|>'
GEMMA_CHANNEL = "<|channel>"  # followed by its name
GEMMA_CHANNEL_END = "<channel|>"
GEMMA_TOKENS = (_START, _END, _QUOTE, GEMMA_CHANNEL, GEMMA_CHANNEL_END)
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
        if text.startswith(_QUOTE):
            self._step = self._push_text
            return len(_QUOTE), '"'
        if first in _STRINGS:
            found = _STRINGS[first].match(text)
            if found:
                self._step = self._push_separator
            return (found.end(), json_text(_text_of(found[0]))) if found else (0, "")
        if _QUOTE.startswith(text) or not (found := _SCALAR.match(text)):
            return 0, ""
        self.failed = not found[1] or found[2] not in ",]}"
        self._step = self._push_separator
        return len(found[1]), "" if self.failed else _scalar_json(found[1].strip())

    def _push_text(self, text: str) -> tuple[int, str]:
        end = text.find(_QUOTE)
        part = text[: end if end >= 0 else len(text) - length_of_partial_mark(text, [_QUOTE])]
        piece = json_text(part)[1:-1]
        if end < 0:
            return len(part), piece
        self._step = self._push_separator
        return len(part) + len(_QUOTE), f'{piece}"'

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
    """Returns the text of a string in quotes of JSON or Python."""
    body = quoted[1:-1]
    if quoted[0] == "'":
        body = _ESCAPED.sub(lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), body)
    try:
        return str(json.loads(f'"{body}"', strict=False))
    except ValueError:
        return quoted[1:-1]


def _scalar_json(text: str) -> str:
    """Returns the JSON of a value without marks: a number, true, false, null, else a text."""
    word = _WORDS.get(text, text)
    try:
        parse_json(word)
    except ValueError:
        return json_text(text)
    return word


def parse_loosely(text: str) -> Any:
    """Returns the value that a text is as JSON, as a Python literal or in Gemma's form. Raises ValueError:
    none.
    """
    parser = GemmaCallParser(Functions(None))
    call = f"call:f{{v:{text}}}"
    found = parser.push(call)
    if not parser.ended or parser.length < len(call):
        raise ValueError("no value")
    arguments = parse_json(found)
    if len(arguments) > 1:
        raise ValueError("several values")
    return arguments["v"]


_PROPERTY = re.compile(r"[^\s:{}\[\],<\"]{1,512}")
_NO_QUOTE = r'~/(?s:.*)<\|"\|>(?s:.*)/'
_KEYWORDS = dict(  # of each type, beside those of all
    string=("format", "pattern", "minLength", "maxLength"),
    array=("items", "minItems", "maxItems"),
    object=("properties", "required", "additionalProperties"),
    integer=("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    number=("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_ANY_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of a property that no schema describes
# Any value, for schemas that say nothing.
_ANY = (
    f"any: {_QUOTE} ANY_TEXT? {_QUOTE} | any_scalar | any_list | any_object",
    f"ANY_TEXT: /(?s:.+)/ & {_NO_QUOTE}",
    'any_scalar: %json {"type": ["number", "boolean", "null"]}',
    'any_list: "[" (any ("," any)*)? "]"',
    'any_object: "{" (any_member ("," any_member)*)? "}"',
    f'any_member: {_ANY_NAME} ":" any',
)


def _grammar(parameters: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    functions = []
    rules = []
    for i, (name, schema) in enumerate(parameters.items()):
        values = _GemmaValues(name, f"v{i}_", schema)
        try:
            arguments = values.object(closed(schema))
        except RecursionError as error:
            raise InputError(f"tool {name!r}: its schema is nested too deeply: flatten it") from error
        functions.append(f"{quoted(f'call:{name}')} {arguments}")
        rules += values.rules
    call = f"call: {_START} ({' | '.join(functions)}) {_END}"
    return "\n".join([f"start: call{'+' if several else ''}", call, *rules, *_ANY])


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
        """Returns the expression of the values that a schema allows."""
        if schema is True or isinstance(schema, Mapping) and not KEYWORDS & {*schema}:
            return "any"
        if not isinstance(schema, Mapping):
            raise InputError(f"{self._where}: a schema must be an object, got {format_value(schema)}")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "enum" in schema or "const" in schema:
            check_keywords(self._where, schema, OF_CONSTANTS)
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return f"({' | '.join(map(self._constant, values))})"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                check_keywords(self._where, schema, {key})
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
            return f"{_QUOTE} {quoted(value) if value else ''} {_QUOTE}"
        if isinstance(value, dict | list):
            said = f"the constant {format_value(value)} cannot be required of a call in this model's form"
            raise InputError(f"{self._where}: {said}: leave it out")
        return quoted(json.dumps(value))

    def _typed(self, kind: Any, schema: Mapping[str, Any], types: Sequence[Any]) -> str:
        own = dict(schema)
        if len(types) > 1:
            own = {key: schema[key] for key in schema if key in _KEYWORDS.get(kind, ())}
        if kind == "string":
            texts = unquoted_string(self._where, {**own, "type": kind}, _NO_QUOTE)
            text = self._rule(f"({texts}) & /(?s:.+)/", True)
            may_be_empty = not own.get("minLength") and "pattern" not in own
            return f"{_QUOTE} {text}{'?' if may_be_empty else ''} {_QUOTE}"
        if kind == "array":
            return self._array(own)
        if kind == "object":
            return self.object(own) if "properties" in own else self._map(own)
        if kind not in ("integer", "number", "boolean", "null"):
            said = f"type {format_value(kind)} is not one of JSON Schema"
            raise InputError(f"{self._where}: {said}: correct it")
        return self._rule(json_expression(self._name, {**own, "type": kind}))

    def _array(self, schema: Mapping[str, Any]) -> str:
        check_keywords(self._where, schema, {"type", *_KEYWORDS["array"]})
        item = self.value(schema.get("items", True))
        least = int(schema.get("minItems", 0))
        most = schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def _map(self, schema: Mapping[str, Any]) -> str:
        """Returns the expression of an object that describes no property: all its values are of one
        schema.
        """
        check_keywords(self._where, schema, OF_OBJECTS)
        if schema.get("required"):
            return self.object(schema)
        values = schema.get("additionalProperties", True)
        if values is False:
            return '"{" "}"'
        if (value := self.value(values)) == "any":
            return "any_object"
        member = self._rule(f'{_ANY_NAME} ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def object(self, schema: Mapping[str, Any]) -> str:
        """Returns the expression of an object: the properties that a schema describes, in its order."""
        lacks = "spaces, quotes, commas, colons or brackets"
        properties = described_properties(self._where, schema, _PROPERTY, lacks)
        required = schema.get("required") or []
        first = ""  # the rule of the members from here on, where none precedes them
        after = ""  # where one does
        for key, value in reversed(properties.items()):
            member = self._rule(f"{quoted(f'{key}:')} {self.value(value)}")
            without = ["", ""] if key in required else [f" | {first}", f" | {after}"]
            first = self._rule(f"{member} {after}{without[0]}")
            after = self._rule(f'"," {member} {after}{without[1]}')
        return f'"{{" {first} "}}"'


GEMMA4 = ToolCallForm(
    name="gemma4",
    in_template=rf"<\|tool_call>call:{PROBE}\{{",
    parser=GemmaCallParser,
    grammar=_grammar,
    start=_START,
    end=_END,
    filler=FILLER,
    tokens=GEMMA_TOKENS,
)
