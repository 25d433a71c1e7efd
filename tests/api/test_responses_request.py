"""The Responses API: bodies as those of chats, and answers of chats as items and events of its output."""

import base64
import json

import pytest

from xinfer_jax.api.fields import BodyError
from xinfer_jax.api.responses_output import OutputItems, TokenEntries
from xinfer_jax.api.responses_request import (
    ENCRYPTED,
    LOGPROBS,
    chat_error,
    encrypt_reasoning,
    parse_responses_request,
)

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

CALL = dict(
    type="function_call", id="fc_1", call_id="c1", name="add", arguments='{"a": 1}', status="completed"
)
OUTPUT = dict(type="function_call_output", call_id="c1", output="3")
TOOL_CALL = dict(id="c1", type="function", function=dict(name="add", arguments='{"a": 1}'))
TOOL_CALL_2 = dict(TOOL_CALL, id="c2")


def reasoning(text: str, **more) -> dict:
    return (
        dict(type="reasoning", id="rs_1", summary=[], content=[dict(type="reasoning_text", text=text)]) | more
    )


def answer(text: str) -> dict:
    part = dict(type="output_text", text=text, annotations=[], logprobs=[])
    return dict(type="message", role="assistant", id="msg_1", status="completed", content=[part])


def messages(given, **more) -> list[dict]:
    return parse_responses_request(dict(input=given, **more)).chat["messages"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Hi", [dict(role="user", content="Hi")]),
        ([dict(role="user", content=[dict(type="input_text", text="a"), dict(type="input_text", text="b")])],
         [dict(role="user", content="ab")]),
        ([reasoning("why"), answer("I look."), CALL, dict(CALL, call_id="c2"), OUTPUT],
         [dict(role="assistant", content="I look.", reasoning="why", tool_calls=[TOOL_CALL, TOOL_CALL_2]),
          dict(role="tool", tool_call_id="c1", content="3")]),
        ([CALL, OUTPUT, dict(CALL, call_id="c2")],
         [dict(role="assistant", content=None, tool_calls=[TOOL_CALL]),
          dict(role="tool", tool_call_id="c1", content="3"),
          dict(role="assistant", content=None, tool_calls=[TOOL_CALL_2])]),
        ([answer("a"), answer("b"), reasoning("c"), reasoning("d")],
         [dict(role="assistant", content="a"), dict(role="assistant", content="b"),
          dict(role="assistant", content=None, reasoning="c"),
          dict(role="assistant", content=None, reasoning="d")]),
        ([CALL, answer("a")],
         [dict(role="assistant", content=None, tool_calls=[TOOL_CALL]), dict(role="assistant", content="a")]),
        ([reasoning("", encrypted_content=encrypt_reasoning("wärum")), answer("a")],
         [dict(role="assistant", content="a", reasoning="wärum")]),
        ([reasoning("", summary=[dict(type="summary_text", text="short")])],
         [dict(role="assistant", content=None, reasoning="short")]),
        ([reasoning(""), answer("a")], [dict(role="assistant", content="a")]),
        ([dict(OUTPUT, output=[dict(type="input_text", text="4")])],
         [dict(role="tool", tool_call_id="c1", content="4")]),
        ([dict(role="assistant", content=[dict(type="refusal", refusal="No.")])],
         [dict(role="assistant", content="No.")]),
    ],
)  # fmt: skip
def test_items_are_messages_of_a_chat(given, wanted):
    assert messages(given) == wanted


def test_system_messages_at_the_beginning_become_one():
    developer = dict(role="developer", content="Be kind.")
    user = dict(role="user", content="Hi")
    assert messages([user], instructions="Be brief.")[0] == dict(role="system", content="Be brief.")
    assert messages([developer, user]) == [developer, user]
    joined = messages([developer, user, developer], instructions="Be brief.")
    assert joined == [dict(role="system", content="Be brief.\n\nBe kind."), user, developer]


