"""Answers come apart: reasoning, content and calls in each form; malformed ones are text."""

import json
import random
import time

import pytest

import xinfer_jax as xj
from xinfer_jax.tool_calls.json_scanner import JSONObjectScanner
from xinfer_jax.tool_calls.tool_call_form import tool_call_forms

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

FORMATS = [form.name for form in tool_call_forms()]


def tool(name: str, **properties) -> dict:
    return dict(
        type="function", function=dict(name=name, parameters=dict(type="object", properties=properties))
    )


TOOLS = [
    tool("weather", city=dict(type="string"), days=dict(type="integer")),
    tool(
        "add",
        a=dict(type="number"),
        b=dict(anyOf=[dict(type="number"), dict(type="null")]),
        note=dict(enum=["x", "3"]),
        tags=dict(type="array"),
        sure=dict(type="boolean"),
        either=dict(type=["integer", "string"]),
        any={},
    ),
]
PARIS = '{"name": "weather", "arguments": {"city": "Paris \\"}{\\" <tool_call>", "days": 3}}'
ADD = '{"name": "add", "arguments": {"a": 1.5e3, "tags": [[], {"x": null}]}}'
XML = "<function=weather>\n<parameter=city>\nNew\n\nYork\n</parameter>\n</function>"


def tagged(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def found(text: str, tools=TOOLS, **options) -> tuple:
    parsed = xj.AnswerParser(tools=tools, **options).parse(text)
    return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


PARIS_CALL = ("weather", dict(city='Paris "}{" <tool_call>', days=3))
ADD_CALL = ("add", dict(a=1500.0, tags=[[], dict(x=None)]))
WHOLE = {
    # one or several, with text and whitespace around them
    tagged(PARIS): (None, [PARIS_CALL]),
    f"<tool_call>{ADD}</tool_call>": (None, [ADD_CALL]),
    f"I look.\n\n{tagged(PARIS)}\n{tagged(ADD)}\n": ("I look.", [PARIS_CALL, ADD_CALL]),
    f"{tagged(PARIS)} then {tagged(ADD)} done\n": ("then done\n", [PARIS_CALL, ADD_CALL]),
    f"<tool_call>\n{ADD}": (None, [ADD_CALL]),  # the end of the answer stands for the last mark
    # the other order of keys, and further keys
    tagged('{"arguments": {"a": 1}, "id": 7, "name": "add"}'): (None, [("add", dict(a=1))]),
    # Llama 3
    ADD.replace("arguments", "parameters"): (None, [ADD_CALL]),
    f"<|python_tag|>{ADD}; {PARIS}\n": (None, [ADD_CALL, PARIS_CALL]),
    f"{ADD} {PARIS};": (None, [ADD_CALL, PARIS_CALL]),
    # Qwen3-Coder
    f"Yes.\n{tagged(XML)}": ("Yes.", [("weather", dict(city="New\n\nYork"))]),
    f"<tool_call>{XML}{tagged(PARIS)}": (None, [("weather", dict(city="New\n\nYork")), PARIS_CALL]),
    tagged("<function=weather></function>"): (None, [("weather", {})]),
    tagged(
        "<function=add><parameter=a>\n3\n</parameter><parameter=b>None</parameter>\n<parameter=note>3</parameter>"
        '<parameter=tags>["é"]</parameter><parameter=sure>True</parameter><parameter=either>x</parameter>'
        '<parameter=any>{"y": 1}</parameter><parameter=other>4</parameter></function>'
    ): (
        None,
        [("add", dict(a=3, b=None, note="3", tags=["é"], sure=True, either="x", any=dict(y=1), other="4"))],
    ),
    # numbers that are too large are texts
    tagged(f"<function=add><parameter=a>1e999</parameter><parameter=any>{10**400}</parameter></function>"): (
        None,
        [("add", dict(a="1e999", any=10**400))],
    ),
    # reasoning
    f"<think>\nA{tagged(PARIS)}</think>\n\n{tagged(ADD)}": (None, [ADD_CALL]),
    # no call
    "": ("", []),
    " {x} ": (" {x} ", []),
    '{"city": "Paris"}': ('{"city": "Paris"}', []),
    f"It is {ADD}": (f"It is {ADD}", []),
    "<tool_cal> \n": ("<tool_cal> \n", []),
}
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
]


@pytest.mark.parametrize("text", WHOLE, ids=range(len(WHOLE)))
def test_calls(text):
    assert found(text) == WHOLE[text]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_calls_are_text_and_others_stay_calls(text):
    assert found(text) == (text, [])
    assert found(f"{text}\n{tagged(ADD)}") == (text, [ADD_CALL])
    assert found(f"a\n{tagged(ADD)}{text}") == (f"a{text}", [ADD_CALL])


@pytest.mark.parametrize("text", [PARIS, f"\n<tool_call>{PARIS}", tagged(XML)])
def test_an_incomplete_call_is_text(text):
    whole = f"{tagged(ADD)} {text}"
    end = whole.rindex("}") if "}" in text else whole.rindex("</function>")
    for cut in range(whole.index(text) + len("\n<tool_call>"), end):
        assert found(whole[:cut], formats=["hermes", "qwen3_coder"])[1] == [ADD_CALL]
        assert found(whole[:cut])[0] == whole[whole.index("</tool_call>") + 12 : cut].lstrip()


