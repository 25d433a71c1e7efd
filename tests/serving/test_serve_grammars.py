"""A client's grammar that takes too long costs its own request alone."""

import http.client
import json
import threading
import time

import pytest
import serving
import tiny

import xinfer_jax as xj
from xinfer_jax.grammar import pool as pool_module

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

pytestmark = pytest.mark.full  # else test_serve.py and grammar/test_pool.py
ENDLESS = dict(prompt="a", guided_json={"type": "integer", "multipleOf": 9699690})


@pytest.fixture(scope="module")
def server():
    with serving.run_server(
        tiny.shallow_model(), engine=xj.EngineOptions(**serving.SHAPE | dict(warm_up=False))
    ) as server:
        yield server
    assert server.service.grammars._process.poll() is not None  # closed with the server


def test_it_is_rejected_while_others_are_answered(server, monkeypatch):
    """Six requests of it hold no thread that others need."""
    monkeypatch.setattr(pool_module, "_CHECK_SECONDS", 0.5)
    server.ask("completion", prompt="a", max_tokens=4)  # compiles
    found = []

    def ask(i):
        found.append(server.call("POST", "/v1/completions", ENDLESS | dict(seed=i)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    assert len(server.ask("completion", prompt="a", max_tokens=4)["choices"]) == 1
    assert len(found) < 6
    for thread in threads:
        thread.join()
    for status, body, _ in found:
        assert status == 400 and body["error"]["param"] == "guided_json"
        assert "simplify it" in body["error"]["message"]


def test_a_client_that_leaves_ends_its_job(server, monkeypatch):
    monkeypatch.setattr(pool_module, "_CHECK_SECONDS", 60.0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = ENDLESS | dict(guided_json={"type": "integer", "multipleOf": 9699691})
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    grammars = server.service.grammars
    is_busy = lambda: any(slot.client is not None for slot in grammars._turns.slots)  # noqa: E731
    wait_for(is_busy)
    connection.close()
    began = time.monotonic()
    wait_for(lambda: not is_busy())
    assert time.monotonic() - began < pool_module._CHECK_SECONDS and server.idle()


def test_masks_beyond_the_budget_end_a_stream_with_an_error(server, monkeypatch):
    body = dict(prompt="a", max_tokens=20, guided_json={"type": "array"}, temperature=1.0, seed=1)
    monkeypatch.setattr(pool_module, "_BUDGET_PER_TOKEN", -1.0)  # the first tokens have masks, later ones not
    last = server.events("completion", **body)[-1]
    assert "take more than" in last["error"]["message"]
    status, found, _ = server.call("POST", "/v1/completions", body)
    assert status == 400 and "make it less ambiguous" in found["error"]["message"]


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
