"""Schemas and regular expressions made at random, for tests of grammars."""

import random
from typing import Any

_NAMES = "name age größe 名前 tags ok items 😀".split() + ["a b", 'quote"d', "back\\slash", "t\tb"]
_PATTERNS = (r"^[a-z]{1,5}$", r"^\d{2}-\d{2}$", r"^[A-F0-9]{4}$", r"^(ab|cd){1,3}$", r"^x?y{2}$")
# On these edges answers become invalid: digits of bounds, classes of patterns, large constants.
_BOUNDS = (
    -(2**63), -1e15, -99.99, -3, -1, -0.5, -1e-7, 0, 1e-7, 0.1, 0.3333333333333333, 0.5, 0.75,
    0.9999999999999999, 1, 1.1, 2, 7, 10, 12.25, 99, 100.5, 12345.678, 10**15 + 1, 2**53, 2**53 + 1,
    2**63 - 1, 2**64,
)  # fmt: skip
_HARD_PATTERNS = (
    r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]{1,9}$', r'^[^"\n]+$', r"^[\x00-!#-~]*$", r"^[\x00-\x1f]+$",
    r"^\S+$", r"^[^+--/]$", r"^[a&&b]{2}$", r"^[[a]{2}$", r"^[^a-y\s]{3}$", r'^(a|[^"])*$', r"\d{2}",
    "^a|b$", r"[~~\]^-]", r"^.{2}$", r"^[\w.-]+@\w+\.\w+$",
)  # fmt: skip
_CONSTS = (
    2**53 + 1, 2**60, -(2**53) - 1, 2**64 + 1, 0.1, 1.5, -2.25, 0.1234567890123456789, 1e-7, 1e30, 1.0, -0.0,
    "a\x01b", 'quote"d', "é", "", [1, [0.5]], {"a": 1, "b": [2**53 + 3]}, None, False,
)  # fmt: skip


def schemas(count: int, seed: int = 0, hard: bool = False) -> list[dict[str, Any]]:
    """Returns random schemas: enums, nesting, $ref, anyOf, patterns, bounds, Unicode. Every string, number
    and array is bounded, except in `hard` schemas, which have open objects and edges; some allow nothing.
    """
    draw = random.Random(seed)
    if hard:
        return [_value(draw, 2, hard, with_refs=False) for _ in range(count)]
    return [_object(draw, 2, hard, with_refs=True) for _ in range(count)]


def _object(draw: random.Random, depth: int, hard: bool, with_refs: bool = False) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    schema: dict[str, Any] = dict(
        type="object",
        properties={name: _value(draw, depth - 1, hard, with_refs) for name in names},
        required=[name for name in names if draw.random() < (0.4 if hard else 0.8)],
        additionalProperties=False,
    )
    if hard:
        schema["additionalProperties"] = draw.choice([True, False, {"type": "integer"}])
        if draw.random() < 0.1:
            schema["minProperties"] = draw.randint(0, 3)
        if draw.random() < 0.06:
            schema["patternProperties"] = {draw.choice(_HARD_PATTERNS): {"type": "integer"}}
    if with_refs:
        schema["$defs"] = {"point": _object(draw, 1, hard)}
    return schema


def _value(draw: random.Random, depth: int, hard: bool, with_refs: bool) -> Any:
    least = draw.randint(-50, 50)
    kinds: list[Any] = [
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 8)},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": draw.randint(2, 99)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "blau", "緑", 3, None, True]},
        {"const": draw.choice(["fixed", 7, "ü"])},
    ]
    if hard:
        kinds = [_number(draw), _number(draw), {"const": draw.choice(_CONSTS)}]
        kinds.append({"type": "string", "pattern": draw.choice(_HARD_PATTERNS)})
    if depth > 0:
        inner = _value(draw, depth - 1, hard, with_refs)
        few = draw.randint(0, 1)
        kinds += [
            {"type": "array", "items": inner, "minItems": few, "maxItems": few + draw.randint(0, 2)},
            {"anyOf": [inner, {"type": "boolean"}, {"type": "null"}]},
            _object(draw, depth, hard),
        ]
        if hard:
            both = [_object(draw, 1, hard), _object(draw, 1, hard)]
            kinds += [{"allOf": [inner, _number(draw)]}, {"allOf": both}, {"oneOf": both}]
        if with_refs:
            kinds.append({"$ref": "#/$defs/point"})
    return draw.choice(kinds)


def _number(draw: random.Random) -> dict[str, Any]:
    """Returns a schema of a number between two bounds, half of them narrow."""
    low, high = sorted(draw.choices(_BOUNDS, k=2))
    if draw.random() < 0.5:
        high = draw.choice([low + 0.5, low + 0.1, low + 1, low + 1e-6])
    schema: dict[str, Any] = {"type": draw.choice(["number", "number", "integer", ["number", "null"]])}
    if draw.random() < 0.8:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.8:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = high
    if draw.random() < 0.2:
        schema["multipleOf"] = draw.choice([0.5, 0.1, 0.25, 3, 7, 1])
    return schema


def regexes(count: int, seed: int = 0) -> list[str]:
    """Regular expressions of bounded length, each of a few parts."""
    draw = random.Random(seed)
    return ["".join(_part(draw, 2) for _ in range(draw.randint(1, 3))) for _ in range(count)]


def _part(draw: random.Random, depth: int) -> str:
    atoms = [
        "a", "b", "é", "日", "th", r"\d", r"\w", r"\s", "[a-f]", "[^a-y\\s]", "[0-9A-F]", r"[\d_-]", r"\.",
        r"\+", ".", r"\n", r"\x41", "[é-ü]", r"\D", r"[^\W\d]", r"\/", r"\u65e5",
    ]  # fmt: skip
    part = draw.choice(atoms)
    if depth and draw.random() < 0.4:
        parts = ["".join(_part(draw, depth - 1) for _ in range(draw.randint(1, 2))) for _ in range(2)]
        part = f"({draw.choice(('', '?:'))}{'|'.join(parts)})"
    return part + draw.choice(["", "", "", "?", "{2}", "{1,3}", "{0,2}"])
