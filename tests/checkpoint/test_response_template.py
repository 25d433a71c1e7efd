"""Answers come apart as a checkpoint's `response_template` says, whole and split at every character."""

import json
import random

import pytest
import tool_models
from response_templates import BRACKETS, GEMMA, LINES, PYTHON, XML

import xinfer_jax as xj
from xinfer_jax.tokenization.response_template import parse_response_template
from xinfer_jax.tokenization.template_splitter import TemplateSplitter
from xinfer_jax.tokenization.tokenizer import Tokenizer

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

ADD = ("add", dict(a=1, b=2))
OSLO = ("weather", dict(city="Oslo"))
ANSWERS = [
    (BRACKETS, "Hi.</s>", ("Hi.", None, [])),
    (BRACKETS, "[THINK]why [/THI[/THINK] Hi. \n[CAL</s>", ("Hi. \n[CAL", "why [/THI", [])),
    (
        BRACKETS, 'So:\n[CALL]add{"a": 1, "b": 2}[/CALL]\n[CALL]weather {"city": "Oslo"}[/CALL]<|end|>',
        ("So:", None, [ADD, OSLO]),
    ),
    (BRACKETS, '[CALL]add{"a": 1, "b": "2"}', (None, None, [ADD])),
    (BRACKETS, "[CALL]add{bad}[/CALL] x</s>", ("[CALL]add{bad}[/CALL]\nx", None, [])),
    (BRACKETS, "[CALL]other{}[/CALL]", ("[CALL]other{}[/CALL]", None, [])),
    (XML, "<t>a</t>\n<f=add>\n<p=a>1</p><p=b>\n2\n</p></f>\nok", ("ok", "a", [ADD])),
    (XML, "<f=weather><p=city>Oslo</p></f><f=", ("<f=", None, [OSLO])),
    (PYTHON, "Hm.<|calls|>[add(a=1, b=2), weather(city='Oslo')]<|/calls|></s>", ("Hm.", None, [ADD, OSLO])),
    (PYTHON, "<|calls|>[add(1, b=2)]<|/calls|>", ("<|calls|>[add(1, b=2)]<|/calls|>", None, [])),
    (PYTHON, "<|calls|>[add(b={1})]<|/calls|>", ("<|calls|>[add(b={1})]<|/calls|>", None, [])),
    (
        PYTHON, "<|calls|>[add(a=[true, {'x': null}], b=-1)]<|/calls|>",
        (None, None, [("add", dict(a=[True, dict(x=None)], b=-1))]),
    ),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', (None, None, [OSLO])),
    (LINES, "<call>tool: add\n</call>", (None, None, [("add", dict(tool="add"))])),
]  # fmt: skip


def split(spec: dict, parts: list[str], begun: str = "") -> xj.tools.AnswerParser:
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tool_models.TOOLS}
    splitter = TemplateSplitter(parse_response_template(spec), begun, tools, None, str)
    parser = xj.tools.AnswerParser([], splitter=splitter)
    deltas = [parser.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas) if splitter.found else None
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [(call.id, call.name, call.arguments) for call in calls] == splitter.calls
    return content or None, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("spec, text, expected", ANSWERS, ids=range(len(ANSWERS)))
def test_answers_come_apart(spec, text, expected):
    assert split(spec, [text]) == expected
    assert split(spec, [*text]) == expected
    for at in range(1, len(text)):
        assert split(spec, [text[:at], text[at:]]) == expected, text[:at]


def test_any_parts_of_any_text_give_the_same():
    rng = random.Random(1)
    pieces = [
        "[THINK]",
        "[/THINK]",
        "\n",
        " ",
        "[CALL]add",
        '{"a": 1}',
        "[/CALL]",
        "</s>",
        "<|end|>",
        "<|",
        "[",
        "a",
    ]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 9)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice([1, 2, len(text)])))
        parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(BRACKETS, parts) == split(BRACKETS, [text]), parts


def test_transformers_finds_the_same():
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    for spec, text, (content, reasoning, calls) in ANSWERS:
        if "other" in text or "ad" in text and not calls:
            continue  # it raises, or keeps functions that are not known
        found = chat_parsing.parse_response(text, spec, prefix="", tools=tool_models.TOOLS)
        own = found.get("tool_calls", [])
        own = [own] if isinstance(own, dict) else own
        functions = [call.get("function", call) for call in own]
        assert [(call["name"], call["arguments"]) for call in functions] == calls
        if not calls:
            assert found.get("content") == content
        assert (
            next((found[key] for key in ("reasoning_content", "thinking") if key in found), None) == reasoning
        )


