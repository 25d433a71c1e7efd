"""Tests of programs that people use with this library, unmodified and offline: clients of the server,
lm-eval, Ray.
"""

import asyncio
import functools
import json
import operator
import os
import subprocess
import sys
from typing import Annotated, Literal

import pytest
import tool_models
from paths import ROOT

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]

PARIS = "The capital of France is Paris."
MESSAGES = [dict(role="user", content="What is the capital of France?")]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return xj.load_model()


@pytest.fixture(scope="module")
def server(model):
    with serving.run_server(model, api_keys=(b"secret",)) as served:
        yield served


@pytest.fixture
def address(server) -> dict[str, str]:
    return dict(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret")


def test_openai(address):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(**address)
    assert [one.id for one in client.models.list()] == ["tiny"]
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == PARIS and whole.usage.prompt_tokens == 26
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    more = dict(stream=True, stream_options=dict(include_usage=True))
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, **more))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == PARIS
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    text = client.completions.create(model="tiny", prompt="Hello", max_tokens=3, logprobs=1, n=2, seed=1)
    assert [choice.index for choice in text.choices] == [0, 1] and len(text.choices[0].logprobs.tokens) == 3
    streamed = client.completions.create(model="tiny", prompt="Hello", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text
    with pytest.raises(openai.BadRequestError, match="top_p must be"):
        client.completions.create(model="tiny", prompt="Hello", top_p=3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hello")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(**(address | dict(api_key="wrong"))).models.list()

    async def several():
        async with openai.AsyncOpenAI(**address) as client:
            calls = [client.chat.completions.create(model="tiny", messages=MESSAGES) for _ in range(6)]
            found = await asyncio.gather(*calls)
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            return found, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    found, streamed = asyncio.run(several())
    assert {one.choices[0].message.content for one in found} == {streamed} == {PARIS}


def test_litellm(address, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = dict(model="openai/tiny", messages=MESSAGES, api_base=address["base_url"], api_key="secret")
    assert litellm.completion(**asked).choices[0].message.content == PARIS
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **asked)]
    assert "".join(pieces) == PARIS


def test_langchain(address):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="tiny", **address)
    answer = chat.invoke("What is the capital of France?")
    assert answer.content == PARIS and answer.usage_metadata["input_tokens"] == 26
    assert "".join(piece.content for piece in chat.stream("What is the capital of France?")) == PARIS


def test_structured_output_of_clients(address):
    """OpenAI's pydantic helper and langchain's `with_structured_output`."""
    openai = pytest.importorskip("openai")
    langchain = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=8)
        kind: Literal["capital", "town"]
        people: list[Annotated[int, Field(ge=0, le=99)]] = Field(max_length=2)

    client = openai.OpenAI(**address)
    asked = dict(model="tiny", messages=MESSAGES, temperature=1.2, seed=5)
    answer = client.chat.completions.parse(response_format=City, max_tokens=200, **asked).choices[0]
    assert answer.finish_reason == "stop" and isinstance(answer.message.parsed, City)
    chat = langchain.ChatOpenAI(model="tiny", temperature=1.2, seed=5, max_tokens=200, **address)
    found = chat.with_structured_output(City).invoke(MESSAGES[0]["content"])
    assert isinstance(found, City)


