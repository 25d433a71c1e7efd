"""Measures the cost of the server itself: streams of tokens from an engine without a model.

    python scripts/bench_serve.py --streams=8 --tokens=200

Prints one JSON line: the CPU time of the server process per token, and the time to the first token in a
client process, as medians over --rounds. The engine gives each row a token every --every ms. A second line
has llama.cpp's server with as many slots, if llama-server is on PATH and --llama_model names a GGUF file; its
tokens per second are those of its model.
"""

from launcher import start

# isort: split
import dataclasses
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import server_requests
from absl import flags
from peer_serving import llama_server

import xinfer_jax as xj
from xinfer_jax.engine.statistics import EngineStats
from xinfer_jax.engine.submission import make_request
from xinfer_jax.host import cpu_count
from xinfer_jax.serve import service as service_module

STREAMS = flags.DEFINE_integer("streams", 8, "Number of concurrent streams.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 200, "Tokens of each stream.", lower_bound=2)
EVERY = flags.DEFINE_float("every", 10, "Milliseconds between two tokens of a stream.", lower_bound=0)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; medians are reported.", lower_bound=1)
PORT = flags.DEFINE_integer("port", None, "Internal: port of the server, for a client process.")
LLAMA_MODEL = flags.DEFINE_string("llama_model", None, "A GGUF file, for llama-server.")


class FakeEngine:
    """An engine without a model: every token of every answer is 5."""

    def __init__(self, model: xj.Model, rows: int = 8, **_: Any):
        self.model = model
        self.impl = None
        self.room = 4096
        self.started = True
        self.alive = True
        self.weight_bytes = 0
        self.cache_bytes = 0
        self.guesses = 0
        self.rows = rows
        self.error = None
        self.engines = (self,)
        self._open: list[Any] = []
        counts = dict.fromkeys((field.name for field in dataclasses.fields(EngineStats)), 0)
        self.stats = EngineStats(**counts)
        threading.Thread(target=self._push_tokens, daemon=True).start()

    def __enter__(self) -> "FakeEngine":
        return self

    @property
    def last_turn(self) -> float:
        return time.monotonic()

    def submit(self, ids: Any, options: Any, *, key: Any, **_: Any) -> Any:
        request = make_request(self, ids, options, key, 0)
        request.answers[0].append([5], [-0.5], False)
        self._open.append(request)
        return request

    def submit_many(self, prompts: Any, options: Any, *, keys: Any, **_: Any) -> Any:
        return [self.submit(ids, options, key=key) for ids, key in zip(prompts, keys, strict=True)]

    def cancel(self, request: Any) -> None:
        pass

    def _push_tokens(self) -> None:
        while True:
            time.sleep(EVERY.value / 1e3)
            for request in list(self._open):
                if request.cancelled or request.answers[0].append([5], [-0.5], False):
                    request.end(None)
                    self._open.remove(request)
                request.notify()


def main(argv: list[str]) -> None:
    if PORT.value is not None:
        print(json.dumps(clients(PORT.value)))
        return
    service_module.make_engine = FakeEngine
    model = xj.load_model()
    _, port = server_requests.serve(model, server_requests.SETTINGS, [])
    result = measure(port)
    print(
        json.dumps(dict(server="xinfer_jax", streams=STREAMS.value, tokens=TOKENS.value, **result)),
        flush=True,
    )
    requests = [([1, 2, 3], TOKENS.value)] * STREAMS.value
    peer = llama_server(LLAMA_MODEL.value, requests, STREAMS.value, cpu_count(), 600)
    print(json.dumps(dict(server="llama.cpp", **peer)))


def measure(port: int) -> dict[str, Any]:
    """Medians over the rounds. Each round starts a process of clients; the first round is not measured."""
    busy = []
    first = []
    rate = []
    for number in range(ROUNDS.value + 1):
        start_s = time.process_time()
        client_flags = [f"--port={port}", f"--streams={STREAMS.value}", f"--tokens={TOKENS.value}"]
        done = subprocess.run(
            [sys.executable, __file__, *client_flags], stdout=subprocess.PIPE, text=True, check=True
        )
        cpu_seconds = time.process_time() - start_s
        client = json.loads(done.stdout.splitlines()[-1])
        if number:
            busy.append(1e3 * cpu_seconds / (STREAMS.value * TOKENS.value))
            first.append(client["first_ms"])
            rate.append(client["tokens_per_second"])
    return dict(
        host_ms_per_token=round(statistics.median(busy), 3), first_ms=round(statistics.median(first), 2),
        tokens_per_second=round(statistics.median(rate)), rounds=ROUNDS.value,
    )  # fmt: skip


def clients(port: int) -> dict[str, float]:
    """Runs all streams concurrently: the median time to the first token, and tokens per second in total."""
    import http.client

    def stream(i: int) -> tuple[float, int]:
        time.sleep(i * EVERY.value / 1e3)  # starts while others run
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        fields = dict(prompt=[1, 2, 3], max_tokens=TOKENS.value, stream=True, ignore_eos=True)
        body = json.dumps(fields).encode()
        start_s = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        count = 0
        first = 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                count += 1
                first = first or time.perf_counter() - start_s
        return first, count

    stream(0)  # warms up connections, threads and caches
    start_s = time.perf_counter()
    with ThreadPoolExecutor(STREAMS.value) as pool:
        results = list(pool.map(stream, range(STREAMS.value)))
    seconds = time.perf_counter() - start_s
    first = statistics.median(first for first, _ in results)
    return dict(first_ms=1e3 * first, tokens_per_second=TOKENS.value * STREAMS.value / seconds)


if __name__ == "__main__":
    start(main)
