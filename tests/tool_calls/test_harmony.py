"""Answers in Harmony come apart by their channels, whole and in parts. What is no header or call is text."""

import json
import random

import harmony_models
import pytest
from answer_parts import pushed

import xinfer_jax as xj
from xinfer_jax.tokenization.answer_detokenizer import AnswerDetokenizer
from xinfer_jax.tokenization.conversation import harmony_header, prompt_ids
from xinfer_jax.tokenization.tokenizer import CHATML, Tokenizer
from xinfer_jax.tool_calls.harmony import CONTROL_TOKENS, last_header
from xinfer_jax.tool_calls.tool_messages import template_message

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

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
    # the end of an answer: after a header's beginning, and after a text without a header
    "<|channel|>analysis<|message|>A<|start|>assistant": ("A", None, []),
    f"{ANALYSIS}Yes.<|end|><|return|>": ("I think.", "Yes.", []),
    # no Harmony
    "to=functions": (None, "to=functions", []),
    f"to=functions.add{' ' * 9}<|channel|>": (None, f"to=functions.add{' ' * 9}<|channel|>", []),
    f"{' ' * 99}{ANALYSIS}": (None, f"{' ' * 99}{ANALYSIS}", []),
    "to=functions.add <|channel": (None, "to=functions.add <|channel", []),
    f"Yes. {ANALYSIS}": (None, f"Yes. {ANALYSIS}", []),
}  # fmt: skip


def parts_of(parsed: xj.tools.ParsedAnswer) -> tuple:
    return parsed.reasoning, parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]


@pytest.mark.parametrize("text", WHOLE, ids=range(len(WHOLE)))
def test_whole_answers_and_parts_of_them(text):
    reasoning, content, calls = WHOLE[text]
    assert parts_of(xj.tools.parse_tool_calls(text, TOOLS)) == WHOLE[text]
    rng = random.Random(1)
    for most in (1, 2, 7, 40):
        parts = []
        while (at := sum(map(len, parts))) < len(text):
            parts.append(text[at : at + rng.randint(1, most)])
        parser = xj.tools.AnswerParser(tools=TOOLS, new_id=str)
        said, thought, begun = pushed(parser, [*parts, ""])
        assert (thought or None, said, parser.has_calls) == (reasoning, content or "", bool(calls))
        assert [(name, json.loads(arguments)) for name, arguments in begun] == calls


def test_spaces_after_a_call_that_follows_a_malformed_one():
    text = f"{CALL[:-1]}<|call|>{CALL}   B<|end|>"
    content = '{"a": [1, "}"]\n   B'
    assert parts_of(xj.tools.parse_tool_calls(text, TOOLS)) == (None, content, [ADD])
    parser = xj.tools.AnswerParser(tools=TOOLS)
    assert "".join(parser.push(letter).content for letter in text) == content


def marked(text: str) -> str:
    for name, mark in CONTROL_TOKENS.items():
        text = text.replace(name, mark)
    return text


def test_by_ids_a_spelled_control_token_is_text():
    """`harmony_header` tells that control tokens are characters: others are what the model wrote as text."""
    text = f"{marked(ANALYSIS + FINAL_TEXT)} {FINAL_TEXT}"
    parsed = xj.tools.AnswerParser([], harmony_header="assistant").parse(text)
    assert parts_of(parsed) == ("I think.", f"Yes. {FINAL_TEXT}", [])
    for text, content in (("Yes.", "Yes."), ("Yes.<|return|>", "Yes."), (" to=functions.add", "")):
        parsed = xj.tools.AnswerParser([], harmony_header="assistant").parse(marked(text))
        assert parts_of(parsed) == (None, content, [])
    begun = marked("assistant<|channel|>final<|message|>")
    assert parts_of(xj.tools.AnswerParser([], harmony_header=begun).parse("Yes.")) == (None, "Yes.", [])