def test_fields_become_those_of_a_chat():
    schema = dict(type="object")
    body = dict(
        input="Hi", model="m", temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=["x"], user="me",
        max_output_tokens=7, store=True, background=False, truncation="disabled", metadata=dict(a="b"),
        reasoning=dict(effort="low", summary="auto"), parallel_tool_calls=False, top_logprobs=2,
        include=[LOGPROBS, ENCRYPTED], tool_choice=dict(type="function", name="add"),
        tools=[dict(type="function", name="add", parameters=schema, strict=True, description=None)],
        text=dict(verbosity="low", format=dict(type="json_schema", name="x", schema=schema, strict=True)),
        previous_response_id=None, max_tool_calls=3,
    )  # fmt: skip
    request = parse_responses_request(body)
    assert request.encrypts_reasoning
    assert request.chat == dict(
        messages=[dict(role="user", content="Hi")], model="m", temperature=0.5, top_p=0.9, top_k=5, seed=3,
        stop=["x"], user="me", max_completion_tokens=7, truncation="disabled", metadata=dict(a="b"),
        reasoning_effort="low", parallel_tool_calls=False, logprobs=True, top_logprobs=2,
        tools=[dict(type="function", function=dict(name="add", parameters=schema, strict=True))],
        tool_choice=dict(type="function", function=dict(name="add")),
        response_format=dict(type="json_schema", json_schema=dict(name="x", schema=schema, strict=True)),
    )  # fmt: skip
    plain = parse_responses_request(dict(input="Hi", text=dict(format=dict(type="json_object"))))
    assert plain.chat["response_format"] == dict(type="json_object") and not plain.encrypts_reasoning


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        (dict(input=None), "input", "must be a text, or a list of items"),
        (dict(input=[]), "input", "must be a text, or a list of items"),
        (dict(input=[dict(type="item_reference", id="x")]), "input", "item 0 of input must have a type of"),
        (dict(input=[dict(OUTPUT, call_id=None)]), "input", "item 0 of input: call_id must be a text"),
        (dict(input=[dict(CALL, arguments=dict(a=1))]), "input", "item 0 of input: arguments must be a text"),
        (dict(input=[dict(role="user", content=[dict(type="input_image")])]), "input", "must be a text"),
        (dict(input=[reasoning("", encrypted_content="?")]), "input", "encrypted_content is not of this"),
        (dict(previous_response_id="resp_1"), "previous_response_id", "send the whole conversation as input"),
        (dict(conversation="c"), "conversation", "send the whole conversation as input"),
        (dict(background=True), "background", "stream the response"),
        (dict(messages=[]), "messages", "give input"),
        (dict(max_tokens=3), "max_tokens", "give max_output_tokens"),
        (dict(max_output_tokens=0), "max_output_tokens", "whole number from 1"),
        (dict(n=2), "n", "send several requests"),
        (dict(logprobs=True), "logprobs", LOGPROBS),
        (dict(top_logprobs=3), "top_logprobs", LOGPROBS),
        (dict(include=["file_search_call.results"]), "include", "got 'file_search_call.results'"),
        (dict(tools=[dict(type="web_search")]), "tools", "got 'web_search'"),
        (dict(tools=[3]), "tools", "got 3"),
        (dict(tool_choice=dict(type="allowed_tools", mode="auto", tools=[])), "tool_choice", "as an object"),
        (dict(text=dict(form=3)), "text", "'form' is not known"),
        (dict(text=dict(format="json")), "text", "format must be an object"),
        (dict(reasoning=dict(mode="pro")), "reasoning", "'mode' is not known"),
        (dict(instructions=3), "instructions", "must be a text"),
        (dict(metadata=3), "metadata", "must be an object"),
    ],
)  # fmt: skip
def test_invalid_bodies_are_rejected_with_the_field_at_fault(body, param, why):
    with pytest.raises(BodyError) as caught:
        parse_responses_request(dict(input="Hi") | body)
    assert caught.value.param == param and why in str(caught.value)


def test_errors_of_the_chat_have_this_apis_names():
    error = chat_error(
        BodyError("messages", "with max_tokens 9 exceeds the limit", "context_length_exceeded")
    )
    assert str(error) == "with max_output_tokens 9 exceeds the limit"
    assert (error.param, error.code) == ("input", "context_length_exceeded")
    assert chat_error(BodyError("response_format", "response_format: no")).param == "text"
    assert chat_error(BodyError("temperature", "temperature must be")).param == "temperature"


