"""One client does not block another: limits of bodies, slow work, reservations; slices of responses."""

import asyncio
import base64
import concurrent.futures
import dataclasses
import http.client
import json
import random
import socket
import threading
import time
import unittest.mock

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import serving
import tiny

import xinfer_jax as xj
from xinfer_jax import reranking
from xinfer_jax.api.bodies import parse_request_body
from xinfer_jax.serve import checked_body, text_endpoints
from xinfer_jax.serve.admission import count_tokens
from xinfer_jax.serve.http_responses import APIError
from xinfer_jax.serve.request_body import load_json_body, scan_json
from xinfer_jax.serve.worker_pool import FairLock, WorkerPool

pytestmark = [pytest.mark.full, pytest.mark.oldest]

KEYS = dict(api_keys=(b"first", b"second"))
LONG = dict(prompt=[5, 6, 7], max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    model = tiny.shallow_model()
    images = {1917: "image_token_id"}  # <|endoftext|>, which no prompt has
    return dataclasses.replace(model, config=dataclasses.replace(model.config, placeholder_ids=images))


@pytest.fixture(scope="module")
def server(model):
    with serving.run_server(model, **KEYS, max_waiting_per_client=150, max_waiting=200) as served:
        yield served


def ask(server, path="/v1/completions", who="first", **body):
    return server.call("POST", path, body, authorization=f"Bearer {who}")


def drawn(rng, level=0):
    """A random JSON value."""
    kind = rng.random()
    if level > 4 or kind < 0.5:
        return rng.choice(['"', "\\", '[{"', '"prompt"', ",,", '\\"', 1, -2.5, True, None, "é\n", ""])
    if kind < 0.75:
        return [drawn(rng, level + 1) for _ in range(rng.randrange(4))]
    names = ["prompt", 'prom"pt', "\\", "a,b", "[", "x"]
    return {rng.choice(names): drawn(rng, level + 1) for _ in range(rng.randrange(4))}


def count_parts(value):
    """(levels, values, containers) of a parsed value."""
    if not isinstance(value, list | dict):
        return 0, 1, 0
    parts = [count_parts(part) for part in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + max([part[0] for part in parts], default=0),
        1 + sum(part[1] for part in parts),
        1 + sum(part[2] for part in parts),
    )


def test_scan_counts_what_the_parser_makes():
    rng = random.Random(3)
    for _ in range(900):
        body = {"x": drawn(rng)} | {"prompt": drawn(rng)} | {"y": drawn(rng)}
        text = json.dumps(body, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
        levels, values, containers, prompts = scan_json(text.encode())
        wanted = count_parts(body)
        assert (levels, containers) == (wanted[0], wanted[2]), text
        assert wanted[1] <= values <= wanted[1] + wanted[2]
        given = body["prompt"]
        several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list | dict)
        assert prompts == (len(given) if several else 0), text


@pytest.mark.parametrize(
    "data, status, why",
    [
        (b"[" * (2**22 - 1), 400, "levels"),
        (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", 400, "66 levels"),
        (b'{"prompt":[' + b"{}," * 2**17 + b"{}]}", 413, "arrays and objects"),
        (b'{"prompt":[' + b"1," * 2**20 + b"1]}", 413, "values"),
        (b'{"prompt": "' + b"a" * 2**15 + b'"}', 413, "32768"),
        (b'{"prompt": ["", ""], "x": "' + b"a" * 2**16 + b'"}', 413, "2 prompts"),
        (b'{"x": ["", "", ""], "prompt": "' + b"a" * 2**15 + b'"}', 413, "one prompt"),
        (b'{"prompt": ["", ""], "prompt": "' + b"a" * 2**15 + b'"}', 400, "more than once"),
        (b'{"prompt": ["", ""], "pr\\u006fmpt": "' + b"a" * 2**15 + b'"}', 413, "one prompt"),
        (b'{"a": 1', 400, "JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), 400, "JSON"),
        (b"[]", 400, "object"),
    ],
)
def test_bodies_are_limited_before_they_are_parsed(data, status, why):
    began = time.monotonic()
    with pytest.raises(APIError, match=why) as error:
        load_json_body(data, 512, 2**22)
    assert error.value.status == status and time.monotonic() - began < 20
    assert load_json_body(b'{"prompt": ["' + b"a" * 40_000 + b'", "b"]}', 512, 2**22)["prompt"][1] == "b"


def test_body_with_a_too_large_content_length_is_not_read(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first\r\n"
    head += b"content-type: application/json\r\ncontent-length: 4194305\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(head)
        found = b""
        while part := connection.recv(2**16):  # until the server closes it
            found += part
    assert found.startswith(b"HTTP/1.1 413") and b"4194305" in found and b"4194304" in found
    status, error, _ = server.call("POST", "/tokenize", b"[" * 30_000, authorization="Bearer first")
    assert status == 400 and "64" in error["error"]["message"]
    assert server.idle()


def test_slow_work_does_not_block_the_event_loop(server, model):
    """While templates, texts and large answers are processed, another client's small request is answered."""
    texts = [dict(role="user", content="word " * 5) for _ in range(400)]
    chat = dict(messages=texts)
    heavy = [
        ("/v1/completions", dict(prompt=["The capital of France. " * 80] * 30, max_tokens=1)),
        ("/v1/chat/completions", chat),
        ("/tokenize", chat),
        ("/detokenize", dict(tokens=[7] * 10_000)),
    ]
    waits = []
    stop = threading.Event()

    def look():
        while not stop.is_set():
            began = time.monotonic()
            assert server.call("GET", "/health")[0] == 200
            waits.append(time.monotonic() - began)

    looking = threading.Thread(target=look)
    looking.start()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: ask(server, one[0], **one[1]), heavy))
    stop.set()
    looking.join()
    assert len(waits) > 5 and max(waits) < 1.5 and server.idle()


def test_worker_pool_runs_one_job_of_a_client_at_a_time():
    async def run():
        workers = WorkerPool()
        order = []
        running = set()

        def work(client, number):
            assert client not in running
            running.add(client)
            time.sleep(0.01)
            running.discard(client)
            order.append((client, number))

        jobs = [("a", i) for i in range(5)] + [("b", 0), ("c", 0)]
        tasks = [
            asyncio.ensure_future(workers.run(client, True, lambda job=(client, i): work(*job)))
            for client, i in jobs
        ]
        await asyncio.sleep(0)
        tasks[3].cancel()  # of a disconnected client: its job never runs
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    order = asyncio.run(run())
    assert (
        ("a", 3) not in order and order.index(("b", 0)) < 3 and order.index(("c", 0)) < 4 and len(order) == 6
    )


def test_a_client_with_a_short_job_goes_before_those_with_long_ones():
    """The next turn is of the client that has used the least time. A client that is gone gets no turn."""

    async def run():
        lock = FairLock()
        order = []

        async def job(client, seconds):
            start = await lock.acquire(client)
            order.append(client)
            await asyncio.sleep(0)
            gone.cancel()
            if len(order) == 4:
                light.extend(asyncio.ensure_future(job(name, 0.1)) for name in ("d", "e"))
                await asyncio.sleep(0)
            lock.release(client, start, seconds)

        async def several(client):
            for _ in range(3):
                await job(client, 1.0)

        light = []
        heavy = [asyncio.ensure_future(several(client)) for client in "abc"]
        gone = asyncio.ensure_future(lock.acquire("gone"))
        await asyncio.sleep(0)
        await asyncio.gather(*heavy)
        await asyncio.gather(*light)
        assert gone.cancelled()
        return "".join(order)

    order = asyncio.run(run())
    assert sorted(order) == sorted("abcabcabcde") and order[4:6] == "de", order


def test_work_for_a_disconnected_client_stops(server, model, monkeypatch):
    """Its prompt is not submitted, and its other requests are not parsed."""
    entered = threading.Event()
    gone = threading.Event()
    submitted = []
    read = checked_body.parse_request_body

    def slow(*args, **more):
        entered.set()
        gone.wait(120)
        return read(*args, **more)

    monkeypatch.setattr(checked_body, "parse_request_body", slow)
    submit = server.engine.submit_many
    monkeypatch.setattr(server.engine, "submit_many", lambda *a, **m: submitted.append(1) or submit(*a, **m))
    connections = []
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        headers = {"content-type": "application/json", "authorization": "Bearer first"}
        connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
        connections.append(connection)
    assert entered.wait(120)
    for connection in connections:
        connection.close()
    end = time.monotonic() + 120
    while server.service.in_flight.total() and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.service.in_flight.total()
    gone.set()
    monkeypatch.setattr(checked_body, "parse_request_body", read)
    assert ask(server, prompt=[5], max_tokens=1)[0] == 200
    assert submitted == [1] and server.idle()


def test_limits_count_answers(server):
    """64 bodies cannot request 65,536 answers; a body that exceeds the limit alone gets 400."""
    status, error, _ = ask(server, prompt=[[5]] * 2, n=100, max_tokens=2)
    message = error["error"]["message"]
    assert status == 400 and "150" in message and "max_waiting_per_client" in message
    many = dict(prompt=[5, 6], n=100, max_tokens=8, ignore_eos=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = [found[0] for found in pool.map(lambda _: ask(server, **many), range(4))]
        assert sorted(statuses) == [200, 429, 429, 429] or statuses.count(200) >= 1 and 429 in statuses
    assert server.idle() and not server.service.admission.used["tokens"].total()


def test_limits_count_tokens(model):
    with serving.run_server(model, max_waiting_tokens_per_client=1000, max_waiting_tokens=10_000) as narrow:
        status, error, _ = narrow.call("POST", "/v1/completions", dict(LONG, logprobs=5))
        assert status == 400 and "2403 tokens" in error["error"]["message"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            calls = pool.map(lambda _: narrow.call("POST", "/v1/completions", LONG)[0], range(4))
            assert {*calls} == {200, 429}
        ids = dict(tokens=[5] * 20)
        assert narrow.call("POST", "/detokenize", ids)[0] == 200 and narrow.idle()


def test_all_prompts_of_a_body_are_submitted_at_once(server, monkeypatch):
    found = []
    submit = server.engine.submit_many

    def seen(prompts, options, asked, **more):
        found.append((len(prompts), asked.client, threading.current_thread().name))
        return submit(prompts, options, asked, **more)

    monkeypatch.setattr(server.engine, "submit_many", seen)
    assert ask(server, prompt=[[5]] * 20, max_tokens=1, allowed_token_ids=[*range(1500)])[0] == 200
    ((count, client, thread),) = found
    assert count == 20 and "first" not in client and len(client) == 32 and "asyncio" in thread


def test_keys_share_no_prefix_pages(server, model):
    prompt = [random.Random(1).randrange(100, 1000) for _ in range(200)]

    def cached(served, who):
        status, body, _ = ask(served, who=who, prompt=prompt, max_tokens=1)
        assert status == 200
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(server, who) for who in ("first", "second")] == [0, 0]
    assert cached(server, "first") > 0 and cached(server, "second") > 0
    with serving.run_server(model, **KEYS, share_prefixes=True) as shared:
        assert cached(shared, "first") == 0 and cached(shared, "second") > 0


def test_deadline_that_passes_in_the_queue_is_an_error(model):
    with serving.run_server(model, deadline=1.0) as late:
        window = late.engine.core.device.decode
        full = threading.Event()
        late.engine.core.device.decode = lambda *args: (full.is_set() and time.sleep(1.3), window(*args))[1]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            rows = pool.submit(late.call, "POST", "/v1/completions", dict(LONG, n=4))
            while late.engine.stats.running < 4:
                time.sleep(0.001)
            full.set()
            whole = pool.submit(late.call, "POST", "/v1/completions", LONG)
            events = pool.submit(late.call, "POST", "/v1/completions", dict(LONG, stream=True))
            assert rows.result()[0] == 200
            status, error, headers = whole.result()
            assert status == 503 and "deadline" in error["error"]["message"] and headers["retry-after"]
            assert '"error"' in events.result()[1] and "deadline" in events.result()[1]
        assert late.idle()


def test_embeddings_equal_embed_texts(server, model):
    texts = ["The capital of France", "Hello"]
    status, body, _ = ask(server, "/v1/embeddings", input=texts, model="tiny")
    wanted = xj.embed_texts(model, texts)
    assert status == 200 and [one["index"] for one in body["data"]] == [0, 1]
    np.testing.assert_allclose([one["embedding"] for one in body["data"]], wanted, atol=1e-6)
    ids = [model.tokenizer.encode(text) for text in texts]
    assert body["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, ids)))
    status, body, _ = ask(server, "/v1/embeddings", input=ids, encoding_format="base64", pooling="last")
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in body["data"]]
    np.testing.assert_allclose(found, xj.embed_texts(model, ids, pooling="last"), atol=1e-6)
    assert ask(server, "/v1/embeddings", input=ids[1])[1]["data"][0]["object"] == "embedding"
    status, body, _ = ask(server, "/v1/embeddings", input=texts, dimensions=7, truncate_prompt_tokens=2)
    found = [one["embedding"] for one in body["data"]]
    cut = xj.embed_texts(model, [row[:2] for row in ids], dimensions=7)
    np.testing.assert_allclose(found, cut, atol=1e-6)
    status, error, _ = ask(server, "/v1/embeddings", input="a", pooling="max")
    assert (status, error["error"]["param"]) == (400, "pooling")
    assert ask(server, "/v1/embeddings", input="a", model="other")[0] == 404 and server.idle()


def test_documents_are_reranked(server, model, monkeypatch):
    """The scores equal `xj.rerank`, and the best document is first."""
    documents = ["The capital of France", "Hello", "a"]
    asked = dict(query="Where?", documents=documents)
    status, error, _ = ask(server, "/v1/rerank", **asked)
    assert status == 400 and "this model is no reranker" in error["error"]["message"]
    ids = np.array([model.tokenizer.encode(word)[0] for word in ("no", "yes")])
    monkeypatch.setattr(reranking, "no_yes_ids", lambda model: ids)
    wanted = xj.rerank(model, "Where?", documents)
    status, body, _ = ask(server, "/v1/rerank", **asked, model="tiny", top_n=2)
    assert status == 200 and body["id"].startswith("rerank-") and body["usage"]["total_tokens"] > 3
    best = np.argsort(-wanted, kind="stable")[:2].tolist()
    assert [(x["index"], x["document"]["text"]) for x in body["results"]] == [(i, documents[i]) for i in best]
    np.testing.assert_allclose([x["relevance_score"] for x in body["results"]], wanted[best], atol=1e-6)
    objects = [dict(text=text, id=i) for i, text in enumerate(documents)]
    for path, fields in (
        ("/rerank", dict(return_documents=False)), ("/v2/rerank", dict(documents=objects))
    ):  # fmt: skip
        status, other, _ = ask(server, path, **asked | fields, top_n=2)
        assert status == 200 and other["usage"] == body["usage"]
        for one, wanted_one in zip(other["results"], body["results"], strict=True):
            given = None if path == "/rerank" else objects[one["index"]]
            assert one.pop("document", None) == given
            assert one == {name: wanted_one[name] for name in ("index", "relevance_score")}
    for path in ("/score", "/v1/score"):
        status, scores, _ = ask(server, path, text_1="Where?", text_2=documents, model="tiny")
        assert status == 200 and scores["usage"] == body["usage"] and scores["object"] == "list"
        np.testing.assert_allclose([one["score"] for one in scores["data"]], wanted, atol=1e-6)
        assert [one["index"] for one in scores["data"]] == [0, 1, 2]
    assert ask(server, "/score", text_1="a", documents=["b"])[1]["error"]["param"] == "text_1"
    status, error, _ = ask(server, "/v1/rerank", **asked, n=2)
    assert (status, error["error"]["param"]) == (400, "n")
    assert server.idle()


def test_many_embeddings_are_computed_in_batches(server, model, monkeypatch):
    sizes = []

    def embed(model, texts, **more):
        sizes.append(sum(map(len, texts)))
        return np.ones((len(texts), model.config.hidden_size), np.float32)

    monkeypatch.setattr(text_endpoints, "embed_texts", embed)
    status, body, _ = ask(server, "/v1/embeddings", input=[[5] * 100] * 20)
    assert status == 200 and len(body["data"]) == 20 and max(sizes) == 400 and len(sizes) == 5


def test_reserved_tokens_count_each_echo_of_a_prompt(model):
    body = dict(prompt=[5] * 100, max_tokens=1, logprobs=4, echo=True)
    plain = xj.GenerateOptions()
    counts = [
        count_tokens(parse_request_body(model, "completion", body | dict(n=n), plain, 500)) for n in (1, 8)
    ]
    assert counts[1] == 8 * counts[0] == 8 * (100 + 1) * 5


def test_tokenize_and_detokenize_reject_unknown_fields(server):
    """An unused list of prompts allows no larger body."""
    for path, body in (
        ("/detokenize", dict(tokens=[5], prompt=["a"] * 16)),
        ("/tokenize", dict(prompt="a", tools=[])),
    ):
        assert ask(server, path, **body)[0] == 400
    large = dict(tokens=[5] * 20_000, prompt=["a"] * 16)
    assert ask(server, "/detokenize", **large)[0] == 413
    messages = [dict(role="user", content="Hi"), dict(role="assistant", content="The")]
    ids = [
        ask(server, "/tokenize", messages=messages, **more)[1]["tokens"]
        for more in ({}, dict(add_generation_prompt=False), dict(continue_final_message=True))
    ]
    assert len(ids[0]) > len(ids[1]) > len(ids[2])


def test_waiting_job_holds_no_shared_semaphore():
    """A job that cannot start holds none either."""

    async def check():
        workers = WorkerPool()
        order = []
        work = [workers.run("a", True, lambda: time.sleep(0.1)) for _ in range(3)]
        alone = workers.run("a", True, lambda: order.append("a"), exclusive=True)
        tasks = [asyncio.ensure_future(one) for one in (*work, alone)]
        await asyncio.sleep(0.01)
        await workers.run("b", True, lambda: order.append("b"), exclusive=True)
        await asyncio.gather(*tasks)
        assert order == ["b", "a"]
        loop = asyncio.get_running_loop()
        fails = unittest.mock.Mock(side_effect=RuntimeError("no thread"))
        with unittest.mock.patch.object(loop, "run_in_executor", fails), pytest.raises(RuntimeError):
            await workers.run("a", True, list, exclusive=True)
        async with asyncio.timeout(60):
            assert await workers.run("a", True, list, exclusive=True) == []

    asyncio.run(check())
