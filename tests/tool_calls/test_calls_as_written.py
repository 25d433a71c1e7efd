"""Calls as models write them, in each form, whole and split at every character.

What is missing or too much is repaired, and what is malformed is text.
"""

import json

import pytest
from answer_parts import pushed
from tool_models import tool

import xinfer_jax as xj
from xinfer_jax.tool_calls.tool_call_form import tool_call_forms

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


TOOLS = [
    tool("now"),
    tool("weather", city=dict(type="string"), days=dict(type="integer")),
    tool("write", path=dict(type="string"), text=dict(type="string")),
    tool("find", id=dict(type="integer"), list=dict(type="array"), tree=dict(type="object")),
    tool(
        "add", a=dict(type="number"), b=dict(anyOf=[dict(type="number"), dict(type="null")]),
        note=dict(enum=["x", "3"]), tags=dict(type="array"), sure=dict(type="boolean"),
        either=dict(type=["integer", "string"]), any={},
    ),
    tool("add.all", text=dict(type="string"), note=dict(type=["integer", "string"])),
]  # fmt: skip
NOW = ("now", {})
OSLO = ("weather", dict(city="Oslo", days=3))
JSON = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
INNER = '{"city": "Oslo", "days": 3}'
TEXT = json.dumps(INNER)  # arguments as JSON in a text
XML = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
GEMMA = 'call:weather{city:<|"|>Oslo<|"|>,days:3}'
PARIS = '{"name": "weather", "arguments": {"city": "Paris \\"}{\\" <tool_call>", "days": 3}}'
PARIS_CALL = ("weather", dict(city='Paris "}{" <tool_call>', days=3))
ADD = '{"name": "add", "arguments": {"a": 1.5e3, "tags": [[], {"x": null}]}}'
ADD_CALL = ("add", dict(a=1500.0, tags=[[], dict(x=None)]))
LINES = "<function=weather>\n<parameter=city>\nNew\n\nYork\n</parameter>\n</function>"
YORK = ("weather", dict(city="New\n\nYork"))
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


def pair(key: str, value: str) -> str:
    """An argument as GLM writes it."""
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def glm(name: str, *pairs: str) -> str:
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


PATCH = "x</arg_value> y <tool_call>now <arg_value> <arg_key>a</arg_key>"
NUMBERS = glm("add", pair("a", "1"), pair("b", "null"), pair("tags", '["é", {"x": 1}]'), pair("any", "[2]"))
NUMBERS_CALL = ("add", dict(a=1, b=None, tags=["é", dict(x=1)], any=[2]))

