"""The JSON types of parameters, through $ref, allOf and anyOf; values that Qwen3-Coder writes for them."""

import pytest

import xinfer_jax as xj
from xinfer_jax.tool_calls.json_values import json_text, parse_json
from xinfer_jax.tool_calls.parameter_types import Parameters

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

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
    (call,) = xj.parse_tool_calls(text, tools).tool_calls
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