# --- output -------------------------------------------------------------------------------------------------


def entry(token: str) -> dict:
    return dict(token=token, bytes=list(token.encode()), logprob=-1.0, top_logprobs=[])


DELTAS = [
    (dict(role="assistant", content=""), []),
    (dict(reasoning="wh"), ["<think>", "wh"]),
    (dict(reasoning="y"), ["y"]),
    (dict(content="a "), ["</think>", "a ", "b"]),
    (dict(content="b"), []),
    (dict(tool_calls=[dict(index=0, id="c1", function=dict(name="add", arguments=""))]), ["CALL"]),
    (dict(tool_calls=[dict(index=0, function=dict(arguments='{"a":'))]), []),
    (dict(tool_calls=[dict(index=0, function=dict(arguments=" 1}"))]), []),
    (dict(tool_calls=[dict(index=1, id="c2", function=dict(name="add", arguments='{"a"'))]), ["b", "END"]),
]


def stream(is_cut: bool) -> tuple[OutputItems, list[dict]]:
    items = OutputItems("7", True, True)
    events = [event for delta, tokens in DELTAS for event in items.push(delta, list(map(entry, tokens)))]
    return items, json.loads(json.dumps(events + items.finish(is_cut)))


def test_events_tell_of_the_items():
    items, events = stream(is_cut=False)
    names = [event["type"].removeprefix("response.") for event in events]
    text = "output_item.added content_part.added output_text.delta output_text.delta output_text.done"
    call = "function_call_arguments.done output_item.done"
    assert " ".join(names) == (
        f"{text.replace('output_text', 'reasoning_text')} content_part.done output_item.done"
        f" {text} content_part.done output_item.done"
        f" output_item.added function_call_arguments.delta function_call_arguments.delta {call}"
        f" output_item.added function_call_arguments.delta {call}"
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == items.items and [item["id"] for item in begun] == [item["id"] for item in done]
    assert [item["status"] for item in begun] == ["in_progress"] * 4
    assert [item["status"] for item in done] == ["completed", "completed", "completed", "incomplete"]
    for event in events:
        assert event["output_index"] == int(event.get("item_id", event.get("item", {}).get("id"))[-1])
    first, message, call, _ = done
    assert first["content"] == [dict(type="reasoning_text", text="why")] and items.reasoning == "why"
    assert base64.b64decode(first["encrypted_content"]) == b"why"
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "add", '{"a": 1}')
    (part,) = message["content"]
    assert part["text"] == "a b" and [one["token"] for one in part["logprobs"]] == ["a ", "b"]
    (noted,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert noted["logprobs"] == part["logprobs"] and noted["text"] == "a b"


def test_whole_message_gives_the_items_of_its_stream():
    streamed, _ = stream(is_cut=True)
    calls = [
        dict(id="c1", function=dict(name="add", arguments='{"a": 1}')),
        dict(id="c2", function=dict(name="add", arguments='{"a"')),
    ]
    whole = OutputItems("7", True, True)
    tokens = [entry(token) for _, tokens in DELTAS for token in tokens]
    whole.push(dict(reasoning="why", content="a b", tool_calls=calls), tokens)
    whole.finish(True)
    assert whole.items == streamed.items


def test_an_answer_without_text_is_an_empty_message():
    items = OutputItems("7", False, False)
    items.finish(True)
    (message,) = items.items
    assert message["status"] == "incomplete"
    assert message["content"] == [dict(type="output_text", text="", annotations=[])]


def test_entries_are_those_of_the_tokens_that_a_text_has():
    entries = TokenEntries()
    tokens = ["ab", "c", "\ufffd", "\ufffd", "c", "END"]
    given = [entry(token) for token in tokens]
    given[2]["bytes"], given[3]["bytes"] = [0xC3], [0xA4]  # of one character
    entries.append(given)
    assert entries.of_text("b") == given[:1]
    assert entries.of_text("cä") == given[1:4]
    assert entries.of_text("c") == given[4:5]
    assert entries.of_text("c") == [] == entries.of_text("")
