"""Grammars that stopped servers, and 200 like them: deep, wide, ambiguous, huge, contradictory.

A grammar is a field of a request's body and its value: ("guided_json", {…}).
"""

import random
from collections.abc import Callable
from typing import Any

Hostile = tuple[str, Any]
AMBIGUOUS = "start: start start | start start start | T\nT: /(?s:.)/"


def _chain(count: int, step: Callable[[dict], Any]) -> Hostile:
    """`$defs` of which each has a reference to the next."""
    defs = {f"d{i}": step({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return "guided_json", {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "string"}}}


def _rules(count: int) -> Hostile:
    return "guided_grammar", "start: r0\n" + "".join(
        f"r{i}: r{i + 1}\n" for i in range(count)
    ) + f'r{count}: "a"'


def _multiples(numbers: list[int]) -> Hostile:
    return "guided_json", {"allOf": [{"type": "integer", "multipleOf": number} for number in numbers]}


def _patterns(count: int, pattern: str) -> Hostile:
    parts = [
        {"type": "string", "pattern": pattern.format(i=i % 7 + 2, c=chr(97 + i % 26))} for i in range(count)
    ]
    return "guided_json", {"allOf": parts}


def _names(count: int, pattern: str = "^q{i}$") -> Hostile:
    properties = {pattern.format(i=i): {"type": "string"} for i in range(count)}
    return "guided_json", {"type": "object", "patternProperties": properties}


def _optional(count: int) -> Hostile:
    return "guided_json", {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(count)},
    }


def _objects(count: int) -> Hostile:
    return "guided_json", {"enum": [{"a": i, "b": str(i)} for i in range(count)]}


def named() -> dict[str, Hostile]:
    """The inputs that reports named."""
    return dict(
        rules=_rules(3000),
        references_any=_chain(1300, lambda ref: {"anyOf": [ref]}),
        references_items=_chain(1500, lambda ref: {"type": "array", "items": ref}),
        references_all=_chain(1500, lambda ref: {"allOf": [ref]}),
        multiple=("guided_json", {"type": "integer", "multipleOf": 9699690}),
        patterns=_patterns(60, "^(.*[a-f]){{{i}}}[^{c}]*$"),
        pattern_names=_names(500),
        multiples=_multiples([2, 3, 5, 7, 11, 13, 17, 19, 23]),
        ambiguous=("guided_grammar", AMBIGUOUS),
        optional=_optional(600),
        objects=_objects(3000),
        declared=(
            "guided_json",
            dict(type="object", properties=dict(ab=dict(type="integer")))
            | dict(patternProperties={"^a": dict(type="string")}, additionalProperties=False),
        ),
    )


def corpus(count: int = 200, seed: int = 0) -> list[Hostile]:
    """So many hostile grammars, each of other sizes."""
    draw = random.Random(seed)
    makers = [_deep, _wide, _ambiguous, _huge, _contradictory]
    return [makers[i % len(makers)](draw) for i in range(count)]


def _deep(draw: random.Random) -> Hostile:
    depth = draw.choice([50, 300, 1000, 3000])
    kind = draw.randrange(7)
    if kind == 0:
        return _rules(depth)
    if kind == 1:
        return _chain(depth, lambda ref: {draw.choice(["anyOf", "allOf", "oneOf"]): [ref]})
    if kind == 2:
        return _chain(depth, lambda ref: dict(type="object", properties=dict(a=ref), required=["a"]))
    if kind == 3:
        return "guided_regex", "(" * depth + "a" + ")*" * depth
    if kind == 4:
        return "guided_grammar", f"start: {'(' * depth}A{')?' * depth}\nA: /a/"
    if kind == 5:
        return "guided_grammar", f"start: A\nA: /{'(' * depth}a{'|b)' * depth}/"
    nested: Any = {"type": "null"}
    for _ in range(min(depth, 90)):
        nested = {draw.choice(["anyOf", "allOf"]): [nested, {"type": "array", "items": nested}]}
        if draw.random() < 0.8:
            nested = {"not": nested} if draw.random() < 0.1 else {"items": nested, "type": "array"}
        if len(str(nested)) > 2**15:
            break
    return "guided_json", nested