WRITTEN = [
    # one or several, with text and whitespace around them
    (tagged(PARIS), None, [PARIS_CALL]),
    (f"<tool_call>{ADD}</tool_call>", None, [ADD_CALL]),
    (f"I look.\n\n{tagged(PARIS)}\n{tagged(ADD)}\n", "I look.", [PARIS_CALL, ADD_CALL]),
    (f"{tagged(PARIS)} then {tagged(ADD)} done\n", "then done\n", [PARIS_CALL, ADD_CALL]),
    (f"<tool_call>\n{ADD}", None, [ADD_CALL]),  # the end of the answer stands for the last mark
    # the other order of keys, and further keys
    (tagged('{"arguments": {"a": 1}, "id": 7, "name": "add"}'), None, [("add", dict(a=1))]),
    # Llama 3
    (ADD.replace("arguments", "parameters"), None, [ADD_CALL]),
    (f"<|python_tag|>{ADD}; {PARIS}\n", None, [ADD_CALL, PARIS_CALL]),
    (f"{ADD} {PARIS};", None, [ADD_CALL, PARIS_CALL]),
    # Qwen3-Coder
    (f"Yes.\n{tagged(LINES)}", "Yes.", [YORK]),
    (f"<tool_call>{LINES}{tagged(PARIS)}", None, [YORK, PARIS_CALL]),
    (tagged("<function=weather></function>"), None, [("weather", {})]),
    (
        tagged(
            "<function=add><parameter=a>\n3\n</parameter><parameter=b>None</parameter>\n"
            '<parameter=note>3</parameter><parameter=tags>["é"]</parameter><parameter=sure>True</parameter>'
            '<parameter=either>x</parameter><parameter=any>{"y": 1}</parameter><parameter=other>4</parameter>'
            "</function>"
        ),
        None,
        [("add", dict(a=3, b=None, note="3", tags=["é"], sure=True, either="x", any=dict(y=1), other="4"))],
    ),
    # numbers that are too large are texts
    (
        tagged(f"<function=add><parameter=a>1e999</parameter><parameter=any>{10**400}</parameter></function>"),
        None,
        [("add", dict(a="1e999", any=10**400))],
    ),
    # reasoning
    (f"<think>\nA{tagged(PARIS)}</think>\n\n{tagged(ADD)}", None, [ADD_CALL]),
    # no call
    ("", "", []),
    (" {x} ", " {x} ", []),
    # GLM 4.5, and 4.7 without line ends
    (NUMBERS, None, [NUMBERS_CALL]),
    (NUMBERS.replace("\n", ""), None, [NUMBERS_CALL]),
    (f"I look.\n{NUMBERS}\n{glm('now')}\n", "I look.", [NUMBERS_CALL, NOW]),
    ("<think>why</think>\n<tool_call>now</tool_call>", None, [NOW]),
    (f"<think>I wonder.\n{NUMBERS}", None, [NUMBERS_CALL]),
    # a text stands as it is, with its spaces, and with marks that end no value
    (glm("add.all", pair("text", " a\n ")), None, [("add.all", dict(text=" a\n "))]),
    (glm("add.all", pair("text", "")), None, [("add.all", dict(text=""))]),
    (glm("add.all", pair("text", "3"), pair("note", "3")), None, [("add.all", dict(text="3", note=3))]),
    (glm("add.all", pair("text", PATCH)), None, [("add.all", dict(text=PATCH))]),
    (glm("add", pair("tags", "('a', True)")), None, [("add", dict(tags="('a', True)"))]),
    (glm("add", pair("tags", "['a', True]")), None, [("add", dict(tags=["a", True]))]),
    # spaces for lines, a key with spaces, a value without its first mark
    (
        "<tool_call> add <arg_key> a </arg_key> <arg_value>1</arg_value> </tool_call>",
        None,
        [("add", dict(a=1))],
    ),
    (
        "<tool_call>add.all<arg_key>text</arg_key>so many</arg_value></tool_call>",
        None,
        [("add.all", dict(text="so many"))],
    ),
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
    '{"city": "Paris"}',
    f"It is {ADD}",
    "<tool_cal> \n",
]  # fmt: skip
# Beside these, other calls stay calls.
MALFORMED = [
    tagged('{"name": "weather", "arguments": {bad}}'),
    tagged('{"name": "weather", "arguments": "Paris"}'),
    tagged('{"name": "weather", "arguments": {"city": "\\q"}}'),
    tagged('{"name": "weather", "arguments": {"city": "\n"}}'),
    tagged('{"name": "weather", "arguments": {"days": 01}}'),
    tagged('{"name": "weather", "arguments": {"days": ' + "9" * 5000 + "}}"),
    tagged('{"name": "weather", "arguments": {"x": ' + "[" * 200),
    tagged('{"arguments": {"days": 1e999}, "name": "weather"}'),
    tagged('{"name": "weather", "arguments": {}, "parameters": {}}'),
    tagged('{"name": "weather", "arguments": {}, "name": "add"}'),
    tagged('{"name": "other", "arguments": {}}'),
    tagged('{"name": 3, "arguments": {}}'),
    tagged("weather(city='Paris')"),
    tagged(""),
    tagged("<function=other>\n</function>"),
    tagged("<function=weather>\nParis</function>"),
    tagged("<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
    tagged("<function weather></function>"),
    '{"name": "weather", "parameters": {"city"}}',
    glm("other", pair("a", "1")),
    glm("add now", pair("a", "1")),
    glm("add", "1"),
    glm("add", pair("a", "1"), pair("a", "2")),
    glm("add", pair("", "1")),
    glm("add", "</arg_key>"),
    glm("add", "<arg_key>a</arg_key><arg_key>b</arg_key>"),
    glm("add", "<arg_value>1</arg_value>"),
    glm("add", pair("a" * 600, "1")),
    glm("add", pair("a", "1</tool_call>")),
    glm("add", "<arg_key>a</arg_key>\n<arg_value>1\n"),
]


def same_in_any_parts(text: str) -> list[tuple[str, dict]]:
    """The text whole, split in two at every character, and in its characters: one result."""

    def in_parts(*parts: str) -> tuple:
        return pushed(xj.tools.AnswerParser(tools=TOOLS, new_id=str), parts)

    whole = in_parts(text)
    assert in_parts(*text, "") == whole
    for at in range(1, len(text), 1 + len(text) // 500):
        assert in_parts(text[:at], text[at:]) == whole, text[:at]
    return [(name, json.loads(arguments)) for name, arguments in whole[2]]


@pytest.mark.parametrize("text, content, calls", WRITTEN, ids=range(len(WRITTEN)))
def test_calls_as_models_write_them(text, content, calls):
    parsed = xj.tools.parse_tool_calls(text, TOOLS)
    assert parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert same_in_any_parts(text) == calls


def found(text: str, **options) -> tuple:
    parsed = xj.tools.AnswerParser(**dict(tools=TOOLS) | options).parse(text)
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize("text", NO_CALLS + MALFORMED, ids=range(len(NO_CALLS + MALFORMED)))
def test_what_is_no_call_stays_text(text):
    assert found(text) == (text, [])
    assert same_in_any_parts(text) == []
    if text in MALFORMED:
        assert found(f"{text}\n{tagged(ADD)}") == (text, [ADD_CALL])
        assert found(f"a\n{tagged(ADD)}{text}") == (f"a{text}", [ADD_CALL])


@pytest.mark.parametrize("text", [PARIS, f"\n<tool_call>{PARIS}", tagged(LINES), NUMBERS])
def test_an_incomplete_call_is_text(text):
    """It is also text if it ends after a value: more values may have followed."""
    whole = f"{tagged(ADD)} {text}"
    end = next(whole.rindex(mark) for mark in ("</arg_value>", "</function>", "}") if mark in text)
    for cut in range(whole.index(text) + len("\n<tool_call>"), end):
        content = whole[whole.index("</tool_call>") + 12 : cut].lstrip()
        assert found(whole[:cut], formats=["hermes", "qwen3_coder", "glm45"]) == (content, [ADD_CALL])


def test_formats_that_are_not_asked_for_are_text():
    for text in (tagged(ADD), tagged(LINES), ADD, NUMBERS, gemma("call:weather{}")):
        of_text = [found(text, formats=[form.name])[1] != [] for form in tool_call_forms()]
        assert sum(of_text) == 1 and found(text, formats=[]) == (text, [])
    assert found(tagged(LINES), formats="qwen3_coder", tools=None)[1] == [YORK]
    assert found(tagged(ADD) + tagged(PARIS) + "x", most_calls=1) == (None, [ADD_CALL])


@pytest.mark.parametrize(
    "text, least",
    [(tagged(PARIS), 12), (tagged(LINES), 12), (gemma(GEMMA), 5), (glm("add.all", pair("text", PATCH)), 20)],
)
def test_arguments_arrive_while_they_are_generated(text, least):
    """Values that are texts arrive in this way too, in the forms that do not quote them."""
    parser = xj.tools.AnswerParser(tools=TOOLS)
    pieces = ["".join(call.arguments for call in parser.push(letter).tool_calls) for letter in text]
    assert sum(map(bool, pieces)) > least


@pytest.mark.parametrize(
    "text",
    [
        f"{tagged(JSON)}</think>",
        f"a {tagged(JSON)} b",
        f"{JSON}\nb",
        f"a\n{JSON}{JSON[:9]}",
        "<tool_call>",
        tagged("{}"),
        f"{NUMBERS} no",
    ],
    ids=range(7),
)
def test_calls_within_reasoning_are_a_part_of_it(text):
    """They are if text follows them, or the mark that ends the reasoning."""
    parsed = xj.tools.parse_tool_calls(f"<think>\n{text}", TOOLS)
    assert (parsed.reasoning, parsed.tool_calls) == (text.removesuffix("</think>"), [])
    assert same_in_any_parts(f"<think>\n{text}") == []


def test_calls_at_the_end_of_reasoning():
    text = f"I look. {tagged(JSON)} Or {tagged(JSON)}\n{tagged(JSON)}"
    parsed = xj.tools.AnswerParser(tools=TOOLS, in_reasoning=True, most_calls=1).parse(text)
    assert parsed.reasoning == f"I look. {tagged(JSON)} Or" and parsed.content is None
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [OSLO]
    parser = xj.tools.AnswerParser(["hermes"], TOOLS, in_reasoning=True)
    assert parser.push("Hm <tool_call> and").reasoning == "Hm <tool_call> and"
    assert parser.push(f" {tagged(JSON)}\n", ended=True).tool_calls[0].name == "weather"
    assert xj.tools.AnswerParser([], in_reasoning=True).parse(text).reasoning == text


def test_an_object_with_a_name_is_an_answer_where_the_tools_are_not_known():
    assert xj.tools.parse_tool_calls('{"name": "Bob"}').content == '{"name": "Bob"}'
    assert xj.tools.parse_tool_calls(tagged('{"name": "Bob"}')).tool_calls[0].name == "Bob"


def test_gemma_thoughts_are_reasoning():
    parsed = xj.tools.parse_tool_calls("<|channel>thought\nwhy\n<channel|>Hi.")
    assert (parsed.reasoning, parsed.content) == ("why\n", "Hi.")
    assert xj.tools.parse_tool_calls("<|channel>thought\n<channel|>Hi.").content == "Hi."
