"""Parses the fields that constrain an answer: `response_format`, and vLLM's `structured_outputs` and
`guided_*`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import format_value
from ..grammar.grammars import Grammar, choice, json_object, json_schema, lark, regex
from .fields import BodyError, Fields, errors_of

_MAKERS: dict[str, Callable[..., Grammar]] = dict(
    json=lambda schema, strict=False: json_schema(schema, strict=strict),
    regex=regex,
    choice=choice,
    grammar=lark,
    json_object=lambda _: json_object(),
)
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}

# The types of `response_format`, and what may stand beside them.
_FORMATS: dict[str, set[str]] = dict(
    text=set(), json_object={"schema"}, json_schema={"json_schema", "schema"}
)
_SPEC = {"name", "description", "schema", "strict"}


def parse_grammar(fields: Fields, default: Any) -> Any:
    """Returns the grammar that a body asks for, or the default if it asks for none."""
    found: dict[str, Grammar | None] = {}
    for field, name in _GUIDED.items():
        if field in fields.values:
            found[field] = _make(field, name, fields.values[field])
    if outputs := fields.mapping("structured_outputs"):
        found["structured_outputs"] = _structured_outputs(outputs)
    if "response_format" in fields.values:
        found["response_format"] = _response_format(fields.mapping("response_format"))
    asked = [field for field, grammar in found.items() if grammar is not None]
    if len(asked) > 1:
        raise BodyError(asked[0], f"{' and '.join(asked)} both constrain the answer: leave out all but one")
    if "response_format" in found and not asked:  # text
        return None
    return found[asked[0]] if asked else default


def grammar_field(body: Mapping[str, Any]) -> str:
    """Returns the field of a body that its grammar is from."""
    names = *_GUIDED, "structured_outputs", "response_format", "tools"
    return next((name for name in names if body.get(name) is not None), "grammar")


def _make(field: str, name: str, value: Any, **how: Any) -> Grammar:
    with errors_of(field, f"{field}: "):
        return _MAKERS[name](value, **how)


def _structured_outputs(outputs: Mapping[str, Any]) -> Grammar | None:
    field = "structured_outputs"
    given = {name: value for name, value in outputs.items() if value not in (None, False)}
    if others := given.keys() - _MAKERS.keys() - {"disable_any_whitespace"}:
        raise BodyError(field, f"{field}: {min(others)} is not served here: leave it out")
    names = [name for name in _MAKERS if name in given]
    if len(names) > 1:
        raise BodyError(field, f"{field} has {' and '.join(names)}: give one of them")
    return _make(field, names[0], given[names[0]]) if names else None


def _response_format(value: Mapping[str, Any]) -> Grammar | None:
    """Returns the grammar of OpenAI's forms, and of llama.cpp's forms, which have the schema next to the
    type.
    """
    field = "response_format"
    given = {name: one for name, one in value.items() if one is not None}
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in _FORMATS:
        said = f"type must be {', '.join(_FORMATS)}, got {format_value(kind)}"
        raise BodyError(field, f"{field}: {said}: regex and grammar are in structured_outputs")
    if others := sorted(given.keys() - _FORMATS[kind]):
        raise BodyError(field, f"{field}: {format_value(others[0])} does not go with {kind}: leave it out")
    if len(given) > 1:
        raise BodyError(field, f"{field} has {' and '.join(given)}: give one of them")
    if kind != "json_schema" and not given:
        return json_object() if kind == "json_object" else None
    spec = given.get("json_schema", given)
    if not isinstance(spec, Mapping) or "schema" not in spec:
        raise BodyError(field, f"{field}: json_schema must be an object with name and schema")
    if others := sorted(spec.keys() - _SPEC):
        raise BodyError(
            field, f"{field}: {format_value(others[0])} is not known in json_schema: leave it out"
        )
    return _make(field, "json", spec["schema"], strict=spec.get("strict") is True)
