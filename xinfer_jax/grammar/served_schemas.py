r"""`served_schema`: a JSON Schema rewritten so that every text that llguidance's grammar of it allows is
valid.

llguidance 1.9 differs from the standard in these points:

- It reads decimals to 15 digits, and computes with doubles.
- It takes `[…]` of a pattern for Rust's classes. A class that has all control characters allows the quote and
  the backslash even if it lacks them.
- Strings have no `\u` escapes (`ESCAPES` of `call_grammar`), so control characters other than \b \t \n \f \r
  are in no answer. But llguidance leaves them out of texts instead of failing. Here classes lack them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, TypeGuard

from ..errors import GrammarError, format_value
from ..tool_calls.call_grammar import KEYWORDS
from .schema_unions import exclusive_as_any, path_names

# The others are annotations. `$schema` only of the dialects that llguidance knows.
_KEPT = KEYWORDS | {"$defs", "definitions", "$id", "id", "$anchor", "$schema"}
_DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[3-7]/.*|https://json-schema\.org/draft/20(19-09|20-12)/.*"
)
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}  # of names or patterns to schemas
_VALUES = {"const", "enum", "required"}  # have no schemas
_APPLIED = {"allOf", "anyOf", "$ref"}
_MERGED = {
    "properties", "required", "patternProperties", "additionalProperties", "minProperties", "multipleOf"
}  # fmt: skip
_OTHERS = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"
}  # fmt: skip
_EXACT = 2**53  # all integers up to it are doubles
_LARGEST = 2**63 - 1024  # the last double that is a 64-bit integer
_MOST_MULTIPLE = 2**32
_SHORT = 1e-9
# Decimals of 15 digits are doubles of their own; 1e-15 is the least above 0.
_DECIMALS = Context(prec=15, Emin=-1, rounding=ROUND_CEILING)
_UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_HAS_UNWRITABLE = re.compile(f"[{_UNWRITABLE}]")
_IS_CLASS = re.compile(r"\\[dDwWsSpP]")
_PATTERN_PART = re.compile(r"\\(?:[pP](?:\{[^}]{0,64}\}|.)|[xu]\{[^}]{0,64}\}|x..|u....|.)|.", re.DOTALL)


def served_schema(schema: Any, strict: bool) -> Any:
    """Returns a schema all of whose answers are valid for the given one.

    - Bounds of numbers are moved inward to numbers that llguidance keeps: 15 digits, and 64-bit integers.
    - Objects that declare properties, and do not say whether there are others, have no others, so their keys
      do not repeat. A schema with oneOf, or with several schemas for one object, stays open.
    - Keywords that are null, and annotations, are left out: nothing in them is a schema.
    - If the schemas of a `oneOf` exclude each other, by the constants of a property, it becomes `anyOf`.
    - `propertyNames` that lists the names, or has a pattern for them, becomes a schema of each name.

    Args:
        schema: a schema of JSON types.
        strict: True: `uniqueItems` and formats that are not enforced are an error. False: they are left out.

    Raises:
        GrammarError: the schema has constants and bounds that llguidance would change, minProperties if
            repeated keys might count, large multiples of one value, or x-guidance.
    """
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        raise GrammarError("x-guidance in a JSON schema is not served: leave it out")
    try:
        nodes: list[Mapping[str, Any]] = []
        kept = _KEPT | {*_names_in_references(schema)}

        def collect(node: Mapping[str, Any]) -> Mapping[str, Any]:
            nodes.append(exclusive_as_any(_without_annotations(node, kept), root))
            return nodes[-1]

        root = schema
        schema = _changed(schema, collect)
        merges = any(map(_merges, nodes))
        if merges:
            _check_multiples([node["multipleOf"] for node in nodes if _is_number(node.get("multipleOf"))])
        return _changed(schema, lambda node: _node(node, strict, merges))
    except RecursionError as error:
        raise GrammarError("a JSON schema is nested too deeply to be served") from error


def _names_in_references(value: Any) -> Iterator[str]:
    """Yields the names in the paths of all references: a schema may stand under them."""
    if isinstance(value, Mapping):
        if isinstance(path := value.get("$ref"), str):
            yield from path_names(path)
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _names_in_references(one)


def _without_annotations(schema: Mapping[str, Any], kept: frozenset[str]) -> dict[str, Any]:
    node = {key: one for key, one in schema.items() if key in kept and (one is not None or key == "const")}
    if not _DIALECT.fullmatch(str(node.get("$schema", ""))):
        node.pop("$schema", None)
    return node


def _merges(node: Mapping[str, Any]) -> bool:
    """Returns True if several schemas hold for one value of this one, or exactly one of several."""
    applied = _APPLIED & {*node}
    all_of = node.get("allOf")
    if "oneOf" in node or len(applied) > 1 or isinstance(all_of, list) and len(all_of) > 1:
        return True
    return bool(applied and _MERGED & {*node})


def _changed(
    value: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], is_map: bool = False
) -> Any:
    """Returns a schema in which objects that may be schemas are changed, each before the objects in it."""
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: one if key in _VALUES and not is_map else _changed(one, change, key in _MAPS and not is_map)
        for key, one in (value if is_map else change(value)).items()
    }


def _node(schema: Mapping[str, Any], strict: bool, merges: bool) -> dict[str, Any]:
    """Returns a schema rewritten without the schemas in it."""
    node = dict(schema)
    for constant in _constants([node.get("const"), node.get("enum")]):
        _check_exact(constant)
    _drop_unenforced(node, strict)
    _apply_names(node, strict)
    _move_inward(node, "minimum", 1, merges)
    _move_inward(node, "maximum", -1, merges)
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _pattern(node["pattern"])
    if isinstance(patterns := node.get("patternProperties"), Mapping):
        node["patternProperties"] = {_pattern(key): one for key, one in patterns.items()}
    properties = node.get("properties")
    required = node.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    if not merges and properties and isinstance(properties, Mapping) and not _OTHERS & {*node}:
        node["properties"] = {**properties, **{name: {} for name in names if name not in properties}}
        node["additionalProperties"] = False
    least = node.get("minProperties")
    is_open = node.get("additionalProperties") is not False or "patternProperties" in node
    if is_open and _is_number(least) and least > len({*names}) + 1:
        raise GrammarError(
            f"minProperties {least} is not served where keys may repeat: list them in required"
        )
    return node


def _is_number(value: Any) -> TypeGuard[int | float]:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer or isinstance(value, float) and math.isfinite(value)


def _types(node: Mapping[str, Any], default: str) -> list[Any]:
    types = node.get("type", default)
    return types if isinstance(types, list) else [types]


def _constants(value: Any) -> Iterator[Any]:
    """Yields the numbers and texts in a value."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _constants(one)
    elif _is_number(value) or isinstance(value, str):
        yield value


