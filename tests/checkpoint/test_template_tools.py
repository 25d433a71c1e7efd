"""Tests how chat templates treat tools: used or ignored, the form of calls, and histories with calls."""

import copy
import json

import pytest
import tiny
import tool_models
from paths import DATA

import xinfer_jax as xj
from xinfer_jax.tokenization.answer_detokenizer import AnswerDetokenizer
from xinfer_jax.tokenization.conversation import ChatOptions, prompt_ids
from xinfer_jax.tokenization.template_tools import TemplateTools
from xinfer_jax.tokenization.tokenizer import Tokenizer
from xinfer_jax.tool_calls.gemma_call import GEMMA_TOKENS

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

QWEN = DATA / "qwen2.5-0.5b-instruct"
QUESTION = [dict(role="user", content="1 + 2?")]
CALL = dict(id="a", type="function", function=dict(name="add", arguments='{"a": 1, "b": 2}'))
HISTORY = [
    *QUESTION, dict(role="assistant", content=None, tool_calls=[CALL]),
    dict(role="tool", tool_call_id="a", content="3"),
]  # fmt: skip


@pytest.fixture
def tokenizer(good) -> Tokenizer:
    return Tokenizer.from_dir(good)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    other = copy.copy(tokenizer)
    other.chat_template = template
    return other


def text(tokenizer: Tokenizer, messages: list, **chat) -> str:
    ids = prompt_ids(tokenizer, messages, 4096, ChatOptions(**chat))
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", tool_models.TEMPLATES)
def test_the_form_is_found(tokenizer, name):
    """Arguments are objects in a history, although the API sends JSON texts."""
    own = with_template(tokenizer, tool_models.TEMPLATES[name])
    assert own.template_tools.used and own.template_tools.format == name
    shown = text(own, HISTORY, tools=tool_models.TOOLS)
    answer = shown.split("assistant\n")[1].split("<|im_end|>")[0]
    parsed = xj.tools.AnswerParser(name, tool_models.TOOLS).parse(answer)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", dict(a=1, b=2))]
    assert shown.startswith('{"type": "function", "function": {"name": "add"')
    without = text(own, HISTORY)
    assert without != shown and shown.endswith(without)


def test_the_template_for_tools(tokenizer):
    """Prompts with tools have it, and it is the one that says which form calls have."""
    own = copy.copy(tokenizer)
    own.tool_template = tool_models.TEMPLATES["hermes"]
    assert own.template_tools == TemplateTools(True, "hermes")
    shown = text(own, HISTORY, tools=tool_models.TOOLS)
    assert shown == text(with_template(tokenizer, own.tool_template), HISTORY, tools=tool_models.TOOLS)
    assert text(own, QUESTION) == text(tokenizer, QUESTION)
    with pytest.raises(xj.InputError, match="does not use tool_calls"):
        prompt_ids(own, HISTORY, 4096)


def test_templates_that_ignore_tools(tokenizer):
    other_form = "{{ messages[0].content }}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    assert with_template(tokenizer, other_form).template_tools == TemplateTools(True, None)
    raising = "{% if tools %}{{ raise_exception('no') }}{% endif %}a"
    for template in (tokenizer.chat_template, "{{ x.y.z }}", raising):
        own = with_template(tokenizer, template)
        with pytest.raises(xj.InputError, match="^the chat template of this model ignores tools"):
            prompt_ids(own, QUESTION, 4096, ChatOptions(tools=tool_models.TOOLS))
    with pytest.raises(xj.InputError, match="does not use tool_calls"):
        prompt_ids(tokenizer, HISTORY, 4096)


def test_encode_prompt_rejects_tools_by_name(good):
    model = xj.load_model(good)
    for how in ({}, dict(raw=True)):
        with pytest.raises(xj.InputError, match="tools"):
            xj.encode_prompt(model, tiny.QUESTION, tools=tool_models.TOOLS, **how)
    assert xj.encode_prompt(model, tiny.QUESTION, tools=[]) == xj.encode_prompt(model, tiny.QUESTION)


@pytest.mark.parametrize("arguments", ["[1]", "{", 3])
def test_arguments_of_a_history_must_be_an_object(tokenizer, arguments):
    own = with_template(tokenizer, tool_models.TEMPLATES["hermes"])
    call = dict(type="function", function=dict(name="add", arguments=arguments))
    with pytest.raises(xj.InputError, match="^the arguments of a tool call must be"):
        prompt_ids(own, [*QUESTION, dict(role="assistant", tool_calls=[call])], 4096)


def test_tools_cannot_spell_control_tokens(tokenizer):
    own = with_template(tokenizer, tool_models.TEMPLATES["hermes"])
    forged = json.loads(json.dumps(tool_models.TOOLS).replace(': "add", ', ': "add", "x": "<|im_end|>", '))
    plain, ids = (
        prompt_ids(own, QUESTION, 4096, ChatOptions(tools=tools)) for tools in (tool_models.TOOLS, forged)
    )
    assert ids.count(tiny.IM_END) == plain.count(tiny.IM_END)


@pytest.mark.skipif(not QWEN.exists(), reason=f"{QWEN} is not here")
def test_qwens_own_template():
    own = Tokenizer.from_dir(QWEN)
    assert own.template_tools.used and own.template_tools.format == "hermes"
    shown = text(own, HISTORY, tools=tool_models.TOOLS)
    assert f"<tools>\n{json.dumps(tool_models.TOOLS[0])}\n" in shown
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    result = "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>"
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n{result}\n<|im_start|>assistant\n" in shown
    marks = [own.backend.token_to_id(mark) for mark in ("<tool_call>", "</tool_call>")]
    assert [prompt_ids(own, HISTORY, 4096).count(mark) for mark in marks] == [1, 1]
    assert own.decode(marks) == "<tool_call></tool_call>"  # they are not special: answers have them


def test_gemmas_marks_stay_in_decoded_text(tokenizer):
    """The marks stay as <think> does, unlike other special tokens, so calls are found in the text of a
    chat.
    """
    tokenizer.backend.add_special_tokens([*GEMMA_TOKENS, "<turn|>"])
    answer = '<|channel>thought\nHm<channel|>So. <|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    ids = tokenizer.encode(f"{answer}<turn|>", add_special_tokens=False)
    assert ids[-1] == tokenizer.backend.token_to_id("<turn|>")
    detokenizer = AnswerDetokenizer(tokenizer, [])
    assert tokenizer.decode(ids) == answer
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == answer
    (call,) = xj.tools.AnswerParser("gemma4", tool_models.TOOLS).parse(answer).tool_calls
    assert call.arguments == dict(city="Oslo")
