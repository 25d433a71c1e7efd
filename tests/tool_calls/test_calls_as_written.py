"""Calls as models write them, whole and split at every character: what is missing or too much is repaired."""

import json

import pytest

import xinfer_jax as xj

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


def tool(name: str, **properties) -> dict:
    return dict(
        type="function", function=dict(name=name, parameters=dict(type="object", properties=properties))
    )


TOOLS = [
    tool("now"),
    tool("weather", city=dict(type="string"), days=dict(type="integer")),
    tool("write", path=dict(type="string"), text=dict(type="string")),
    tool("find", id=dict(type="integer"), list=dict(type="array"), tree=dict(type="object")),
]
NOW = ("now", {})
OSLO = ("weather", dict(city="Oslo", days=3))
JSON = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
INNER = '{"city": "Oslo", "days": 3}'
TEXT = json.dumps(INNER)  # arguments as JSON in a text
XML = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
GEMMA = 'call:weather{city:<|"|>Oslo<|"|>,days:3}'
NESTED = (
    "write",
    dict(a=[1, -2.5, "}]", [], {}], b=dict(c=True, d=dict(e=None)), text='"a":\\n\n<tool_call>,}'),
)


def find(**arguments) -> tuple[str, dict]:
    return "find", arguments


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def gemma(text: str) -> str:
    return f"<|tool_call>{text}<tool_call|>"


