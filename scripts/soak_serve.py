"""A server under bodies that make no sense and clients that go away: nothing may break, leak or differ.

    python scripts/soak_serve.py --malformed=2000 --clients=200 --seconds=60

A server with the bundled model in this process, its clients in threads. Prints a JSON line a part. Exit
code 1: a status of 500 or above, an answer that differs from the one computed alone, rows or pages that stay
taken, memory that grew by 20 MiB or more, or calls that are slower afterwards than the slower quarter before.
"""

from one_line import start

# isort: split
import asyncio
import dataclasses
import gc
import http.client
import json
import random
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import jax
from absl import flags

import xinfer_jax as xj
from xinfer_jax.serve.app import make_server
from xinfer_jax.serve.service import Service
from xinfer_jax.serve.settings import Settings

MALFORMED = flags.DEFINE_integer("malformed", 2000, "Requests that make no sense.", lower_bound=0)
CLIENTS = flags.DEFINE_integer("clients", 200, "At a time.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 60, "That they stay.", lower_bound=1)
SHAPE = dict(rows=8, capacity=512, pages=100, chunk=128)
SETTINGS = Settings(
    name="tiny", model="bundled", host="127.0.0.1", port=0, api_keys=(), origins=(), max_waiting=10**6,
    max_waiting_per_client=10**6, deadline=0.0, grace=5.0, stuck_seconds=60.0, seed=5, escape=True,
    log_prompts=False, shape=SHAPE,
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions")
_VALUES: list[Any] = [
    None, True, -1, 0, 3, 1e400, 2**80, "", "a", "\ud800", [], [[]], {}, [None], {"a": 1}, "<|im_end|>", 0.5,
]  # fmt: skip
_NAMES = """
prompt messages max_tokens temperature top_p n best_of stop seed stream logprobs echo logit_bias top_k min_p
stop_token_ids allowed_token_ids stream_options chat_template_kwargs model user priority cache_salt tools
max_completion_tokens top_logprobs response_format ignore_eos unknown
""".split()


def main(argv: list[str]) -> int:
    model, log = xj.load_model(), list[str]()
    service, port = serve(model, SETTINGS, log)
    rng, failed = random.Random(0), False
    before = [timed(port) for _ in range(20)]
    began = resident()
    if MALFORMED.value:
        bad = malformed(port, MALFORMED.value, rng)
        found = dict(requests=MALFORMED.value, server_errors=bad, grown_mib=round(resident() - began, 1))
        print(json.dumps(dict(part="malformed", **found)), flush=True)
        failed = bool(bad) or found["grown_mib"] >= 20
    counted = crowd(port, service.engine, CLIENTS.value, SECONDS.value)
    idle = wait_idle(service, 20)
    after = [timed(port) for _ in range(20)]
    quarters, now = statistics.quantiles(before), statistics.median(after)
    found = dict(
        clients=CLIENTS.value, seconds=SECONDS.value, **counted, idle=idle,
        grown_mib=round(resident() - began, 1), before_ms=[round(1e3 * x, 2) for x in quarters],
        after_ms=round(1e3 * now, 2),
    )  # fmt: skip
    print(json.dumps(dict(part="crowd", **found)), flush=True)
    failed |= bool(counted["wrong"]) or not idle or found["grown_mib"] >= 20 or now > quarters[2]
    return int(failed)


def serve(model: Any, settings: Settings, log: list[str]) -> tuple[Service, int]:
    """A service that listens on a port, in threads of this process."""
    service = Service(dataclasses.replace(settings), log.append)
    service.start(model, xj.GenerateOptions(200))
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = make_server(service)
    threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return service, listening.getsockname()[1]


def post(port: int, path: str, data: bytes) -> tuple[int, bytes]:
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def malformed(port: int, count: int, rng: random.Random) -> list[str]:
    """Bodies, headers and sockets that no client should send; those that gave a status of 500 or above."""
    bad = []
    for turn in range(count):
        path = rng.choice(PATHS)
        own: dict[str, Any] = (
            dict(messages=[dict(role="user", content="a")]) if "chat" in path else dict(prompt="a")
        )
        body = (
            own
            | dict(max_tokens=1)
            | {rng.choice(_NAMES): rng.choice(_VALUES) for _ in range(rng.randint(1, 4))}
        )
        data = json.dumps(body).encode()
        if turn % 8 == 0:
            data = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        elif turn % 8 == 1:
            data = data[: rng.randrange(len(data))]
        elif turn % 8 == 2:
            _torn(port, path, data, rng)
            continue
        status, text = post(port, path, data)
        if status >= 500:
            bad.append(f"{data!r}: {status} {text!r}"[:300])
    return bad


def _torn(port: int, path: str, data: bytes, rng: random.Random) -> None:
    """A request that ends within its head or its body, half closed or gone, at once or slowly."""
    json_head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head = rng.choice([
        f"{json_head}content-length: 500\r\n\r\n",
        f"{json_head}content-length: x\r\n\r\n",
        f"{json_head}transfer-encoding: chunked\r\n\r\nzz\r\n",
        f"NONSENSE {'a' * rng.randrange(5000)}\r\n\r\n",
    ])  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        whole = head.encode() + data
        whole = whole[: rng.randrange(1, len(whole))]
        half = len(whole) // 2
        raw.sendall(whole[:half])
        time.sleep(rng.choice([0, 0, 0.01]))
        raw.sendall(whole[half:])
        if rng.random() < 0.5:
            raw.shutdown(socket.SHUT_WR)


def crowd(port: int, engine: Any, clients: int, seconds: float) -> dict[str, Any]:
    """Clients of whom 30% go away, for so long; how many answers came, and which differ from those alone."""
    rng, options = (
        random.Random(3),
        xj.GenerateOptions(30, xj.SamplingConfig(temperature=1.0), eos_token_ids=()),
    )
    prompts = [[rng.randrange(1900) for _ in range(rng.randint(1, 80))] for _ in range(12)]
    requests = [engine.submit(prompt, options, key=jax.random.key(i)) for i, prompt in enumerate(prompts)]
    alone = [request.result().tokens[0] for request in requests]
    counts, wrong, end = dict(answers=0, left=0), list[int](), time.monotonic() + seconds

    def client(number: int) -> None:
        own = random.Random(number)
        while time.monotonic() < end:
            i = own.randrange(len(prompts))
            body = dict(prompt=prompts[i], max_tokens=30, temperature=1.0, seed=i, ignore_eos=True)
            if own.random() < 0.3:
                _leave(port, dict(body, stream=own.random() < 0.5), own.random() * 0.2)
                counts["left"] += 1
                continue
            status, text = post(port, PATHS[0], json.dumps(dict(body, return_token_ids=True)).encode())
            counts["answers"] += 1
            if status != 200 or json.loads(text)["choices"][0]["token_ids"] != alone[i]:
                wrong.append(i)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(counts, wrong=len(wrong))


def _leave(port: int, body: dict[str, Any], after: float) -> None:
    data = json.dumps(body).encode()
    head = f"POST {PATHS[0]} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(after)


def wait_idle(service: Service, seconds: float) -> bool:
    """Whether rows, pages and calls are all free within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = service.engine.stats if service.engine else None
        if stats and not (
            stats.running + stats.reading + stats.waiting + stats.pages_used + service.open.total()
        ):
            return True
        time.sleep(0.02)
    return False


def timed(port: int) -> float:
    """Seconds of a small call."""
    began = time.perf_counter()
    post(port, PATHS[0], json.dumps(dict(prompt="Hello", max_tokens=8, ignore_eos=True, seed=1)).encode())
    return time.perf_counter() - began


def resident() -> float:
    """MiB of this process that no file backs."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


if __name__ == "__main__":
    start(main)
