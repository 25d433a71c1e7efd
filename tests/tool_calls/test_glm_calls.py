"""Calls as GLM 4.5 and later models write them: values as they stand, in any parts, and what is no call."""

import json

import pytest
import tool_models
from tool_models import tool

import xinfer_jax as xj
from xinfer_jax.tokenization.template_tools import TemplateTools, find_template_tools
from xinfer_jax.tool_calls.tool_call_form import tool_call_form

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

TOOLS = [
    tool("add", a=dict(type="integer"), b=dict(type=["number", "null"]), tags=dict(type="array"), any={}),
    tool("add.all", text=dict(type="string"), note=dict(type=["integer", "string"])),
    tool("now"),
]


def pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def call(name: str, *pairs: str) -> str:
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


PATCH = "x</arg_value> y <tool_call>now <arg_value> <arg_key>a</arg_key>"
NUMBERS = call("add", pair("a", "1"), pair("b", "null"), pair("tags", '["é", {"x": 1}]'), pair("any", "[2]"))
NUMBERS_CALL = ("add", dict(a=1, b=None, tags=["é", dict(x=1)], any=[2]))
WHOLE = {
    NUMBERS: (None, [NUMBERS_CALL]),
    NUMBERS.replace("\n", ""): (None, [NUMBERS_CALL]),  # GLM 4.7 and later
    f"I look.\n{NUMBERS}\n{call('now')}\n": ("I look.", [NUMBERS_CALL, ("now", {})]),
    "<think>why</think>\n<tool_call>now</tool_call>": (None, [("now", {})]),
    # a text stands as it is, with its spaces, and with marks that end no value
    call("add.all", pair("text", " a\n ")): (None, [("add.all", dict(text=" a\n "))]),
    call("add.all", pair("text", "")): (None, [("add.all", dict(text=""))]),
    call("add.all", pair("text", "3"), pair("note", "3")): (None, [("add.all", dict(text="3", note=3))]),
    call("add.all", pair("text", PATCH)): (None, [("add.all", dict(text=PATCH))]),
    call("add", pair("tags", "('a', True)")): (None, [("add", dict(tags="('a', True)"))]),
    call("add", pair("tags", "['a', True]")): (None, [("add", dict(tags=["a", True]))]),
    # as models write it: spaces for lines, a key with spaces, a value without its first mark
    "<tool_call> add <arg_key> a </arg_key> <arg_value>1</arg_value> </tool_call>": (
        None,
        [("add", dict(a=1))],
    ),
    "<tool_call>add.all<arg_key>text</arg_key>so many</arg_value></tool_call>": (
        None,
        [("add.all", dict(text="so many"))],
    ),
}
NO_CALLS = [
    call("other", pair("a", "1")),
    call(""),
    call("add now", pair("a", "1")),
    call("add", "1"),
    call("add", pair("a", "1"), pair("a", "2")),
    call("add", pair("", "1")),
    call("add", "</arg_key>"),
    call("add", "<arg_key>a</arg_key><arg_key>b</arg_key>"),
    call("add", "<arg_value>1</arg_value>"),
    call("add", pair("a" * 600, "1")),
    call("add", pair("a", "1</tool_call>")),
    call("add", "<arg_key>a</arg_key>\n<arg_value>1\n"),
    call('{"name": "add", "arguments": {}}'),
    call("<function=add></function>"),
]


def found(parts: list[str], **options) -> tuple:
    """Content and calls of the parts, from what is new after each of them."""
    parser = xj.AnswerParser("glm45", TOOLS, new_id=str, **options)
    deltas = [parser.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    begun: dict[int, list[str]] = {}
    for one in (one for delta in deltas for one in delta.tool_calls):
        begun.setdefault(one.index, [str(one.name), ""])[1] += one.arguments
    complete = [begun[int(own)] for own, _, _ in parser._calls.calls]
    content = "".join(delta.content for delta in deltas)
    return content or None, [(name, json.loads(arguments)) for name, arguments in complete]


@pytest.mark.parametrize("text", WHOLE, ids=range(len(WHOLE)))
def test_calls_whole_and_letter_by_letter(text):
    assert found([text]) == found([*text]) == WHOLE[text]
    parsed = xj.parse_tool_calls(text, TOOLS)  # beside all other forms
    assert (parsed.content, [(one.name, one.arguments) for one in parsed.tool_calls]) == WHOLE[text]


@pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_is_text_and_others_stay_calls(text):
    assert found([text]) == found([*text]) == (text, [])
    assert found([f"{text}\n{NUMBERS}"]) == found([*text, "\n", *NUMBERS]) == (text, [NUMBERS_CALL])


def test_an_incomplete_call_is_text():
    """Also after a value: more of them may have followed."""
    for cut in range(len("<tool_call>"), len(NUMBERS) - len("</tool_call>") + 1):
        assert found([NUMBERS[:cut]]) == (NUMBERS[:cut], []), cut


def test_a_text_arrives_while_it_is_generated():
    parser = xj.AnswerParser("glm45", TOOLS)
    pieces = [
        "".join(one.arguments for one in parser.push(x).tool_calls)
        for x in call("add.all", pair("text", PATCH))
    ]
    assert sum(map(bool, pieces)) > 20


def test_calls_at_the_end_of_reasoning():
    text = f"I wonder.\n{NUMBERS}"
    (one,) = xj.AnswerParser("glm45", TOOLS, in_reasoning=True).parse(text).tool_calls
    assert (one.name, one.arguments) == NUMBERS_CALL
    assert xj.AnswerParser("glm45", TOOLS, in_reasoning=True).parse(f"{text} no").tool_calls == []


def test_both_layouts_of_its_templates_are_found():
    for template in (tool_models.TEMPLATES["glm45"], tool_models.GLM_ON_ONE_LINE):
        assert find_template_tools(template, ()) == TemplateTools(True, "glm45")


@pytest.mark.parametrize(
    "value, said",
    [
        ({"type": "string", "not": {"const": "x"}}, "parameter 'a': 'not'"),
        (dict(type="string", pattern=3), "pattern must be a regular expression"),
    ],
)
def test_what_the_form_cannot_express(value, said):
    with pytest.raises(xj.InputError, match=said):
        tool_call_form("glm45").grammar(dict(f=dict(properties=dict(a=value))), False)
    with pytest.raises(xj.InputError, match="has no spaces"):
        tool_call_form("glm45").grammar(dict(f=dict(properties={"a b": {}})), False)


def test_unknown_forms_are_rejected():
    with pytest.raises(xj.InputError, match="formats may have hermes, .*glm45, got 'glm'"):
        xj.AnswerParser("glm")
