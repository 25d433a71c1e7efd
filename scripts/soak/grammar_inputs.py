"""Schemas and regular expressions made at random, for tests of grammars."""

import random
from typing import Any


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Schemas whose every string, number and array is bounded: enums, nesting, $ref, anyOf, patterns, bounds,
    Unicode.
    """
    draw = random.Random(seed)
    return [_object(draw, depth=2, with_refs=True) for _ in range(count)]


_NAMES = ("name", "age", "größe", "名前", "tags", "ok", "items", "a b", 'quote"d', "back\\slash", "😀")
_PATTERNS = (r"^[a-z]{1,5}$", r"^\d{2}-\d{2}$", r"^[A-F0-9]{4}$", r"^(ab|cd){1,3}$", r"^x?y{2}$")


def _object(draw: random.Random, depth: int, with_refs: bool = False) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    schema: dict[str, Any] = dict(
        type="object",
        properties={name: _value(draw, depth - 1, with_refs) for name in names},
        required=[name for name in names if draw.random() < 0.8],
        additionalProperties=False,
    )
    if with_refs:
        schema["$defs"] = {"point": _object(draw, 1)}
    return schema


def _value(draw: random.Random, depth: int, with_refs: bool) -> Any:
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
    if depth > 0:
        inner = _value(draw, depth - 1, with_refs)
        few = draw.randint(0, 1)
        kinds += [
            {"type": "array", "items": inner, "minItems": few, "maxItems": few + draw.randint(0, 2)},
            {"anyOf": [inner, {"type": "boolean"}, {"type": "null"}]},
            _object(draw, depth),
        ]
        if with_refs:
            kinds.append({"$ref": "#/$defs/point"})
    return draw.choice(kinds)


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


class SchemaInputs:
    """Schemas on whose edges answers become invalid: bounds and their digits, classes of patterns, large
    constants, open and closed objects. Some allow nothing.
    """

    def __init__(self, seed: int):
        self._draw = random.Random(seed)

    def schema(self, depth: int = 3) -> Any:
        """Of objects, arrays and values."""
        kinds = [self._number, self._number, self._string, self._constant, self._object, self._object]
        if depth:
            kinds += [self._object, self._array, self._applied]
        return self._draw.choice(kinds)(depth - 1)

    def _number(self, _: int) -> Any:
        draw = self._draw
        low, high = sorted(draw.choices(_BOUNDS, k=2))
        if draw.random() < 0.5:  # narrow
            high = draw.choice([low + 0.5, low + 0.1, low + 1, low + 1e-6])
        schema: dict[str, Any] = {"type": draw.choice(["number", "number", "integer", ["number", "null"]])}
        if draw.random() < 0.8:
            schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
        if draw.random() < 0.8:
            schema[draw.choice(["maximum", "exclusiveMaximum"])] = high
        if draw.random() < 0.2:
            schema["multipleOf"] = draw.choice([0.5, 0.1, 0.25, 3, 7, 1])
        return schema

    def _string(self, _: int) -> Any:
        draw = self._draw
        schema: dict[str, Any] = {"type": "string"}
        if draw.random() < 0.8:
            schema["pattern"] = draw.choice(_HARD_PATTERNS + _PATTERNS)
        if draw.random() < 0.4:
            schema["maxLength"] = draw.randint(1, 9)
        return schema

    def _constant(self, _: int) -> Any:
        draw = self._draw
        if draw.random() < 0.5:
            return {"const": draw.choice(_CONSTS)}
        return {"enum": draw.sample(_CONSTS, 3)}

    def _object(self, depth: int) -> Any:
        draw = self._draw
        names = draw.sample(("a", "ab", "name", 'q"d', "größe", "b\\s", "t\tb"), draw.randint(0, 3))
        schema: dict[str, Any] = {"type": "object"}
        if names:
            schema["properties"] = {
                name: self.schema(depth) if depth > 0 else self._number(0) for name in names
            }
            schema["required"] = [name for name in (*names, "other") if draw.random() < 0.4]
        more = draw.random()
        if more < 0.5:
            schema["additionalProperties"] = draw.choice([True, False, {"type": "integer"}, self._string(0)])
        elif more < 0.6:
            schema["patternProperties"] = {draw.choice(_HARD_PATTERNS): self._number(0)}
        if draw.random() < 0.1:
            schema["minProperties"] = draw.randint(0, 3)
        return schema

    def _array(self, depth: int) -> Any:
        few = self._draw.randint(0, 1)
        schema = {"type": "array", "items": self.schema(depth), "minItems": few, "maxItems": few + 1}
        if self._draw.random() < 0.2:
            schema["prefixItems"] = [self._constant(0), self._string(0)]
        return schema

    def _applied(self, depth: int) -> Any:
        draw = self._draw
        one = self.schema(depth)
        return draw.choice([
            {"anyOf": [one, self.schema(depth)]},
            {"allOf": [one, self._number(0)]},
            {"allOf": [self._object(0), self._object(0)]},
            {"oneOf": [self._object(0), self._object(0)]},
            {"$ref": "#/$defs/x", "$defs": {"x": one}} if depth == 2 else {"anyOf": [one, {"type": "null"}]},
        ])  # fmt: skip