def _wide(draw: random.Random) -> Hostile:
    count = draw.choice([100, 600, 2000, 5000])
    kind = draw.randrange(7)
    if kind == 0:
        return _optional(count)
    if kind == 1:
        return _objects(count)
    if kind == 2:
        return _names(count, draw.choice(["^q{i}$", "q{i}", "^(a|b)*{i}"]))
    if kind == 3:
        return "guided_choice", [f"choice {draw.random()}" for _ in range(count)]
    if kind == 4:
        return "guided_json", {"anyOf": [{"type": "array", "items": {"const": i}} for i in range(count)]}
    if kind == 5:
        return "guided_json", {"type": "array", "prefixItems": [{"type": ["string", "null"]}] * count}
    return "guided_grammar", "start: " + " | ".join(f'"x{i}" start' for i in range(count)) + ' | "y"'


def _ambiguous(draw: random.Random) -> Hostile:
    kind = draw.randrange(6)
    times = draw.randint(2, 12)
    if kind == 0:
        forms = " | ".join(" ".join(["start"] * i) for i in range(2, times + 2))
        return "guided_grammar", f"start: {forms} | T\nT: /(?s:.)/"
    if kind == 1:
        return "guided_grammar", f"start: x{times}\nx0: T | T x0\n" + "".join(
            f"x{i + 1}: x{i} | x{i} x{i} | x{i} x{i + 1}\n" for i in range(times)
        ) + "T: /[a-z ]+/"
    if kind == 2:
        return "guided_regex", f"(.*a){{{times * 8}}}.*"
    if kind == 3:
        return "guided_regex", f"(a|b)*a(a|b){{{times * 10}}}"
    if kind == 4:
        return (
            "guided_grammar",
            f"start: (A | B | C)*\nA: /.*{'x?' * times * 30}/\nB: /(.|\\n)*y/\nC: /[^q]*/",
        )
    return "guided_json", {"anyOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(times * 20)]}


def _huge(draw: random.Random) -> Hostile:
    number = draw.choice([1000, 20_000, 10**6, 10**9])
    kind = draw.randrange(8)
    if kind == 0:
        return "guided_json", {"type": "string", "minLength": number, "maxLength": number * 2}
    if kind == 1:
        return "guided_json", {"type": "array", "items": {"type": "integer"}, "minItems": number}
    if kind == 2:
        return "guided_json", {"type": "integer", "multipleOf": number + draw.randrange(1, 999)}
    if kind == 3:
        return "guided_regex", f"[a-z]{{{number}}}(b{{{number}}})?"
    if kind == 4:
        return "guided_grammar", f"start: A~{number}..{number * 2}\nA: /a|b/"
    if kind == 5:
        return "guided_json", {"type": "number", "minimum": 10 ** -(number % 300), "maximum": 1e300}
    if kind == 6:
        return "guided_regex", r"[\w\W&&[^\d]]" * min(number, 3000)
    return "guided_json", {"type": "object", "additionalProperties": {"const": "x" * min(number, 200_000)}}


def _contradictory(draw: random.Random) -> Hostile:
    kind = draw.randrange(7)
    low = draw.randint(2, 40)
    if kind == 0:
        return "guided_json", {"type": "integer", "minimum": low, "maximum": low - 1}
    if kind == 1:
        return _multiples([draw.choice([2, 3, 5, 7, 11, 13, 17, 19, 23, 29]) for _ in range(low)])
    if kind == 2:
        return _patterns(low * 3, draw.choice(["^{c}", "^.{{{i}}}$", "^(.*[a-f]){{{i}}}[^{c}]*$"]))
    if kind == 3:
        return "guided_json", {"allOf": [{"type": "string"}, {"type": "integer"}, {"enum": list(range(low))}]}
    if kind == 4:
        return "guided_grammar", "start: A\nA: " + " & ".join(
            f"/(.*[ab]){{{i}}}.*/" for i in range(low % 9 + 1)
        )
    if kind == 5:
        return "guided_json", {
            "type": "object",
            "required": [f"r{i}" for i in range(low * 20)],
            "maxProperties": 1,
        }
    properties = {f"{'a' * i}": {"type": "integer"} for i in range(1, low)}
    return "guided_json", dict(
        type="object", properties=properties, patternProperties={"^a+$": dict(type="null")}
    )
