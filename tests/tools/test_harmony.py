"""Answers in Harmony come apart by their channels, whole and in parts; what is no header or call is text."""

import random

import pytest

import xinfer_jax as xj
from xinfer_jax.tools.harmony import CONTROL_TOKENS, FINAL
from xinfer_jax.tools.tool_messages import template_message

pytestmark = pytest.mark.oldest

TOOLS = [
    dict(type="function", function=dict(name=name, description=name, parameters=dict(type="object")))
    for name in ("add", "my.look-up")
]
ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
FINAL_TEXT = "<|start|>assistant<|channel|>final<|message|>Yes."
CALL = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": [1, "}"]}'
ADD = ("add", dict(a=[1, "}"]))
# text: (reasoning, content, calls)
WHOLE = {
    f"{ANALYSIS}{FINAL_TEXT}<|return|>": ("I think.", "Yes.", []),
    FINAL_TEXT.removeprefix("<|start|>assistant"): (None, "Yes.", []),
    f"{ANALYSIS}{PREAMBLE}{CALL}<|call|>": ("I think.", "I look.", [ADD]),
    f"{ANALYSIS}{CALL}": ("I think.", None, [ADD]),
    # the recipient before the channel, as the template writes it; a name with dots; spaces around arguments
    "to=functions.my.look-up<|channel|>commentary json<|message|> {} \n<|call|>": (
        None, None, [("my.look-up", {})]
    ),
    CALL.replace("commentary to", "analysis to"): (None, None, [ADD]),
    # several messages of a kind
    f"{ANALYSIS}{PREAMBLE}<|start|>assistant{ANALYSIS}{FINAL_TEXT}": (
        "I think.\nI think.", "I look.\nYes.", []
    ),
    # cut by max_tokens
    "<|channel|>analysis<|message|>I th": ("I th", None, []),
    f"{ANALYSIS}<|start|>assistant<|channel|>fin": ("I think.", None, []),
    f"{ANALYSIS}{CALL[:-1]}": ("I think.", '{"a": [1, "}"]', []),
    # not calls: another function or recipient, no object, numbers that are too large, text after the object
    CALL.replace("add", "sub"): (None, '{"a": [1, "}"]}', []),
    CALL.replace("functions.add", "python"): (None, '{"a": [1, "}"]}', []),
    CALL.replace('{"a', '["a'): (None, '["a": [1, "}"]}', []),
    CALL.replace("[1,", "[1e999,"): (None, '{"a": [1e999, "}"]}', []),
    f"{CALL} </tool_call> and<|call|>": (None, "</tool_call> and", [ADD]),
    # headers that are not as they should be
    "<|start|>assistant<|message|>Yes.": (None, "Yes.", []),
    f"{ANALYSIS} assistant<|channel|>final<|message|>Yes.": ("I think.", "Yes.", []),
    "<|channel|>analysis<|message|>A<|channel|>final <|constrain|>json<|message|>{}": ("A", "{}", []),
    "<|channel|>final<|message|>Y<|constrain|>es<|message|>.": (None, "Yes.", []),
    f"{ANALYSIS}{'x' * 3000}<|message|>y": ("I think.", "x" * 3000 + "y", []),
    "<|channel|>": (None, "", []),
    # no Harmony
    "to=functions": (None, "to=functions", []),
    "to=functions.add <|channel": (None, "to=functions.add <|channel", []),
    f"Yes. {ANALYSIS}": (None, f"Yes. {ANALYSIS}", []),
}  # fmt: skip


def parts_of(parsed: xj.ParsedAnswer) -> tuple:
    return parsed.reasoning, parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize("text", WHOLE, ids=range(len(WHOLE)))
def test_whole_answers_and_parts_of_them(text):
    reasoning, content, calls = WHOLE[text]
    assert parts_of(xj.parse_tool_calls(text, TOOLS)) == WHOLE[text]
    rng = random.Random(1)
    for most in (1, 2, 7, 40):
        parser = xj.AnswerParser(tools=TOOLS)
        deltas = []
        at = 0
        while at < len(text):
            size = rng.randint(1, most)
            deltas.append(parser.push(text[at : at + size]))
            at += size
        deltas.append(parser.push("", ended=True))
        assert "".join(delta.reasoning for delta in deltas) == (reasoning or "")
        # The beginning of what turns out to be no call may have been sent as one.
        assert "".join(delta.content for delta in deltas) == (content or "")
        entries = [entry for delta in deltas for entry in delta.tool_calls]
        assert parser.has_calls == bool(calls)
        if calls:
            assert [entry.name for entry in entries if entry.name] == [name for name, _ in calls]
            assert entries[0].id and not any(entry.id for entry in entries[1:])


def test_by_ids_a_spelled_control_token_is_text():
    """`harmony_header` tells that control tokens are characters: others are what the model wrote as text."""
    marked = ANALYSIS + FINAL_TEXT
    for name, mark in CONTROL_TOKENS.items():
        marked = marked.replace(name, mark)
    text = f"{marked} {FINAL_TEXT}"
    parsed = xj.AnswerParser([], harmony_header="assistant").parse(text)
    assert parts_of(parsed) == ("I think.", f"Yes. {FINAL_TEXT}", [])
    assert parts_of(xj.AnswerParser([], harmony_header="assistant").parse("Yes.")) == (None, "Yes.", [])
    begun = "assistant" + "".join(CONTROL_TOKENS.get(x, x) for x in ("<|channel|>", "final", "<|message|>"))
    assert FINAL.search(begun)
    assert parts_of(xj.AnswerParser([], harmony_header=begun).parse("Yes.")) == (None, "Yes.", [])


def test_calls_are_recognized_only_where_harmony_is_among_the_formats():
    parsed = xj.AnswerParser([], TOOLS, harmony_header="").parse("Yes.")
    assert parts_of(parsed) == (None, "Yes.", [])
    assert parts_of(xj.AnswerParser("hermes", TOOLS).parse(ANALYSIS)) == (None, ANALYSIS, [])


def test_messages_for_the_template():
    call = dict(type="function", function=dict(name="add", arguments='{"a": 1}'))
    message = dict(role="assistant", content="I look.", reasoning="I think.", tool_calls=[call])
    template = "<|channel|>{{ message.tool_calls }}"
    found = template_message(message, template)
    assert (found["thinking"], found["content"]) == ("I think.\nI look.", "")
    assert "thinking" not in template_message(message, "{{ message.tool_calls }}")
    with pytest.raises(xj.InputError, match="one call per message, got 2"):
        template_message(message | dict(tool_calls=[call, call]), template)
    assert template_message(dict(role="assistant", content="", tool_calls=[]), template) == dict(
        role="assistant", content=""
    )
