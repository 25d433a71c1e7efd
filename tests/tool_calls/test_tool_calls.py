"""All forms of calls: time, the scanner of JSON, messages of the API, templates, and invalid tools."""

import json
import random
import time

import pytest
import tool_models
from tool_models import tool

import xinfer_jax as xj
from xinfer_jax.tokenization.template_tools import TemplateTools, find_template_tools
from xinfer_jax.tool_calls.json_scanner import JSONObjectScanner

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
        parser = xj.AnswerParser(tools=TOOLS)
        for i in range(0, len(many), 200):
            parser.push(many[i : i + 200])
        parser.push("", True)
        xj.parse_tool_calls(many, TOOLS)
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
    parsed = xj.parse_tool_calls(f"<think>\nwhy</think>\n\n{CALL}")
    (call,) = parsed.tool_calls
    message = parsed.to_message()
    function = dict(name="add", arguments=call.arguments_json)
    assert message["tool_calls"] == [dict(id=call.id, type="function", function=function)]
    assert message["content"] is None and message["reasoning"] == message["reasoning_content"] == "why"
    assert xj.parse_tool_calls("why</think>ok", in_reasoning=True).to_message()["content"] == "ok"
    assert xj.parse_tool_calls("why", in_reasoning=True).content is None


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
        xj.parse_tool_calls("a", tools)
    with pytest.raises(xj.InputError, match="formats may have hermes, .*glm45, got 'json'"):
        xj.AnswerParser("json")


def test_both_layouts_of_glms_templates_are_found():
    for template in (tool_models.TEMPLATES["glm45"], tool_models.GLM_ON_ONE_LINE):
        assert find_template_tools(template, ()) == TemplateTools(True, "glm45")