WRITTEN = [
    # no arguments, null, an empty text, an empty list, JSON as text
    (tagged('{"name": "now"}'), None, [NOW]),
    ('<tool_call>{"name":"now"}', None, [NOW]),
    ('{"name": "now"}', None, [NOW]),
    (tagged('{"name": "now", "arguments": null}'), None, [NOW]),
    (tagged('{"name": "now", "arguments": ""}'), None, [NOW]),
    (tagged('{"name": "now", "arguments": []}'), None, [NOW]),
    (tagged('{"name": "now", "arguments": "{}"}'), None, [NOW]),
    ('{"name": "now", "parameters": null}', None, [NOW]),
    (tagged(f'{{"name": "weather", "arguments": {TEXT}}}'), None, [OSLO]),
    (f'{{"name": "weather", "parameters": {TEXT}}}', None, [OSLO]),
    # a brace too many
    (tagged(JSON + "}"), None, [OSLO]),
    (f"So:\n{tagged(JSON + '}}')} then {tagged(JSON)}", "So: then", [OSLO, OSLO]),
    (f"<tool_call>{JSON}}}", None, [OSLO]),
    (JSON + "}", None, [OSLO]),
    (f"{JSON}}} ; {JSON}", None, [OSLO, OSLO]),
    # two objects, or a list, in one mark
    (tagged(f"{JSON}\n{JSON}"), None, [OSLO, OSLO]),
    (tagged(f'{JSON},{{"name": "now"}}'), None, [OSLO, NOW]),
    (tagged(f"[{JSON}]"), None, [OSLO]),
    (tagged(f'[\n{JSON},\n{{"name": "now"}}\n]'), None, [OSLO, NOW]),
    (f"[{JSON}, {JSON}]", None, [OSLO, OSLO]),
    (f"<|python_tag|>[{JSON}]\n", None, [OSLO]),
    # a nested function
    (tagged(f'{{"function": {JSON}}}'), None, [OSLO]),
    (tagged(f'{{"type": "function", "function": {JSON}}}'), None, [OSLO]),
    (tagged(f'{{"type": "function", "function": {JSON}, "id": "1"}}'), None, [OSLO]),
    (tagged(f'{{"id": "1", "function": {{"arguments": {TEXT}, "name": "weather"}}}}'), None, [OSLO]),
    (f'{{"type": "function", "name": "weather", "parameters": {INNER}}}', None, [OSLO]),
    (f'{{"type": "function", "function": "weather", "parameters": {INNER}}}', None, [OSLO]),
    # Qwen3-Coder without the opening mark
    (f"Yes.\n{XML}\n</tool_call>", "Yes.", [OSLO]),
    (XML, None, [OSLO]),
    (f"{XML}\n</tool_call>\n{tagged(XML)}", None, [OSLO, OSLO]),
    (tagged(f"{XML}\n{XML}"), None, [OSLO, OSLO]),
    # without </parameter>
    (tagged(XML.replace("</parameter>\n", "")), None, [OSLO]),
    (tagged(XML.replace("</parameter>\n", "", 1)), None, [OSLO]),
    (XML.replace("\n</parameter>\n", ""), None, [OSLO]),
    # such marks within a value
    (
        tagged(
            "<function=write>\n<parameter=path>a</parameter><parameter=text>\n<parameter=x>\n</function>\n;"
            "<parameter=path>\n</parameter>\n</function>"
        ),
        None,
        [("write", dict(path="a", text="<parameter=x>\n</function>\n;<parameter=path>"))],
    ),
    # Gemma 4
    (gemma(GEMMA), None, [OSLO]),
    (gemma(f"{GEMMA}}}") + " So.", "So.", [OSLO]),
    (f"So. {gemma(GEMMA)}{gemma('call:now{}')}", "So.", [OSLO, NOW]),
    (f"<|tool_call>{GEMMA}", None, [OSLO]),
    (gemma('call:weather{"city": "Oslo", <|"|>days<|"|>: 3 }'), None, [OSLO]),
    (gemma("call:weather{city:Oslo,days:3}"), None, [OSLO]),
    (
        gemma(
            'call:write{a:[1,-2.5,<|"|>}]<|"|>,[],{}],b:{c:true,d:{e:None}},'
            'text:<|"|>"a":\\n\n<tool_call>,}<|"|>}'
        ),
        None,
        [NESTED],
    ),
    (f"<|channel>thought\nHm <|tool_call>\n<channel|>{gemma('call:now{}')}", None, [NOW]),
    # a comma after the last item
    (gemma("call:find{list:[1,2,], }"), None, [find(list=[1, 2])]),
    (gemma("call:find{tree:{a:[ ],b:[[3 , ], ] , }, }"), None, [find(tree=dict(a=[], b=[[3]]))]),
    # quotes, and escapes in them, as in JSON and Python
    (
        gemma("call:find{'list':['x', \"y\", 'it's', '\"', 'a\\'b\\n'],tree:{'a:b':'',\"c,d\":'f, g'}}"),
        None,
        [find(list=["x", "y", "it's", '"', "a'b\n"], tree={"a:b": "", "c,d": "f, g"})],
    ),
    (gemma(r'call:find{list:["\ud800", "\ud83d\ude00", NaN, 1e999, -]}'), None, [
        find(list=["\ud800", "😀", "NaN", "1e999", "-"])
    ]),
    # values of Qwen3-Coder as in Python
    (
        "<function=find><parameter=list>[1, 'it's', None,]</parameter><parameter=tree>{'a': True}</parameter>"
        "</function>",
        None,
        [find(list=[1, "it's", None], tree=dict(a=True))],
    ),
    ("<function=find><parameter=list>[1, </parameter></function>", None, [find(list="[1, ")]),
    # arguments beside the name
    ('{"name": "weather", "city": "Oslo", "days": 3}', None, [OSLO]),
    ('{"name": "weather", "parameters": {"city": "Oslo"}, "days": 3}', None, [OSLO]),
    ('{"days": 3, "parameters": {}, "type": "function", "city": "Oslo", "name": "weather"};', None, [OSLO]),
    (
        tagged('{"id": "1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}, "days": 3}'),
        None,
        [OSLO],
    ),
    (tagged('{"name": "now", "arguments": { }, "why": "x"}'), None, [NOW]),
    ('{"name": "find", "id": 3}', None, [find(id=3)]),
    ('{"name": "find", "parameters": {"id": 3}, "id": "call_1"}', None, [find(id=3)]),
    # calls at the end of reasoning that is open
    (f"<think>\nI look.\n{tagged(JSON)}\n", None, [OSLO]),
    (f"<think>\nI look.\n<tool_call>\n{JSON}", None, [OSLO]),
    (f"<think>{tagged(JSON)}? Yes: <tool_call> {tagged(XML)}{tagged(JSON)}", None, [OSLO, OSLO]),
    (f"<think>\nI look.\n{JSON}; {JSON}", None, [OSLO, OSLO]),
    (f"<think>{JSON}", None, [OSLO]),
    (f"<|channel>thought\nHm\n{gemma(GEMMA)}{gemma('call:now{}')}", None, [OSLO, NOW]),
]  # fmt: skip
NO_CALLS = [
    '{"name": "Bob"}',
    tagged('{"name": "now", "arguments": 3}'),
    tagged('{"name": "weather", "arguments": "[1]"}'),
    tagged('{"name": "weather", "arguments": "{\\"days\\": 1e999}"}'),
    tagged('{"function": {"name": "weather", "arguments": {}}, "name": "now"}'),
    "a <function= b",
    "<function=other>\n</function>",
    "if <function=weather",
    gemma("call:other{}"),
    gemma("weather{}"),
    gemma("call:weather{city:[<|\"|>Oslo<|\"|>}}"),
    gemma("call:weather{city:{}"),
    gemma('call:weather{city:<|"|>Oslo,days:3}'),
    gemma("call:weather{days:1,days:2}"),
    gemma("call:find{list:[1,,2]}"),
    gemma("call:find{list:[,]}"),
    gemma("call:find{list:['x}"),
    # an answer in JSON, whose fields are no parameters
    '{"name": "weather", "parameters": {"city": "Oslo"}, "unit": "C"}',
    '{"name": "now", "age": 3}',
    '{"name": "weather", "parameters": {"city": "Oslo"}, "city": "Bergen"}',
    tagged('{"name": "weather", "arguments": {"days": 1}, "arguments": {}, "city": "Oslo"}'),
    tagged('{"name": "now", "function": {"name": "weather"}}'),
]  # fmt: skip


