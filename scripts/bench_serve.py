"""What the server itself costs: streams of tokens that an engine without a model has ready.

    python scripts/bench_serve.py --streams=8 --tokens=200

Processor time of the server's process for each token, and the time to the first token as a client in another
process sees it, medians over --rounds; the engine hands each row a token every --every ms. One JSON line.
llama.cpp's server with as many slots follows where llama-server is on PATH and --llama_model names a GGUF
file: its tokens a second are those of its model.
"""

from one_line import start

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

import soak_serve_requests
from absl import flags
from bench_engine_runners import llama_server

import xinfer_jax as xj
from xinfer_jax.engine.statistics import EngineStats
from xinfer_jax.engine.submission import request_of
from xinfer_jax.host import cores
from xinfer_jax.serve import service as service_module

STREAMS = flags.DEFINE_integer("streams", 8, "At a time.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 200, "Of each.", lower_bound=2)
EVERY = flags.DEFINE_float("every", 10, "Milliseconds between two tokens of a stream.", lower_bound=0)
ROUNDS = flags.DEFINE_integer("rounds", 5, "How often.", lower_bound=1)
PORT = flags.DEFINE_integer("port", None, "Client: where to ask.")
LLAMA_MODEL = flags.DEFINE_string("llama_model", None, "A GGUF file, for llama-server.")


class Prepared:
    """An engine whose answers are there already: token 5, again and again."""

    def __init__(self, model: xj.Model, rows: int = 8, **_: Any):
        self.model = model
        self.impl = None
        self.room = 4096
        self.switches_at = None
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
        threading.Thread(target=self._hand_out, daemon=True).start()

    def __enter__(self) -> "Prepared":
        return self

    @property
    def last_turn(self) -> float:
        return time.monotonic()

    def submit(self, ids: Any, options: Any, *, key: Any, **_: Any) -> Any:
        request = request_of(self, ids, options, key, 0)
        request.answers[0].push([5], [-0.5], False)
        self._open.append(request)
        return request

    def submit_many(self, prompts: Any, options: Any, *, keys: Any, **_: Any) -> Any:
        return [self.submit(ids, options, key=key) for ids, key in zip(prompts, keys, strict=True)]

    def cancel(self, request: Any) -> None:
        pass

    def _hand_out(self) -> None:
        while True:
            time.sleep(EVERY.value / 1e3)
            for request in list(self._open):
                if request.cancelled or request.answers[0].push([5], [-0.5], False):
                    request.end(None)
                    self._open.remove(request)
                request.tell()


def main(argv: list[str]) -> None:
    if PORT.value is not None:
        print(json.dumps(clients(PORT.value)))
        return
    service_module.engine_of = Prepared
    model = xj.load_model()
    _, port = soak_serve_requests.serve(model, soak_serve_requests.SETTINGS, [])
    found = measured(port)
    print(
        json.dumps(dict(server="xinfer_jax", streams=STREAMS.value, tokens=TOKENS.value, **found)), flush=True
    )
    asked = [([1, 2, 3], TOKENS.value)] * STREAMS.value
    beside = llama_server(LLAMA_MODEL.value, asked, STREAMS.value, cores(), 600)
    print(json.dumps(dict(server="llama.cpp", **beside)))


def measured(port: int) -> dict[str, Any]:
    """Rounds of a process of clients, the first unmeasured."""
    busy = []
    first = []
    rate = []
    for turn in range(ROUNDS.value + 1):
        began = time.process_time()
        told = [f"--port={port}", f"--streams={STREAMS.value}", f"--tokens={TOKENS.value}"]
        done = subprocess.run(
            [sys.executable, __file__, *told], stdout=subprocess.PIPE, text=True, check=True
        )
        spent = time.process_time() - began
        seen = json.loads(done.stdout.splitlines()[-1])
        if turn:
            busy.append(1e3 * spent / (STREAMS.value * TOKENS.value))
            first.append(seen["first_ms"])
            rate.append(seen["tokens_per_second"])
    return dict(
        host_ms_per_token=round(statistics.median(busy), 3), first_ms=round(statistics.median(first), 2),
        tokens_per_second=round(statistics.median(rate)), rounds=ROUNDS.value,
    )  # fmt: skip


def clients(port: int) -> dict[str, float]:
    """Streams side by side: the median time to the first piece, and tokens a second of all."""
    import http.client

    def one(i: int) -> tuple[float, int]:
        time.sleep(i * EVERY.value / 1e3)  # each joins while others run
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        asked = dict(prompt=[1, 2, 3], max_tokens=TOKENS.value, stream=True, ignore_eos=True)
        body = json.dumps(asked).encode()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        seen = 0
        first = 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                seen += 1
                first = first or time.perf_counter() - began
        return first, seen

    one(0)  # connections, threads and caches of the first call
    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS.value) as pool:
        found = list(pool.map(one, range(STREAMS.value)))
    seconds = time.perf_counter() - began
    first = statistics.median(first for first, _ in found)
    return dict(first_ms=1e3 * first, tokens_per_second=TOKENS.value * STREAMS.value / seconds)


if __name__ == "__main__":
    start(main)
