"""Grammars that stopped servers, and 200 like them: deep, wide, ambiguous, huge, contradictory.

A grammar is a field of a request's body and its value: ("guided_json", {…}).
"""

import random
from collections.abc import Callable
from typing import Any

Hostile = tuple[str, Any]
AMBIGUOUS = "start: start start | start start start | T\nT: /(?s:.)/"


def _json(**schema: Any) -> Hostile:
    return "guided_json", schema


def _chain(count: int, step: Callable[[dict], Any]) -> Hostile:
    """Returns `$defs` of which each has a reference to the next."""
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
    """Returns the inputs that reports named."""
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
    """Returns `count` hostile grammars, each of other sizes."""
    draw = random.Random(seed)
    return [draw.choice(_kinds(draw))() for _ in range(count)]


def _kinds(draw: random.Random) -> list[Callable[[], Hostile]]:
    """Returns deep, wide, ambiguous, huge and contradictory grammars, of drawn sizes."""
    depth = draw.choice([50, 300, 1000, 3000])
    applied = draw.choice(["anyOf", "allOf", "oneOf"])
    count = draw.choice([100, 600, 2000, 5000])
    name = draw.choice(["^q{i}$", "q{i}", "^(a|b)*{i}"])
    choices = "".join(f'"x{i}" start | ' for i in range(count))
    times = draw.randint(2, 12)
    forms = " | ".join(" ".join(["start"] * i) for i in range(2, times + 2))
    rules = "".join(f"x{i + 1}: x{i} | x{i} x{i} | x{i} x{i + 1}\n" for i in range(times))
    optional = "x?" * times * 30
    number = draw.choice([1000, 20_000, 10**6, 10**9])
    low = draw.randint(2, 40)
    primes = [draw.choice([2, 3, 5, 7, 11, 13, 17, 19, 23, 29]) for _ in range(low)]
    pattern = draw.choice(["^{c}", "^.{{{i}}}$", "^(.*[a-f]){{{i}}}[^{c}]*$"])
    repeats = " & ".join(f"/(.*[ab]){{{i}}}.*/" for i in range(low % 9 + 1))
    properties = {"a" * i: {"type": "integer"} for i in range(1, low)}
    return [
        # Deep.
        lambda: _rules(depth),
        lambda: _chain(depth, lambda ref: {applied: [ref]}),
        lambda: _chain(depth, lambda ref: dict(type="object", properties=dict(a=ref), required=["a"])),
        lambda: ("guided_regex", "(" * depth + "a" + ")*" * depth),
        lambda: ("guided_grammar", f"start: {'(' * depth}A{')?' * depth}\nA: /a/"),
        lambda: ("guided_grammar", f"start: A\nA: /{'(' * depth}a{'|b)' * depth}/"),
        lambda: _nested(draw, depth),
        # Wide.
        lambda: _optional(count),
        lambda: _objects(count),
        lambda: _names(count, name),
        lambda: ("guided_choice", [f"choice {draw.random()}" for _ in range(count)]),
        lambda: _json(anyOf=[{"type": "array", "items": {"const": i}} for i in range(count)]),
        lambda: _json(type="array", prefixItems=[{"type": ["string", "null"]}] * count),
        lambda: ("guided_grammar", f'start: {choices} "y"'),
        # Ambiguous.
        lambda: ("guided_grammar", f"start: {forms} | T\nT: /(?s:.)/"),
        lambda: ("guided_grammar", f"start: x{times}\nx0: T | T x0\n{rules}T: /[a-z ]+/"),
        lambda: ("guided_regex", f"(.*a){{{times * 8}}}.*"),
        lambda: ("guided_regex", f"(a|b)*a(a|b){{{times * 10}}}"),
        lambda: ("guided_grammar", f"start: (A | B | C)*\nA: /.*{optional}/\nB: /(.|\\n)*y/\nC: /[^q]*/"),
        lambda: _json(anyOf=[{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(times * 20)]),
        # Huge.
        lambda: _json(type="string", minLength=number, maxLength=number * 2),
        lambda: _json(type="array", items={"type": "integer"}, minItems=number),
        lambda: _json(type="integer", multipleOf=number + draw.randrange(1, 999)),
        lambda: ("guided_regex", f"[a-z]{{{number}}}(b{{{number}}})?"),
        lambda: ("guided_grammar", f"start: A~{number}..{number * 2}\nA: /a|b/"),
        lambda: _json(type="number", minimum=10 ** -(number % 300), maximum=1e300),
        lambda: ("guided_regex", r"[\w\W&&[^\d]]" * min(number, 3000)),
        lambda: _json(type="object", additionalProperties={"const": "x" * min(number, 200_000)}),
        # Contradictory.
        lambda: _json(type="integer", minimum=low, maximum=low - 1),
        lambda: _multiples(primes),
        lambda: _patterns(low * 3, pattern),
        lambda: _json(allOf=[{"type": "string"}, {"type": "integer"}, {"enum": list(range(low))}]),
        lambda: ("guided_grammar", f"start: A\nA: {repeats}"),
        lambda: _json(type="object", required=[f"r{i}" for i in range(low * 20)], maxProperties=1),
        lambda: _json(type="object", properties=properties, patternProperties={"^a+$": {"type": "null"}}),
    ]


def _nested(draw: random.Random, depth: int) -> Hostile:
    nested: Any = {"type": "null"}
    for _ in range(min(depth, 90)):
        nested = {draw.choice(["anyOf", "allOf"]): [nested, {"type": "array", "items": nested}]}
        if draw.random() < 0.8:
            nested = {"not": nested} if draw.random() < 0.1 else {"items": nested, "type": "array"}
        if len(str(nested)) > 2**15:
            break
    return "guided_json", nested
