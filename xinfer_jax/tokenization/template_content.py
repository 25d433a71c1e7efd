"""The parsers of a field's content that a `response_template` names, and its transforms.

Source: transformers 5.24, utils/chat_parsing. They raise one of `NO_VALUE` for another text.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..tool_calls.json_values import json_text, parse_json
from ..tool_calls.parameter_types import Parameters
from ..tool_calls.tagged_call import value_json

_UNQUOTED_KEY = re.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):')
_MANY_SPACES = re.compile(r"\s{200}")
_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
NO_VALUE = (
    ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError
)  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None}


def _text(text: str, arguments: Mapping[str, Any]) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    strings: list[str] = []
    working = text
    for start, end in arguments.get("string_delims", []):

        def taken(found: re.Match[str]) -> str:
            strings.append(json_text(found[1]))
            return f'"\0{len(strings) - 1}"'

        working = re.sub(f"{re.escape(start)}(.*?){re.escape(end)}", taken, working, flags=re.DOTALL)
    if arguments.get("unquoted_keys"):
        working = _UNQUOTED_KEY.sub(lambda m: f'{m[1]}"{m[2]}"{m[3]}:' if m[2] else m[0], working)
    working = re.sub('"\0([0-9]+)"', lambda found: strings[int(found[1])], working)
    try:
        return parse_json(working)
    except ValueError:
        if not arguments.get("allow_non_json"):
            raise
        return text.strip()


def _xml(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if _MANY_SPACES.search(text):  # in which a tag's pattern would search long
        raise ValueError("too many spaces")
    found: dict[str, list[Any]] = {}
    for match in re.finditer(arguments["tag_pattern"], text, re.DOTALL):
        value = _value(match.groupdict().get("value") or "", arguments)
        found.setdefault(match["key"], []).append(value)
    merges = arguments.get("merge_duplicates")
    return {key: values if merges and len(values) > 1 else values[-1] for key, values in found.items()}


def _lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    pairs = (
        line.partition(arguments.get("kv_sep", ":")) for line in text.split(arguments.get("line_sep", "\n"))
    )
    return {key.strip(): _value(value.strip(), arguments) for key, mark, value in pairs if mark}


def _value(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else PARSERS[parser.get("name", "text")](text, parser.get("args", {}))


def _python_calls(text: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("not a list of calls")
    return [_python_call(node) for node in tree.elts]


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError("not a call with named arguments")
    named = {str(one.arg): ast.literal_eval(_JSONWords().visit(one.value)) for one in node.keywords}
    return dict(name=ast.unparse(node.func), arguments=named)


class _JSONWords(ast.NodeTransformer):
    """Replaces true, false and null by Python's values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, _: int(text),
    "float": lambda text, _: float(text),
    "bool": lambda text, _: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
    "python-call-list": _python_calls,
}


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Returns a transform with the values of the scope in its places, like {content.name}."""
    if isinstance(transform, Mapping):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    place = _PLACE.fullmatch(transform) if isinstance(transform, str) else None
    if place is None:
        return transform
    value: Any = scope
    for key in place[1].split("."):
        value = value[key]
    return value


def typed_arguments(arguments: Any, parameters: Parameters) -> dict[str, Any]:
    """Returns the arguments of a call as an object. A text is read as JSON if the schema's types say so."""
    if isinstance(arguments, str) and arguments:
        arguments = parse_json(arguments)
    arguments = arguments or {}
    if not isinstance(arguments, dict):
        raise TypeError("arguments are no object")
    for key, value in arguments.items():
        types = parameters.types(key) if key in (parameters.described or {}) else None
        if isinstance(value, str) and types is not None and types != {"string"}:
            arguments[key] = parse_json(value_json(value, types))
    return arguments
