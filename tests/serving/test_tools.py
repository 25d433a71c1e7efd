"""Tools of the API: calls in responses and streams, histories with calls, fields that are rejected."""

import json

import pytest
import tool_models

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

QUESTION = [dict(role="user", content="1 + 2?")]
TOOLS = tool_models.TOOLS
SHAPE = dict(rows=2, capacity=1024, pages=40, chunk=64)
CALLS = [("add", dict(a=1, b=2)), ("weather", dict(city="Oslo"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> xj.Model:
    return xj.load_model(tool_models.write_calling_checkpoint(tmp_path_factory.mktemp("calls")))


@pytest.fixture(scope="module")
def server(model):
    with serving.run_server(model, engine=xj.EngineOptions(**SHAPE)) as served:
        yield served


def test_calls_in_a_response(server):
    (choice,) = server.ask("chat", messages=QUESTION, tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I look."
    assert message["reasoning"] == message["reasoning_content"] == "why"
    assert [tool_models.arguments(call) for call in message["tool_calls"]] == CALLS
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    several = server.ask("chat", messages=QUESTION, tools=TOOLS, n=2)["choices"]
    ids = [call["id"] for each in several for call in each["message"]["tool_calls"]]
    assert len({*ids, *(call["id"] for call in message["tool_calls"])}) == 6
    # The results go back with the calls as they came.
    results = [dict(role="tool", tool_call_id=call["id"], content="3") for call in message["tool_calls"]]
    history = [*QUESTION, message, *results]
    assert server.ask("chat", messages=history, tools=TOOLS)["choices"][0]["finish_reason"] == "tool_calls"
    tokens = server.call("POST", "/tokenize", dict(messages=history, tools=TOOLS))[1]["tokens"]
    text = server.service.tokenizer.decode(tokens, skip_special_tokens=False)
    assert '"name": "add", "arguments": {"a": 1, "b": 2}' in text and text.count('"description": "add"') == 1


def test_calls_in_a_stream(server):
    chunks = server.events(
        "chat", messages=QUESTION, tools=TOOLS, n=2, stream_options=dict(include_usage=True)
    )
    assert chunks.pop()["choices"] == []
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
        assert "".join(delta.get("content", "") for delta in deltas) == "I look."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
        entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
        for call, (name, arguments) in enumerate(CALLS):
            first, *others = [entry for entry in entries if entry["index"] == call]
            assert first["id"] and first["type"] == "function" and first["function"]["name"] == name
            assert not any({"id", "type"} & {*entry} or "name" in entry["function"] for entry in others)
            texts = [entry["function"]["arguments"] for entry in (first, *others)]
            assert json.loads("".join(texts)) == arguments
        assert all(deltas[:-1])


@pytest.mark.full
def test_a_schema_holds_for_the_answer_and_calls_stay_possible(server, model):
    """The schema constrains the text that is no call, whatever begins the answer, and the calls' arguments
    are valid.
    """
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = dict(type="json_schema", json_schema=dict(name="x", schema=dict(const=[3])))
    for more in (dict(response_format=schema), dict(structured_outputs=dict(choice=["[3]"]))):
        found = []
        for start in ("<tool_call>", "["):
            bias = {str(model.tokenizer.backend.token_to_id(start)): 100}
            asked = dict(messages=QUESTION, tools=TOOLS, parallel_tool_calls=False, logit_bias=bias, **more)
            (choice,) = server.ask("chat", **asked)["choices"]
            found.append((choice["finish_reason"], choice["message"]))
        (reason, message), (other, said) = found
        assert (reason, message["content"]) == ("tool_calls", None)
        assert [tool_models.arguments(call) for call in message["tool_calls"]] == CALLS[:1]
        assert (other, said["content"]) == ("stop", "[3]") and "tool_calls" not in said


def test_calls_stay_text_without_tools(server):
    for more in ({}, dict(tools=[]), dict(tools=TOOLS, tool_choice="none")):
        (choice,) = server.ask("chat", messages=QUESTION, **more)["choices"]
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "".join(tool_models.PARTS[3:])
    one = server.ask("chat", messages=QUESTION, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert [tool_models.arguments(call) for call in one["message"]["tool_calls"]] == CALLS[:1]
    (choice,) = server.ask("chat", messages=QUESTION, tools=TOOLS[1:])["choices"]  # `add` is not among them
    assert [tool_models.arguments(call) for call in choice["message"]["tool_calls"]] == CALLS[1:]
    assert '"add"' in choice["message"]["content"]


@pytest.mark.parametrize(
    "fields, reasoning, content",
    [
        (dict(stop=["hy", "ok."]), "why", "I lo"),
        (dict(stop=["hy"], stop_in_reasoning=True), "w", None),
        (dict(stop=["hyI", "<", "</think>I"]), "why", "I look."),  # no match across both, nor in the tags
        (dict(stop=["ok."], min_tokens=4), "why", "".join(tool_models.PARTS[3:])),
        (dict(stop=["ok.", "ame"], min_tokens=4), "why", 'I look.<tool_call>\n{"n'),
        (dict(stop=["ok."], min_tokens=3), "why", "I lo"),
        (dict(stop=["hy"], include_reasoning=False), None, "".join(tool_models.PARTS[3:])),
    ],
)
def test_stop_strings_count_in_the_content_and_after_min_tokens(server, fields, reasoning, content):
    (choice,) = server.ask("chat", messages=QUESTION, **fields)["choices"]
    message = choice["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    deltas = [chunk["choices"][0]["delta"] for chunk in server.events("chat", messages=QUESTION, **fields)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content", "") for delta in deltas) == (content or "")


def test_a_message_whose_reasoning_is_open_is_continued(server):
    for begun, reasoning in (("<think>", "why"), (" <think>why", "")):
        history = [*QUESTION, dict(role="assistant", content=begun)]
        (choice,) = server.ask("chat", messages=history, continue_final_message=True, tools=TOOLS)["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, "I look.")


def test_an_answer_that_is_cut_within_a_call(server):
    (choice,) = server.ask("chat", messages=QUESTION, max_tokens=9, tools=TOOLS)["choices"]
    text = "".join(tool_models.PARTS[3:9])
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == text
    chunks = server.events("chat", messages=QUESTION, max_tokens=9, tools=TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.full
def test_required_calls(server):
    """An answer is calls, whatever the model would write, and their arguments are valid."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    more = dict(messages=QUESTION, tools=TOOLS, temperature=1.5, max_tokens=400)
    named = dict(type="function", function=dict(name="weather"))
    for seed in range(2):
        for choice in ("required", named):
            asked = dict(more, seed=seed, tool_choice=choice)
            (found,) = server.ask("chat", parallel_tool_calls=False, **asked)["choices"]
            (call,) = found["message"]["tool_calls"]
            name, arguments = tool_models.arguments(call)
            assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
            if name == "weather":
                assert arguments["city"] in ("Oslo", "Paris") and len(arguments) == 1
            else:
                assert choice == "required" and all(0 <= arguments.pop(key) <= 9 for key in "ab")
                assert not arguments
    deltas = [chunk["choices"][0]["delta"] for chunk in server.events("chat", **asked)]
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    text = "".join(entry["function"]["arguments"] for entry in entries)
    assert entries[0]["function"]["name"] == "weather" and json.loads(text)["city"]
    status, body, _ = server.call("POST", "/v1/chat/completions", asked | dict(guided_regex="a"))
    assert status == 400 and body["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    "body, param",
    [
        (dict(tools=3), "tools"), (dict(tools=[dict(type="function")]), "tools"),
        (dict(tools=[*TOOLS, TOOLS[0]]), "tools"), (dict(tool_choice="required"), "tool_choice"),
        (dict(tools=TOOLS, tool_choice="any"), "tool_choice"),
        (dict(tools=TOOLS, tool_choice={}), "tool_choice"),
        (dict(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="x"))), "tool_choice"),
        (dict(tools=TOOLS, parallel_tool_calls=1), "parallel_tool_calls"),
        (dict(messages=[*QUESTION, dict(role="assistant", tool_calls=[3])]), "messages"),
    ],
    ids=lambda value: str(value)[-40:],
)  # fmt: skip
def test_bad_fields(server, body, param):
    status, found, _ = server.call("POST", "/v1/chat/completions", dict(messages=QUESTION) | body)
    assert (status, found["error"]["param"]) == (400, param)