def test_the_header_at_the_end_of_a_text():
    """The header is found as the parser finds it: the first channel after the last beginning of a message
    counts.
    """
    analysis = "<|channel|>analysis<|message|>A"
    for text in (
        "<|channel|>final<|message|>", "<|channel|> final <|constrain|>json<|message|>",
        "<|start|>assistant<|channel|>final json<|message|>", f"{analysis}<|channel|>final<|message|>",
        f"{analysis}<|end|><|start|>assistant<|channel|>final<|channel|>analysis<|message|>",
    ):  # fmt: skip
        assert last_header(marked(text)) == ("final", None), text
    for text, fields in {
        "<|channel|>finally<|message|>": ("finally", None),
        "<|channel|>final<|end|><|start|>assistant<|channel|>analysis<|message|>": ("analysis", None),
        "<|channel|>analysis<|channel|>final<|message|>": ("analysis", None),
        " to=functions.add<|channel|>commentary json<|message|>": ("commentary", "add"),
        f"{analysis}<|end|>{CALL.partition('{')[0]}": ("commentary", "add"),
        f"{analysis} to=functions.add<|channel|>commentary<|message|>": ("commentary", None),
        f"{analysis}B<|message|>": None,
    }.items():
        assert last_header(marked(text)) == fields, text


def test_stop_strings_have_all_of_a_control_token_or_nothing():
    tokenizer = Tokenizer(harmony_models.tokenizer(), chat_template=None, special_tokens={}, eos_token_ids=())
    ids = [*map(tokenizer.backend.token_to_id, harmony_models.FINAL)]
    whole = tokenizer.decode(ids)
    assert whole == "".join(harmony_models.FINAL)
    spelled = whole.index(" <|chan")  # in ordinary tokens
    for stop, end in (("<|", spelled + 1), ("|>s", spelled + 10), ("<|end|>", whole.index("<|end|>"))):
        for is_marked in (False, True):
            answer = AnswerDetokenizer(tokenizer, [stop], marked=is_marked)
            text = "".join(map(answer.push, ids)) + answer.finish()
            assert text == (marked(whole[:spelled]) + whole[spelled:] if is_marked else whole)[: len(text)]
            assert is_marked or text == whole[:end]


def test_another_chat_template_with_this_vocabulary_has_no_channels():
    of_template = {}
    for template in (harmony_models.TEMPLATE, CHATML):
        tokenizer = Tokenizer(
            harmony_models.tokenizer(), chat_template=template, special_tokens={}, eos_token_ids=()
        )
        ids = prompt_ids(tokenizer, "?", 500)
        of_template[template] = harmony_header(tokenizer, ids)
    assert of_template == {harmony_models.TEMPLATE: "assistant", CHATML: None}


def test_calls_are_recognized_only_where_harmony_is_among_the_formats():
    parsed = xj.tools.AnswerParser([], TOOLS, harmony_header="").parse("Yes.")
    assert parts_of(parsed) == (None, "Yes.", [])
    assert parts_of(xj.tools.AnswerParser("hermes", TOOLS).parse(ANALYSIS)) == (None, ANALYSIS, [])


def test_messages_for_the_template():
    call = dict(type="function", function=dict(name="add", arguments='{"a": 1}'))
    message = dict(role="assistant", content="I look.", reasoning="I think.", tool_calls=[call])
    template = "<|channel|>{{ message.tool_calls }}"
    found = template_message(message, template)
    assert (found["thinking"], found["content"]) == ("I think.\nI look.", "")
    assert "thinking" not in template_message(message, "{{ message.tool_calls }}")
    assert template_message(dict(role="assistant", content="A", tool_calls=None), template) == dict(
        role="assistant", content="A"
    )
    assert template_message(message | dict(thinking=5), template)["content"] == "I look."  # not ours
    with pytest.raises(xj.InputError, match="one call per message, got 2"):
        template_message(message | dict(tool_calls=[call, call]), template)
    assert template_message(dict(role="assistant", content="", tool_calls=[]), template) == dict(
        role="assistant", content=""
    )
