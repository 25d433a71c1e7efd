"""Mutated calls of every form: a parser returns calls whose arguments are JSON, or text, in any parts."""

import json
import random
import re
import string
from typing import Any

import pytest
import response_templates
from answer_parts import pushed

import xinfer_jax as xj
from xinfer_jax.plugins import names
from xinfer_jax.tokenization.response_template import parse_response_template
from xinfer_jax.tokenization.template_splitter import TemplateSplitter
from xinfer_jax.tool_calls.tool_call_form import TOOL_CALLS, tool_call_forms

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

FORMATS = [form.name for form in tool_call_forms()]

COUNT = 60  # in the quick set
SOAK_COUNT = 100_000  # of each form
SOAK_PARTS = 20  # tests of a form, so that each ends within the time of a test
_DEFS = dict(
    Text=dict(type="string"), Number=dict(allOf=[{"$ref": "#/$defs/Whole"}]), Whole=dict(type="integer")
)
_PROPERTIES = dict(
    a=dict(type="integer"), b={"$ref": "#/$defs/Text"}, c=dict(type="array"), d=dict(type="object"),
    e=dict(anyOf=[dict(type="number"), dict(type="null")]), f={"allOf": [{"$ref": "#/$defs/Number"}]}, g={},
    h=dict(type="boolean"),
)  # fmt: skip
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "$defs": _DEFS}
TOOLS = [
    dict(type="function", function=dict(name="add", parameters=_SCHEMA)),
    dict(type="function", function=dict(name="weather", parameters=dict(type="object"))),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
TEMPLATES = {name: parse_response_template(spec) for name, spec in response_templates.BY_NAME.items()}
TEXTS = [
    "", "Oslo", "it's", 'a "b"', "1", "true", "x, y", "{}", "</tool_call>", "é\n\t\\", "🚀", '<|"|>', "a:b]",
]  # fmt: skip
# What mutations insert, beside single characters.
PIECES = [
    *"""<tool_call> </tool_call> <function=add> </function> <parameter=a> </parameter> <think> </think>
    <|tool_call> <tool_call|> <|"|> call:add{ <|channel>thought <channel|> <|python_tag|> <|channel|>
    <|message|> <|call|> <|start|> <|end|> [CALL]add [/CALL] [THINK] [/THINK] <f=add> </f> <p=a> </p>
    <arg_key>a</arg_key> <arg_value> </arg_value> <tool_call>add <|calls|>
    <|/calls|> <call> </call> "name" "arguments": "a":1 null None NaN Infinity 1e999 \\ud800 "\\udc00" \\u12
    \\ , ' " \'\' : { } [ ] ; - (1,) b\'\' 3.""".split(),
    '{"name": "add", "arguments": {}}',
    "9" * 4400, "[" * 120, "{a:" * 120, '{"a":' * 101, "\x00", "\n", "\n{",
    "  ", "\x85", "\u2028", ", ",
]  # fmt: skip
SLIPS = [
    ("]", ",]"), ("}", ",}"), ("]", ""), ("}", "}}"), ('<|"|>', "'"), ('<|"|>', '"'), ('"', "'"),
    ("true", "True"), ("null", "None"), ("</parameter>", ""), (": ", " = "), ("{", "("), (",", ";"),
    ("\n", ""),
]  # fmt: skip
_STRUCTURE = re.compile(r"[\[\]{}<>|,:;'\"()=\n]")  # beside which most mutations are


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind in (2, 6) and depth < 2:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice("abxy"): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice([None, True, False, 0, -12, 2.5, 10**30])


def gemma(x: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(x, dict):
        return f"{{{','.join(f'{key}:{gemma(one)}' for key, one in x.items())}}}"
    if isinstance(x, list):
        return f"[{','.join(map(gemma, x))}]"
    return f'<|"|>{x}<|"|>' if isinstance(x, str) else json.dumps(x)


def written(x: Any) -> str:
    """A value as Qwen3-Coder writes it: a text without quotes, others as JSON or as Python's."""
    return x if isinstance(x, str) else json.dumps(x) if len(str(x)) % 2 else str(x)


def hermes(name: str, x: dict) -> str:
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=x))}\n</tool_call>"


def llama(name: str, x: dict) -> str:
    fields = {key: x[key] for key in "ab" if key in x}
    return (
        json.dumps(dict(name=name, parameters={key: x[key] for key in x if key not in fields}) | fields) + ";"
    )


def qwen(name: str, x: dict) -> str:
    parts = (f"<parameter={key}>\n{written(one)}\n</parameter>\n" for key, one in x.items())
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def glm(name: str, x: dict) -> str:
    parts = (f"<arg_key>{key}</arg_key>\n<arg_value>{written(one)}</arg_value>\n" for key, one in x.items())
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def harmony(name: str, x: dict) -> str:
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{json.dumps(x)}<|call|>"


def lines(name: str, x: dict) -> str:
    fields = dict(tool=name) | x
    return "\n".join(["<call>", *(f"{key}: {one}" for key, one in fields.items()), "</call>"])