def _check_exact(constant: str | int | float) -> None:
    """Raises GrammarError if llguidance would write something else for a part of a const or an enum."""
    if isinstance(constant, str):
        is_exact = not _HAS_UNWRITABLE.search(constant)
    elif isinstance(constant, int):
        is_exact = abs(constant) <= _LARGEST and int(float(constant)) == constant
    else:
        digits = len(Decimal(repr(constant)).normalize().as_tuple().digits)
        is_exact = constant == 0 or 1e-7 <= abs(constant) <= _EXACT and digits <= _DECIMALS.prec
    if not is_exact:
        raise GrammarError(
            f"{format_value(constant)} of const or enum is not served: give a text without control"
            " characters, an integer up to 2^53, or a number of at most 15 digits from 1e-7 on"
        )


def _drop_unenforced(node: dict[str, Any], strict: bool) -> None:
    unknown = node.get("format") if "string" in _types(node, "string") else None
    for key, is_asked in (
        ("uniqueItems", node.get("uniqueItems") is True),
        ("format", isinstance(unknown, str) and unknown not in _FORMATS),
    ):
        if is_asked and strict:
            raise GrammarError(
                f"{key} {format_value(node[key])} is not enforced: leave it out, or give strict false"
            )
        if is_asked or key == "uniqueItems":
            node.pop(key, None)


def _apply_names(node: dict[str, Any], strict: bool) -> None:
    """Replaces `propertyNames` if it says nothing, or only which names there may be, otherwise llguidance
    rejects it.
    """
    names = node.get("propertyNames")
    names = {} if names is True else names
    if not isinstance(names, Mapping) or "string" not in _types(names, "string"):
        return
    asserted = KEYWORDS & {*names} - {"type", *(() if strict else ("format",))}
    is_alone = not {"properties", "patternProperties", "unevaluatedProperties"} & {*node}
    others = node.get("additionalProperties", {})
    added: dict[str, Any] = {}
    if asserted == {"enum"} and is_alone and isinstance(names["enum"], list):
        added = {"properties": {name: others for name in names["enum"] if isinstance(name, str)}}
    elif asserted == {"pattern"} and is_alone and isinstance(names["pattern"], str):
        added = {"patternProperties": {names["pattern"]: others}}
    elif asserted:
        return
    del node["propertyNames"]
    node |= added | ({"additionalProperties": False} if added else {})


