"""POST /v1/responses: the answers of chats in the form of the Responses API, whole and as a stream."""

import http.client
import json
import socket

import pytest
import tool_models

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving

import xinfer_jax as xj
from xinfer_jax.engine.answers import Answer
from xinfer_jax.serve import chunks

pytestmark = pytest.mark.oldest

TOOLS = [dict(tool["function"], type="function") for tool in tool_models.TOOLS]
SHAPE = dict(rows=2, capacity=1024, pages=40, chunk=64)
LOGPROBS = dict(include=["message.output_text.logprobs"], top_logprobs=1)
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = xj.load_model(tool_models.write_calling_checkpoint(tmp_path_factory.mktemp("calls")))
    with serving.run_server(model, engine=xj.EngineOptions(**SHAPE)) as served:
        yield served


def ask(server, given="1 + 2?", **body):
    status, found, _ = server.call("POST", PATH, dict(input=given, tools=TOOLS, seed=1) | body)
    assert status == 200, found
    return found


def events(server, **body) -> list[dict]:
    """The events of a stream. Each is named as its type, and they are numbered."""
    status, text, headers = server.call(
        "POST", PATH, dict(input="1 + 2?", tools=TOOLS, seed=1, stream=True) | body
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in text.strip().split("\n\n") if not block.startswith(":")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(items: list[dict]) -> list[dict]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_response_has_the_answer_of_the_chat(server):
    chat = server.ask(
        "chat", messages=[dict(role="user", content="1 + 2?")], tools=tool_models.TOOLS, seed=1, logprobs=True
    )
    (choice,) = chat["choices"]
    found = ask(server, metadata=dict(a="b"), max_output_tokens=100, store=True, **LOGPROBS)
    reasoning, message, *calls = found["output"]
    assert reasoning["content"] == [dict(type="reasoning_text", text=choice["message"]["reasoning"])]
    (part,) = message["content"]
    assert part["text"] == choice["message"]["content"] == "I look."
    (entry,) = part["logprobs"]
    assert entry["logprob"] == choice["logprobs"]["content"][3]["logprob"] and len(entry["top_logprobs"]) == 1
    functions = [dict(name=call["name"], arguments=call["arguments"]) for call in calls]
    assert functions == [call["function"] for call in choice["message"]["tool_calls"]]
    assert found["status"] == "completed" and found["object"] == "response"
    assert (found["store"], found["metadata"], found["seed"]) == (False, dict(a="b"), 1)
    assert found["tools"] == TOOLS and found["max_output_tokens"] == 100
    usage = found["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 15
    assert usage["output_tokens_details"] == dict(reasoning_tokens=1)


@pytest.mark.parametrize(("most", "last"), [(100, "completed"), (4, "incomplete")])
def test_a_stream_tells_of_the_whole_response(server, most, last):
    asked = dict(LOGPROBS, max_output_tokens=most, instructions="Be brief.")
    whole = ask(server, **asked)
    found = events(server, **asked)
    names = [event["type"].removeprefix("response.") for event in found]
    assert names[:3] == ["created", "in_progress", "output_item.added"] and names[-1] == last
    response = found[-1]["response"]
    assert whole["status"] == response["status"] == last and response["id"] != whole["id"]
    assert without_ids(response["output"]) == without_ids(whole["output"])
    assert found[0]["response"]["output"] == [] and found[0]["response"]["status"] == "in_progress"
    assert whole["incomplete_details"] == (dict(reason="max_output_tokens") if most == 4 else None)
    changing = {"id", "created_at", "completed_at", "output", "usage"}
    assert {*whole} == {*response}
    for name in {*whole} - changing:
        assert whole[name] == response[name], name
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == "I look." and server.idle()


def test_the_output_goes_back_as_input(server):
    """The output is sent as the whole history of an agent. The chat template writes it as it writes messages
    of a chat.
    """
    output = ask(server)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [dict(type="function_call_output", call_id=call["call_id"], output="3") for call in calls]
    history = [dict(role="user", content="1 + 2?"), *output, *results]
    (choice,) = server.ask(
        "chat", messages=[dict(role="user", content="1 + 2?")], tools=tool_models.TOOLS, seed=1
    )["choices"]
    answers = [
        dict(role="tool", tool_call_id=call["id"], content="3") for call in choice["message"]["tool_calls"]
    ]
    messages = [dict(role="user", content="1 + 2?"), choice["message"], *answers]
    chat = server.ask("chat", messages=messages, tools=tool_models.TOOLS)
    assert ask(server, history)["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        (dict(max_output_tokens=5000), "input", "max_output_tokens 5000 exceeds the limit"),
        (dict(previous_response_id="resp_1"), "previous_response_id", "keeps no responses"),
        (dict(top_p=3), "top_p", "top_p must be"),
        (dict(reasoning=dict(effort="huge")), "reasoning", "reasoning.effort must be one of"),
        (dict(text=dict(format=dict(type="xml"))), "text", "text.format: type must be text"),
        (dict(tool_choice="sometimes"), "tool_choice", "must be none, auto, required"),
        (dict(input=[dict(role="robot", content="Hi")]), "input", "a message's role must be one of"),
        (dict(truncation="auto"), "truncation", "give truncate_prompt_tokens"),
        (dict(mirostat=2), "mirostat", "is not served here"),
        (dict(model="other"), "model", "is not served here"),
    ],
)  # fmt: skip
def test_the_rules_of_chats_hold(server, body, param, why):
    status, found, _ = server.call("POST", PATH, dict(input="Hi") | body)
    assert status == (404 if param == "model" else 400)
    assert found["error"]["param"] == param and why in found["error"]["message"]


def test_a_schema_constrains_the_text(server):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    form = dict(type="json_schema", name="x", schema=dict(const=[3]), strict=True)
    found = ask(server, tools=[], text=dict(format=form), max_output_tokens=200)
    (message,) = [item for item in found["output"] if item["type"] == "message"]
    assert json.loads(message["content"][0]["text"]) == [3]
    wrong = dict(form, schema=dict(type="nope"))
    status, error, _ = server.call("POST", PATH, dict(input="Hi", text=dict(format=wrong)))
    assert status == 400 and error["error"]["param"] == "text"


def test_a_failed_answer_is_a_failed_response(server, monkeypatch):
    def fail(answer):
        raise xj.InputError("the logits are not finite")

    monkeypatch.setattr(chunks, "check_answer", fail)
    (*_, last) = events(server)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == dict(code="server_error", message="the logits are not finite")
    assert server.idle()


@pytest.mark.parametrize("streams", [False, True])
def test_an_aborted_answer_is_a_failed_response(server, monkeypatch, streams):
    """An answer is aborted, for example, by a pause of the engine."""
    append = Answer.append

    def abort(self, *args):
        append(self, *args)
        self.end("aborted")
        return True

    monkeypatch.setattr(Answer, "append", abort)
    response = events(server)[-1]["response"] if streams else ask(server)
    assert response["status"] == "failed" and "send the request again" in response["error"]["message"]


def test_a_disconnect_frees_the_slot(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = dict(input="Hi", stream=True, max_output_tokens=900, ignore_eos=True)
    connection.request("POST", PATH, json.dumps(body).encode(), {"content-type": "application/json"})
    assert connection.getresponse().read(23) == b"event: response.created"
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert server.idle()
    assert any("cancelled" in line or "gone" in line for line in server.log[-3:])