@pytest.mark.parametrize(
    "text, expected",
    [
        ('[THINK]why\n[CALL]add{"a": 1, "b": 2}[/CALL]', (None, "why", [ADD])),
        ('[THINK][CALL]no{}[/CALL] no\n[CALL]add{"a": 1, "b": "2"}', (None, "[CALL]no{}[/CALL] no", [ADD])),
        ("[THINK]why [CALL]add{}[/CALL][/THINK]Hi.", ("Hi.", "why [CALL]add{}[/CALL]", [])),
        ("[THINK][CALL]add{}[/CALL] and", (None, "[CALL]add{}[/CALL] and", [])),
    ],
    ids=range(4),
)
def test_calls_at_the_end_of_reasoning_that_is_open(text, expected):
    assert split(BRACKETS, [text]) == split(BRACKETS, [*text]) == expected
    assert split(BRACKETS, [text.removeprefix("[THINK]")], "[THINK]") == expected


def test_what_a_prompt_has_begun_counts():
    template = parse_response_template(BRACKETS)
    begun = template.begun("<|assistant|>old<|user|>x<|assistant|>[THINK]")
    assert begun == "[THINK]"
    assert split(BRACKETS, ["why[/THINK]Hi."], begun) == ("Hi.", "why", [])
    assert template.begun("none") == ""


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(version=2), "version 1"),
        (dict(fields={}), "must have fields"),
        (dict(start_anchor=None), "must have start_anchor"),
        (dict(fields=dict(content={}, reasoning={})), "two fields"),
        (dict(fields=dict(content=dict(content="yaml"))), "must be one of text"),
        (dict(fields=dict(content=dict(shut="x"))), "another form"),
        (dict(fields=dict(content=dict(close=[]))), "a text or several"),
        (dict(fields=dict(content=dict(close_pattern="a(?=b)"))), "is not served: a group with"),
        (dict(fields=dict(content=dict(close_pattern="a*"))), "matches the empty text"),
        (dict(fields=dict(content=dict(close_pattern="(?:a+b?)*c"))), "a repetition within a repetition"),
        (dict(fields=dict(content=dict(close_pattern=r"\s*.?[ab]*x?a+c"))), "of the same characters"),
        (dict(fields=dict(content=dict(content="xml-inline"))), "a group named key"),
        (
            dict(fields=dict(c=dict(content="xml-inline", content_args=dict(tag_pattern="(?P<key>.*).*a")))),
            "tag_pattern .* is not served",
        ),
    ],
)
def test_other_templates_are_rejected(change, said):
    with pytest.raises(xj.InputError, match=said):
        parse_response_template(BRACKETS | change)


def test_a_parser_of_another_form_leaves_content():
    """Errors that the checks of a template do not know are found with a call, which then is text."""
    field = XML["fields"]["tool_calls"]
    wrong = field | dict(content_args=field["content_args"] | dict(value_parser="json"))
    template = parse_response_template(XML | dict(fields=XML["fields"] | dict(tool_calls=wrong)))
    splitter = TemplateSplitter(template, "", None, None, str)
    assert splitter.push("<f=a><p=b>1</p></f>", True)[1] == "<f=a><p=b>1</p></f>"


def test_a_checkpoint_declares_it(good, tmp_path, caplog):
    """It holds where the chat template writes calls in no known form. One that is not served is left out."""
    config = json.loads((good / "tokenizer_config.json").read_text())
    for template, spec, is_used in (
        ("{{ messages[0].content }}", BRACKETS, True),
        (tool_models.TEMPLATES["hermes"], BRACKETS, False),
        ("{{ messages[0].content }}", BRACKETS | dict(version=2), None),
    ):
        (tmp_path / "tokenizer.json").write_bytes((good / "tokenizer.json").read_bytes())
        tiny_config = config | dict(chat_template=template, response_template=spec)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tiny_config))
        if is_used is None:
            assert Tokenizer.from_dir(tmp_path).response_template is None
            assert "as the checkpoint says" in caplog.text
        else:
            assert (Tokenizer.from_dir(tmp_path).answer_template is not None) == is_used