def _move_inward(node: dict[str, Any], name: str, sign: int, merges: bool) -> None:
    """Writes the bounds of one side as llguidance keeps them. sign: 1: of a minimum. -1: of a maximum.

    Values below an exclusive bound must not be rounded to it: they get at most 9 decimals.
    """
    exclusive = f"exclusive{name.capitalize()}"
    integer = "number" not in _types(node, "number")
    limit = node.get(name)
    beyond = node.get(exclusive)
    bounds = [(limit, beyond is True), (beyond, True)]  # true: of Draft 4
    if isinstance(beyond, bool | int | float):
        del node[exclusive]
    found = []
    for value, above in bounds:
        if not _is_number(value):
            continue
        if above and sign * value < 0 and not (integer or merges) and _is_short(value):
            node.pop(name, None)
            node |= {exclusive: value, "multipleOf": node.get("multipleOf", _SHORT)}
        else:
            found.append(_least(sign * value, above, integer))
    if found:
        node[name] = sign * max(found)


def _is_short(value: int | float) -> bool:
    """Returns True if numbers of at most 9 decimals are never rounded to this one."""
    number = Decimal(str(value))
    return abs(number) < 10**6 and number % Decimal(str(_SHORT)) == 0


def _least(limit: int | float, above: bool, integer: bool) -> int | float:
    """Returns the least number from a limit on, or above it, that llguidance keeps: an integer, or of 15
    digits.
    """
    number = Decimal(str(limit))
    if integer:
        least: Any = math.floor(number) + 1 if above else math.ceil(number)
    else:
        least = _DECIMALS.next_plus(number) if above else _DECIMALS.plus(number)
    if least > _LARGEST:
        raise GrammarError(f"a number beyond 64 bits is not served, got the bound {format_value(limit)}")
    least = max(least, -_LARGEST)
    if not integer or abs(least) <= _EXACT:
        return int(least) if least == int(least) else float(least)
    near = float(least)
    return int(near if near >= least else math.nextafter(near, math.inf))


def _check_multiples(multiples: list[int | float]) -> None:
    """Raises GrammarError if llguidance, which has 32 bits, may compute another common multiple."""
    numbers = [Decimal(str(one)) for one in multiples]
    places = max((-one.normalize().as_tuple().exponent for one in numbers), default=0)  # type: ignore[operator]
    whole = [int(one.scaleb(max(0, places))) for one in numbers]
    if len(whole) > 1 and math.lcm(*whole) * max(whole) >= _MOST_MULTIPLE:
        raise GrammarError(
            "multipleOf is not served in several schemas of one value where the numbers are large"
        )


def _pattern(pattern: str) -> str:
    """Returns a pattern in Rust's syntax with the classes of ECMA-262, without characters that no string
    has.
    """
    parts = _PATTERN_PART.findall(pattern)
    found = []
    at = 0
    while at < len(parts):
        part = parts[at]
        at += 1
        if part == "[":
            negated = parts[at : at + 1] == ["^"]
            first = at + negated
            at = next((i for i in range(first + 1, len(parts)) if parts[i] == "]"), len(parts))
            if at == len(parts):
                return pattern  # an unclosed class: llguidance says so
            part = f"[[{'^' * negated}{_members(parts[first:at])}]--[{_UNWRITABLE}]]"
            at += 1
        elif _HAS_UNWRITABLE.match(part) or part[:2] in (r"\p", r"\P", r"\x", r"\u"):
            part = f"[{part}--[{_UNWRITABLE}]]"
        found.append(part)
    return "".join(found)


def _members(parts: list[str]) -> str:
    """Returns the members of a class, in which only ranges have an operator."""
    literal = [rf"\{part}" if part in "[]&~-^" else part for part in parts]
    found = []
    at = 0
    while at < len(parts):
        is_range = at + 2 < len(parts) and parts[at + 1] == "-" and not _IS_CLASS.match(parts[at])
        found.append(f"{literal[at]}-{literal[at + 2]}" if is_range else literal[at])
        at += 3 if is_range else 1
    return "".join(found)