def test_tools_of_clients(tmp_path):
    """OpenAI's client calls two functions in a conversation, whole and streamed; langchain's too."""
    openai = pytest.importorskip("openai")
    langchain = pytest.importorskip("langchain_openai")
    calling = xj.load_model(tool_models.write_calling_checkpoint(tmp_path))
    shape = dict(rows=2, capacity=1024, pages=40, chunk=64)
    with serving.run_server(calling, engine=xj.EngineOptions(**shape)) as server:
        address = dict(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        client = openai.OpenAI(**address)
        asked = dict(model="tiny", tools=tool_models.TOOLS, seed=1)
        messages = [dict(role="user", content="1 + 2, and the weather?")]
        for _ in range(2):
            choice = client.chat.completions.create(messages=messages, **asked).choices[0]
            calls = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == "why"
            found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
            assert found == [("add", dict(a=1, b=2)), ("weather", dict(city="Oslo"))]
            results = [dict(role="tool", tool_call_id=call.id, content="3") for call in calls]
            messages += [choice.message, *results]
        with client.chat.completions.stream(messages=messages[:1], **asked) as stream:
            final = stream.get_final_completion().choices[0].message
        assert [call.function.arguments for call in final.tool_calls] == [
            call.function.arguments for call in calls
        ]
        chat = langchain.ChatOpenAI(model="tiny", **address).bind_tools(tool_models.TOOLS)
        streamed = functools.reduce(operator.add, chat.stream("1 + 2?"))
        for answer in (chat.invoke("1 + 2?"), streamed):
            assert [call["name"] for call in answer.tool_calls] == ["add", "weather"]
            assert answer.tool_calls[0]["args"] == dict(a=1, b=2)


def test_responses_of_clients(tmp_path):
    """OpenAI's client and the Responses API: a conversation with calls, whole and streamed, and a schema."""
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Digit(BaseModel):
        digit: Literal[3]

    calling = xj.load_model(tool_models.write_calling_checkpoint(tmp_path))
    shape = dict(rows=2, capacity=1024, pages=40, chunk=64)
    with serving.run_server(calling, engine=xj.EngineOptions(**shape)) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        tools = [dict(tool["function"], type="function") for tool in tool_models.TOOLS]
        asked = dict(model="tiny", tools=tools, extra_body=dict(seed=1))
        history = [dict(role="user", content="1 + 2, and the weather?")]
        for _ in range(2):
            whole = client.responses.create(input=history, instructions="Be brief.", **asked)
            assert whole.status == "completed" and whole.output_text == "I look." and not whole.store
            reasoning, _, *calls = whole.output
            assert reasoning.content[0].text == "why"
            found = [(call.name, json.loads(call.arguments)) for call in calls]
            assert found == [("add", dict(a=1, b=2)), ("weather", dict(city="Oslo"))]
            outputs = [dict(type="function_call_output", call_id=call.call_id, output="3") for call in calls]
            history += [*whole.output, *outputs]
        with client.responses.stream(input=history[:1], instructions="Be brief.", **asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert final.output_text == "I look." and final.usage.output_tokens == whole.usage.output_tokens
        deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
        assert json.loads(deltas[0]) == dict(a=1, b=2)
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            client.responses.create(model="tiny", input="Hi", previous_response_id=whole.id)
        pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Digit, max_output_tokens=200)
        assert parsed.output_parsed == Digit(digit=3)


def test_the_llm_command(address, tmp_path):
    pytest.importorskip("llm")
    known = f"- model_id: tiny\n  model_name: tiny\n  api_base: {address['base_url']}\n  api_key_name: tiny\n"
    (tmp_path / "extra-openai-models.yaml").write_text(known)
    (tmp_path / "keys.json").write_text(json.dumps(dict(tiny="secret")))
    command = [sys.executable, "-m", "llm", "-m", "tiny", MESSAGES[0]["content"]]
    for more in ([], ["--no-stream"]):
        done = subprocess.run(
            command + more, env=os.environ | dict(LLM_USER_PATH=str(tmp_path)), capture_output=True,
            text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.stdout.strip() == PARIS, done.stderr


def test_lm_eval(server, model, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval.models.openai_completions")
    pytest.importorskip("aiohttp")
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    capitals = [("France", "Paris", "Rome"), ("Italy", "Rome", "Oslo"), ("Spain", "Madrid", "Bern")]
    rows = [
        dict(question=f"The capital of {country} is", choices=[f" {right}.", f" {wrong}."], answer=0)
        for country, right, wrong in capitals
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shared = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
    (tmp_path / "choice.yaml").write_text(
        f"task: choice\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{question}}}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\n"
        "metric_list:\n  - metric: acc\n"
    )
    (tmp_path / "chat.yaml").write_text(
        f"task: chat\n{shared}output_type: generate_until\ndoc_to_text: 'What is the capital of France?'\n"
        f"doc_to_target: '{PARIS}'\ngeneration_kwargs: {{max_gen_toks: 16, until: ['zzz']}}\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluate(kind, path, task, **more):
        arguments = dict(
            model="tiny", base_url=f"http://127.0.0.1:{server.port}{path}", num_concurrent=2, **more
        )
        return lm_eval.simple_evaluate(
            kind, model_args=arguments, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0,
            apply_chat_template="chat" in kind,
        )  # fmt: skip

    found = evaluate(
        "local-completions", "/v1/completions", "choice", tokenized_requests=True, auth_token="secret"
    )
    assert found["results"]["choice"]["acc,none"] == 1.0
    for sample, row in zip(found["samples"]["choice"], rows, strict=True):
        context = model.tokenizer.encode(row["question"])
        for (logprob, _), choice in zip(sample["filtered_resps"], row["choices"], strict=True):
            ids = model.tokenizer.encode(row["question"] + choice)[len(context) :]
            (wanted,) = xj.score_completions(model.params, model.config, [context], [ids])
            assert abs(float(logprob) - sum(wanted)) < 1e-5 * len(ids)
    found = evaluate("local-chat-completions", "/v1/chat/completions", "chat")
    assert found["results"]["chat"]["exact_match,none"] == 1.0


def test_dataset_generator_under_ray():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = [dict(prompt=f"Say {i}", custom_id=str(i)) for i in range(12)]
        options = xj.GenerateOptions(max_tokens=4, sampling=xj.SamplingConfig(temperature=0.9))
        shape = dict(options=options, rows=2, capacity=128, pages=20)
        found = ray.data.from_items(rows).map_batches(
            xj.DatasetGenerator,
            fn_constructor_kwargs=shape,
            batch_size=3,
            concurrency=2,
            batch_format="numpy",
        )
        texts = {row["custom_id"]: row["text"] for row in found.take_all()}
    finally:
        ray.shutdown()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert [texts[str(i)] for i in range(12)] == xj.DatasetGenerator(**shape)(columns)["text"].tolist()


def test_client_versions_are_pinned():
    """The pinned ones of pyproject.toml's extra for this."""
    text = (ROOT / "pyproject.toml").read_text()
    for name in ("openai", "litellm", "langchain-openai", "llm", "lm-eval[api]", "ray[data]"):
        assert f'"{name}==' in text