def test_formats_that_are_not_asked_for_are_text():
    for text in (tagged(ADD), tagged(XML), ADD, "<|tool_call>call:weather{}<tool_call|>"):
        of_text = [found(text, formats=[name])[1] != [] for name in FORMATS]
        assert sum(of_text) == 1 and found(text, formats=[]) == (text, [])
    assert found(tagged(XML), formats="qwen3_coder", tools=None)[1] == [("weather", dict(city="New\n\nYork"))]
    assert found(tagged(ADD) + tagged(PARIS) + "x", most_calls=1) == (None, [ADD_CALL])


def streamed(parts: list[str], **options) -> xj.ParsedAnswer:
    """What the deltas of the parts say; a call whose text came back as content is left out."""
    parser = xj.AnswerParser(tools=TOOLS, new_id=str, **options)
    texts = ["", ""]
    calls: dict[int, list] = {}
    for i, part in enumerate(parts):
        delta = parser.push(part, i == len(parts) - 1)
        texts[0] += delta.content
        texts[1] += delta.reasoning
        assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
        for call in delta.tool_calls:
            if call.index not in calls:
                assert call.index == len(calls) and call.id == str(call.index) and call.name
                calls[call.index] = [call.name, ""]
            else:
                assert call.id is None and call.name is None and call.arguments
            calls[call.index][1] += call.arguments
    complete = [calls[int(own)] for own, _, _ in parser._calls.calls]
    assert [(name, text) for name, text in complete] == [call[1:] for call in parser._calls.calls]
    return texts[0], texts[1], [tuple(call) for call in complete]


def test_any_parts_give_the_same():
    rng = random.Random(4)
    texts = [*WHOLE, *MALFORMED]
    pieces = [
        *'\n {}";a<',
        "<tool_call>",
        "</tool_call>",
        "tool_call>",
        "</",
        "<|",
        "<|python_tag|>",
        "<think>",
        "<|tool_call>",
        "<tool_call|>",
        'call:add{a:<|"|>',
        '<|"|>',
        "[",
        ",",
        "</function>",
    ]
    pieces += ["<tool_call>add", "<arg_key>any</arg_key>", "<arg_value>", "</arg_value>"]
    pieces += ["</think>", "nk>", XML, PARIS, ADD, ADD[:30], XML[:30], "</parameter>", "<function="]
    for number in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 9)))
        if number < 20 * len(texts):
            text = texts[number % len(texts)]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice([1, 2, 3, 5, len(text)])))
        parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        formats = rng.choice([FORMATS, *([name] for name in FORMATS)])
        assert streamed(parts, formats=formats) == streamed([text], formats=formats), (parts, formats)
        parsed = xj.AnswerParser(formats, TOOLS).parse(text)
        content, reasoning, calls = streamed(parts, formats=formats)
        assert (content, reasoning) == (parsed.content or "", parsed.reasoning or "")
        assert calls == [(call.name, call.arguments_json) for call in parsed.tool_calls]


def test_arguments_arrive_while_they_are_generated():
    """Also values that are texts in Qwen3-Coder's form."""
    for text in (tagged(PARIS), tagged(XML)):
        parser = xj.AnswerParser(tools=TOOLS)
        after = [sum(len(call.arguments) for call in parser.push(letter).tool_calls) for letter in text]
        assert sum(count > 0 for count in after) > 12


@pytest.mark.full
def test_time_is_linear_in_the_text():
    part = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><function=add><parameter=a>'
    started = time.monotonic()
    texts = (
        part,
        "<tool_call>",
        "<function=",
        "</function> ",
        "<tool_call><function=add><parameter=a>",
        tagged(ADD),
        '{"name": "add',
        "<tool_call>add<arg_key>any</arg_key><arg_value>1</tool_call>",
        "<tool_call>add<arg_key>any</arg_key><arg_value></arg_value> ",
    )
    for text in (
        *texts,
        "<|tool_call>call:add{a:",
        "<|tool_call>call:add{a:[",
        '<|tool_call>call:add{a:<|"|>',
    ):
        many = text * (200_000 // len(text))
        parser = xj.AnswerParser(tools=TOOLS)
        for i in range(0, len(many), 200):
            parser.push(many[i : i + 200])
        parser.push("", True)
        xj.parse_tool_calls(many, TOOLS)
    assert time.monotonic() - started < 60


def test_json_scanner_equals_json():
    rng = random.Random(1)
    pieces = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"a"',
        '"',
        "\\u12aF",
        "\\",
        "1",
        "-0.5E+3",
        "01",
        "true",
        "nul",
        " ",
        "\n",
    ]
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
    parsed = xj.parse_tool_calls(f"<think>\nwhy</think>\n\n{tagged(ADD)}")
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
    with pytest.raises(xj.InputError, match="formats may have hermes"):
        xj.AnswerParser("json")