def told(deltas: list[xj.AnswerDelta]) -> tuple[str, list[list[str]]]:
    """Content and calls of the deltas; each call's name and arguments, which may have become content."""
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        calls.setdefault(call.index, [str(call.name), ""])[1] += call.arguments
    return "".join(delta.content for delta in deltas), list(calls.values())


def pushed(parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = xj.AnswerParser(tools=TOOLS, new_id=str)
    deltas = [parser.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    content, calls = told(deltas)
    complete = [(name, arguments) for _, name, arguments in parser._calls.calls]
    assert complete == [tuple(calls[int(own)]) for own, _, _ in parser._calls.calls]
    return content, "".join(delta.reasoning for delta in deltas), complete


def same_in_any_parts(text: str) -> list[tuple[str, dict]]:
    """The text whole, split in two at every character, and in its characters: one result."""
    whole = pushed([text])
    assert pushed([*text]) == whole
    for at in range(1, len(text)):
        assert pushed([text[:at], text[at:]]) == whole, text[:at]
    return [(name, json.loads(arguments)) for name, arguments in whole[2]]


def test_there_are_forty():
    assert len(WRITTEN) >= 40


@pytest.mark.parametrize("text, content, calls", WRITTEN, ids=range(len(WRITTEN)))
def test_calls_as_models_write_them(text, content, calls):
    parsed = xj.parse_tool_calls(text, TOOLS)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert same_in_any_parts(text) == calls


@pytest.mark.parametrize("text", NO_CALLS, ids=range(len(NO_CALLS)))
def test_what_is_no_call_stays_text(text):
    parsed = xj.parse_tool_calls(text, TOOLS)
    assert (parsed.content, parsed.tool_calls) == (text, [])
    assert same_in_any_parts(text) == []


@pytest.mark.parametrize(
    "text",
    [
        f"{tagged(JSON)}</think>",
        f"a {tagged(JSON)} b",
        f"{JSON}\nb",
        f"a\n{JSON}{JSON[:9]}",
        "<tool_call>",
        tagged("{}"),
    ],
    ids=range(6),
)
def test_calls_within_reasoning_are_a_part_of_it(text):
    """If text follows them, or the mark that ends the reasoning."""
    parsed = xj.parse_tool_calls(f"<think>\n{text}", TOOLS)
    assert (parsed.reasoning, parsed.tool_calls) == (text.removesuffix("</think>"), [])
    assert same_in_any_parts(f"<think>\n{text}") == []


def test_calls_at_the_end_of_reasoning():
    text = f"I look. {tagged(JSON)} Or {tagged(JSON)}\n{tagged(JSON)}"
    parsed = xj.AnswerParser(tools=TOOLS, in_reasoning=True, most_calls=1).parse(text)
    assert parsed.reasoning == f"I look. {tagged(JSON)} Or" and parsed.content is None
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [OSLO]
    parser = xj.AnswerParser(["hermes"], TOOLS, in_reasoning=True)
    assert parser.push("Hm <tool_call> and").reasoning == "Hm <tool_call> and"
    assert parser.push(f" {tagged(JSON)}\n", ended=True).tool_calls[0].name == "weather"
    assert xj.AnswerParser([], in_reasoning=True).parse(text).reasoning == text


def test_an_object_with_a_name_is_an_answer_where_the_tools_are_not_known():
    assert xj.parse_tool_calls('{"name": "Bob"}').content == '{"name": "Bob"}'
    assert xj.parse_tool_calls(tagged('{"name": "Bob"}')).tool_calls[0].name == "Bob"


def test_gemma_arguments_arrive_while_they_are_generated():
    parser = xj.AnswerParser(tools=TOOLS)
    pieces = [call.arguments for letter in gemma(GEMMA) for call in parser.push(letter).tool_calls]
    assert len(pieces) > 5 and json.loads("".join(pieces)) == OSLO[1]


def test_gemma_thoughts_are_reasoning():
    parsed = xj.parse_tool_calls("<|channel>thought\nwhy\n<channel|>Hi.")
    assert (parsed.reasoning, parsed.content) == ("why\n", "Hi.")
    assert xj.parse_tool_calls("<|channel>thought\n<channel|>Hi.").content == "Hi."