def in_tags(name: str, x: dict) -> str:
    return f"<f={name}>{''.join(f'<p={key}>{written(one)}</p>' for key, one in x.items())}</f>"


def python(name: str, x: dict) -> str:
    return f"<|calls|>[{name}({', '.join(f'{key}={one!r}' for key, one in x.items())})]<|/calls|>"


FORMS = dict(
    hermes=(hermes, "<think>", "</think>"),
    llama3_json=(llama, "<think>", "</think>"),
    qwen3_coder=(qwen, "<think>", "</think>"),
    gemma4=(
        lambda name, x: f"<|tool_call>call:{name}{gemma(x)}<tool_call|>", "<|channel>thought", "<channel|>",
    ),
    harmony=(harmony, "<|channel|>analysis<|message|>", "<|end|>"),
    glm45=(glm, "<think>", "</think>"),
    brackets=(lambda name, x: f"[CALL]{name}{json.dumps(x)}[/CALL]", "[THINK]", "[/THINK]"),
    xml=(in_tags, "<t>", "</t>"),
    python=(python, "", ""),
    gemma_template=(
        lambda name, x: f"<|tool_call>call:{name}{gemma(x)}<tool_call|>", "<|channel>thought", "<channel|>",
    ),
    lines=(lines, "", ""),
)  # fmt: skip


def answer(form: str, rng: random.Random) -> str:
    """Reasoning, which is closed or not, text, and calls."""
    write, start, end = FORMS[form]
    thoughts = rng.choice(["", "", f"{start}\nwhy{end}\n", f"{start}\nwhy\n"])
    calls = []
    for _ in range(rng.choice([1, 1, 2])):
        keys = rng.sample("abcdefgh", rng.randrange(4))
        calls.append(write(rng.choice(["add", "weather"]), {key: value(rng) for key in keys}))
    return thoughts + rng.choice(["", "", "I look.\n"]) + "\n".join(calls)


def mutated(text: str, rng: random.Random) -> str:
    """The text with parts of it removed, repeated, moved, replaced or inserted."""
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5])):
        at = rng.choice([*(found.start() for found in _STRUCTURE.finditer(text)), len(text)])
        at = rng.choice([at, at, at + 1, rng.randrange(len(text) + 1)])
        end = min(len(text), at + rng.choice([1, 1, 2, 5, 30]))
        more = rng.choice([rng.choice(PIECES), rng.choice(",'\"[]{}:"), rng.choice(string.printable)])
        kind = rng.randrange(8)
        if kind == 0:
            text = text[:at] + text[end:]
        elif kind == 1:
            text = text[:end] + text[at:]
        elif kind == 2:
            to = rng.randrange(len(text) + 1)
            text = text[:to] + text[at:end] + text[to:]
        elif kind == 3:
            text = text[:at]
        elif kind < 6:
            text = text.replace(*rng.choice(SLIPS), rng.choice([1, 1, 2, -1]))
        else:
            text = text[:at] + more + text[end if kind == 6 else at :]
    return text


def parsed(form: str, parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and names and arguments of the complete calls, from the deltas of the parts."""
    template = TEMPLATES.get(form)
    formats = [] if template else FORMATS if form == "all" else [form]
    splitter = TemplateSplitter(template, "", SCHEMAS, None, str) if template else None
    return pushed(xj.tools.AnswerParser(formats, TOOLS, new_id=str, splitter=splitter), parts)


def check(form: str, seed: int) -> int:
    """Checks one mutated answer, and returns how many calls it has."""
    rng = random.Random(f"{form} {seed}")
    text = mutated(answer(rng.choice(FORMATS) if form == "all" else form, rng), rng)
    whole = parsed(form, [text])
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice([1, 2, 5, 20])))
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(form, [*text] if rng.random() < 0.1 else parts) == whole, parts
    content, reasoning, calls = whole
    (content + reasoning).encode()
    for name, arguments in calls:
        assert name in SCHEMAS and isinstance(json.loads(arguments), dict)
        json.dumps(json.loads(arguments), allow_nan=False)
        arguments.encode()
    may_lose_marks = (
        form in ("harmony", "all", *TEMPLATES) or "<think>" in text or "<|channel>thought" in text
    )
    assert calls or may_lose_marks or content == text
    return len(calls)


@pytest.mark.parametrize("form", ["all", *FORMS])
def test_mutated_calls_are_calls_or_text(form):
    assert sum(check(form, seed) for seed in range(COUNT)) > COUNT // 8


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SOAK_PARTS))
@pytest.mark.parametrize("form", FORMS)
def test_many_mutated_calls_are_calls_or_text(form, part):
    count = SOAK_COUNT // SOAK_PARTS
    assert sum(check(form, seed) for seed in range(part * count, (part + 1) * count)) > count // 8


def test_every_form_is_there():
    assert FORMATS == names(TOOL_CALLS)
    assert {*FORMATS, *response_templates.BY_NAME} == {*FORMS}
