"""Harmony conversations through the server: channels, calls, histories, and spelled control tokens."""

import json

import harmony_models
import pytest
import tool_models

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # else test_tools.py

QUESTION = [dict(role="user", content="1 + 2?")]
TOOLS = tool_models.TOOLS
ADD = ("add", dict(a=1, b=2))
SAID = "3 <|channel|>sure<|message|>!"  # of ordinary tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> xj.Model:
    return xj.load_model(harmony_models.write_checkpoint(tmp_path_factory.mktemp("harmony")))


@pytest.fixture(scope="module")
def server(model):
    with serving.run_server(
        model, engine=xj.EngineOptions(rows=2, capacity=1024, pages=40, chunk=64)
    ) as served:
        yield served


@pytest.fixture(scope="module")
def final(model) -> dict:
    """Fields with which the answer is on the channel `final`."""
    return dict(logit_bias={str(model.tokenizer.backend.token_to_id(harmony_models.FIRST_OF_FINAL)): 4})


def rendered(server, messages, **more) -> str:
    """The prompt of a conversation, as text."""
    tokens = server.call("POST", "/tokenize", dict(messages=messages) | more)[1]["tokens"]
    return server.service.tokenizer.decode(tokens, skip_special_tokens=False)


def joined(chunks, name) -> str:
    return "".join(chunk["choices"][0]["delta"].get(name, "") for chunk in chunks)


def test_channels_of_an_answer(server, final):
    """The model spells control tokens in its answer: they are text."""
    (choice,) = server.ask("chat", messages=QUESTION, **final)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "stop" and message["content"] == SAID
    assert message["reasoning"] == message["reasoning_content"] == "It is 3."
    chunks = server.events("chat", messages=QUESTION, **final)
    assert joined(chunks, "content") == SAID and joined(chunks, "reasoning") == "It is 3."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    cut = server.ask("chat", messages=QUESTION, max_tokens=7, **final)["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] is None
    stopped = server.ask("chat", messages=QUESTION, stop="|>su", **final)["choices"][0]["message"]
    assert stopped["content"] == "3 <|channel"
    stopped = server.ask("chat", messages=QUESTION, stop="<", **final)["choices"][0]["message"]
    assert (stopped["content"], stopped["reasoning"]) == ("3 ", "It is 3.")
    for stop in ("is", "assistant", "analysis"):  # of the reasoning, and of headers
        message = server.ask("chat", messages=QUESTION, stop=stop, **final)["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == (SAID, "It is 3.")
    cut = server.ask("chat", messages=QUESTION, stop="3.", stop_in_reasoning=True, **final)["choices"][0]
    assert (cut["message"]["content"], cut["message"]["reasoning"]) == (None, "It is ")


def test_a_call(server):
    (choice,) = server.ask("chat", messages=QUESTION, tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"]) == ("I look.", "I must add.")
    assert list(map(tool_models.arguments, message["tool_calls"])) == [ADD]
    chunks = server.events("chat", messages=QUESTION, tools=TOOLS)
    assert joined(chunks, "content") == "I look." and joined(chunks, "reasoning") == "I must add."
    entries = [entry for chunk in chunks for entry in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert entries[0]["id"] and entries[0]["function"]["name"] == "add"
    assert json.loads("".join(entry["function"]["arguments"] for entry in entries)) == ADD[1]
    # Without tools what it writes to a function is content.
    message = server.ask("chat", messages=QUESTION)["choices"][0]["message"]
    assert message["content"] == 'I look.\n{"a": 1, "b": 2}' and "tool_calls" not in message


def test_efforts_and_continued_answers(server):
    for effort, wanted in dict(minimal="low", low="low", high="high", xhigh="high").items():
        assert f"Reasoning: {wanted}" in rendered(server, QUESTION, reasoning_effort=effort)
    begun = [*QUESTION, dict(role="assistant", content=SAID[:8])]
    (choice,) = server.ask("chat", messages=begun, continue_final_message=True)["choices"]
    assert choice["message"]["content"] == SAID[8:] and "reasoning" not in choice["message"]


def test_text_keeps_the_control_tokens(server, model):
    """Only chats have channels: completions and engines return all as text, from which a caller parses it."""
    prompt = rendered(server, QUESTION)
    (choice,) = server.ask("completion", prompt=prompt, max_tokens=60, add_special_tokens=False)["choices"]
    text = "".join(harmony_models.CALL[:-1])
    assert choice["text"] == text
    request = server.engine.submit(QUESTION, xj.GenerateOptions(max_tokens=60))
    assert "".join(request.text()) == text == model.tokenizer.decode(request.result().text_ids(0))
    assert xj.tools.parse_tool_calls(text).to_message()["tool_calls"][0]["function"]["name"] == "add"


def test_grammars_hold_on_the_channel_final_and_in_required_calls(server, final):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = dict(type="json_schema", json_schema=dict(name="x", schema=dict(const=[3])))
    (choice,) = server.ask("chat", messages=QUESTION, response_format=schema, **final)["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("[3]", "It is 3.")
    (choice,) = server.ask("chat", messages=QUESTION, tools=TOOLS, response_format=schema)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    assert list(map(tool_models.arguments, choice["message"]["tool_calls"])) == [ADD]
    more = dict(messages=QUESTION, tools=TOOLS, max_tokens=200, temperature=1.5)
    named = dict(type="function", function=dict(name="weather"))
    for seed, tool_choice in enumerate(("required", named)):
        (found,) = server.ask("chat", tool_choice=tool_choice, seed=seed, **more)["choices"]
        (call,) = found["message"]["tool_calls"]
        name, arguments = tool_models.arguments(call)
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        assert arguments == ADD[1] if name == "add" else arguments["city"] in ("Oslo", "Paris")
        assert name == "weather" or tool_choice == "required"
