"""All forms of calls: time, the scanner of JSON, messages of the API, templates, invalid tools. The JSON
types of parameters, through $ref, allOf and anyOf, and values that Qwen3-Coder writes for them.
"""

import json
import random
import time

import pytest
import tool_models
from tool_models import tool

import xinfer_jax as xj
from xinfer_jax.tokenization.template_tools import TemplateTools, find_template_tools
from xinfer_jax.tool_calls.json_scanner import JSONObjectScanner
from xinfer_jax.tool_calls.json_values import json_text, parse_json
from xinfer_jax.tool_calls.parameter_types import Parameters

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

TOOLS = [tool("add", a={}, any={})]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [[], {"x": null}]}}\n</tool_call>'


@pytest.mark.full
def test_time_is_linear_in_the_text():
    part = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><function=add><parameter=a>'
    started = time.monotonic()
    for text in (
        part, "<tool_call>", "<function=", "</function> ", "<tool_call><function=add><parameter=a>", CALL,
        '{"name": "add', "<tool_call>add<arg_key>any</arg_key><arg_value>1</tool_call>",
        "<tool_call>add<arg_key>any</arg_key><arg_value></arg_value> ", "<|tool_call>call:add{a:",
        "<|tool_call>call:add{a:[", '<|tool_call>call:add{a:<|"|>',
    ):  # fmt: skip
        many = text * (200_000 // len(text))
        parser = xj.tools.AnswerParser(tools=TOOLS)
        for i in range(0, len(many), 200):
            parser.push(many[i : i + 200])
        parser.push("", True)
        xj.tools.parse_tool_calls(many, TOOLS)
    assert time.monotonic() - started < 60


def test_json_scanner_equals_json():
    rng = random.Random(1)
    pieces = [*'{ } [ ] , : "a" " \\u12aF \\ 1 -0.5E+3 01 true nul'.split(), " ", "\n"]
    valid = 0
    for _ in range(20_000):
        text = "{" + "".join(rng.choices(pieces, k=rng.randint(0, 7)))
        scanner = JSONObjectScanner()
        used = 0
        for letter in text:
            used += scanner.push(letter)
        whole = JSONObjectScanner()
        assert whole.push(text) == used and (whole.ended, whole.failed) == (scanner.ended, scanner.failed)
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            end = None
        assert scanner.ended == (end is not None) and (end is None or used == end), text
        valid += scanner.ended
    assert valid > 500


def test_messages_of_the_api():
    parsed = xj.tools.parse_tool_calls(f"<think>\nwhy</think>\n\n{CALL}")
    (call,) = parsed.tool_calls
    message = parsed.to_message()
    function = dict(name="add", arguments=call.arguments_json)
    assert message["tool_calls"] == [dict(id=call.id, type="function", function=function)]
    assert message["content"] is None and message["reasoning"] == message["reasoning_content"] == "why"
    assert xj.tools.parse_tool_calls("why</think>ok", in_reasoning=True).to_message()["content"] == "ok"
    assert xj.tools.parse_tool_calls("why", in_reasoning=True).content is None


@pytest.mark.parametrize(
    "tools, said",
    [
        ("add", "tools must be a list of"), ([3], "each of tools must be"), ([dict(type="web")], "each of"),
        ([tool("a")] * 513, "513 functions, more than"), ([tool("a b")], "a tool's name must"),
        ([tool("a"), tool("a")], "2 functions named 'a'"),
        ([dict(type="function", function=dict(name="a", parameters=[]))], "parameters of tool 'a'"),
        ([dict(type="function", function=dict(name="a", parameters=dict(type="array")))], "of an object"),
    ],
)  # fmt: skip
def test_invalid_tools_are_rejected(tools, said):
    with pytest.raises(xj.InputError, match=said):
        xj.tools.parse_tool_calls("a", tools)
    with pytest.raises(xj.InputError, match="formats may have hermes, .*glm45, got 'json'"):
        xj.tools.AnswerParser("json")


def test_both_layouts_of_glms_templates_are_found():
    for template in (tool_models.TEMPLATES["glm45"], tool_models.GLM_ON_ONE_LINE):
        assert find_template_tools(template, ()) == TemplateTools(True, "glm45")


# --- types of parameters ------------------------------------------------------------------------------------

DEFS = {
    "Text": dict(type="string"),
    "Alias": {"$ref": "#/$defs/Text"},
    "Self": {"anyOf": [{"$ref": "#/$defs/Self"}, dict(type="integer")]},
    "a/b~c d": dict(type="boolean"),
}
# schema: (types, the value of the text 12)
TYPES = [
    ({"$ref": "#/$defs/Text"}, {"string"}, "12"),
    ({"$ref": "#/$defs/Alias", "description": "x"}, {"string"}, "12"),
    ({"allOf": [{"$ref": "#/$defs/Alias"}], "default": "x"}, {"string"}, "12"),
    ({"allOf": [dict(type=["string", "number"]), dict(type=["number", "null"])]}, {"number", "integer"}, 12),
    ({"allOf": [dict(type="number"), dict(type="integer")]}, {"integer"}, 12),
    ({"anyOf": [{"$ref": "#/$defs/Text"}, dict(type="null")]}, {"string", "null"}, "12"),
    ({"$ref": "#/$defs/a~1b~0c%20d"}, {"boolean"}, "12"),
    ({"$ref": "#/$defs/Self"}, None, 12),
    ({"$ref": "#"}, {"object"}, "12"),
    ({"$ref": "#/properties/x/anyOf/1"}, {"null"}, "12"),
    ({"$ref": "https://example.com/schema"}, None, 12),
    (dict(type="string", nullable=True), {"string", "null"}, "12"),
    (dict(type="string", enum=["x", 3]), {"string"}, "12"),
    (dict(enum=["x", 3]), {"string", "number", "integer"}, 12),
    ({}, None, 12),
    (True, None, 12),
]


@pytest.mark.parametrize("schema, types, value", TYPES, ids=range(len(TYPES)))
def test_types_of_a_schema(schema, types, value):
    properties = dict(a=schema, x=dict(anyOf=[{}, dict(type="null")]))
    parameters = {"type": "object", "properties": properties, "$defs": DEFS}
    assert Parameters(parameters).types("a") == types
    tools = [dict(type="function", function=dict(name="f", parameters=parameters))]
    text = "<tool_call><function=f><parameter=a>12</parameter></function></tool_call>"
    (call,) = xj.tools.parse_tool_calls(text, tools).tool_calls
    assert call.arguments == dict(a=value)


def test_parameters_behind_references():
    more = dict(properties=dict(b=dict(type="string"), a=dict(type="null")))
    root = {"$ref": "#/$defs/Root", "$defs": {"Root": {"anyOf": [dict(properties=dict(a={})), more, more]}}}
    found = Parameters(root)
    assert {*found.described} == {"a", "b"} and found.types("b") == {"string"} == found.types("c")
    found = Parameters(dict(additionalProperties=dict(type="integer")))
    assert found.described is None and found.types("c") == {"integer"}


def test_time_is_linear_in_the_schema():
    """Each definition names the next one twice."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(200)}
    root = {"$ref": "#/$defs/d0", "properties": dict(a={"$ref": "#/$defs/d150"}), "$defs": defs}
    assert Parameters(root).types("a") is None and "a" in Parameters(root).described
    assert Parameters(root).merged({"allOf": [{"$ref": "#/$defs/d0"}] * 9}) == defs["d0"]


def test_merged_keywords():
    parameters = Parameters({"$defs": DEFS | dict(Short=dict(type="string", maxLength=3, title="S"))})
    short = {"allOf": [{"$ref": "#/$defs/Short"}], "title": "mine", "pattern": "x"}
    assert parameters.merged(short) == dict(type="string", maxLength=3, title="mine", pattern="x")
    twice = {"allOf": [{"$ref": "#/$defs/Short"}, dict(maxLength=2)]}
    assert parameters.merged(twice) == twice


def test_json_that_others_can_read():
    assert json_text("é\ud800") == r'"\u00e9\ud800"' and json_text(["é"]) == '["é"]'
    deep = "[" * 100 + "]" * 100
    assert json_text(parse_json(deep)) == deep
    for text in (f"[{deep}]", "[" * 100_000, "NaN", "[1e999]", "9" * 5000, "{", ""):
        with pytest.raises(ValueError):
            parse_json(text)
