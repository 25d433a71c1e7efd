"""A server in this process and malformed requests to it, for soak_serve.py and tests."""

import asyncio
import contextlib
import dataclasses
import gc
import http.client
import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import xinfer_jax as xj
from xinfer_jax.serve.app import make_server
from xinfer_jax.serve.server_settings import ServerSettings
from xinfer_jax.serve.service import Service
from xinfer_jax.stats import release_free_memory

SHAPE = dict(rows=8, capacity=512, pages=100, chunk=128)
SETTINGS = ServerSettings(
    name="tiny", model="bundled", host="127.0.0.1", port=0, api_keys=(), origins=(), max_waiting=10**6,
    max_waiting_per_client=10**6, deadline=0.0, grace=5.0, stuck_seconds=60.0, seed=5, escape=True,
    log_prompts=False, engine=xj.EngineOptions(**SHAPE),
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions")
_VALUES: list[Any] = [
    None, True, -1, 0, 3, 1e400, 2**80, "", "a", "\ud800", [], [[]], {}, [None], {"a": 1}, "<|im_end|>", 0.5,
]  # fmt: skip
_NAMES = """
prompt messages max_tokens temperature top_p n best_of stop seed stream logprobs echo logit_bias top_k min_p
stop_token_ids allowed_token_ids stream_options chat_template_kwargs model user priority cache_salt tools
max_completion_tokens top_logprobs response_format ignore_eos unknown bad_words truncate_prompt_tokens
continue_final_message add_generation_prompt include_stop_str_in_output skip_special_tokens min_tokens
""".split()


def serve(model: Any, settings: ServerSettings, log: list[str]) -> tuple[Service, int]:
    """Starts a service in threads of this process, and returns it with its port."""
    service = Service(dataclasses.replace(settings), log.append)
    service.start(model, xj.GenerateOptions(max_tokens=200, sampling=xj.SamplingConfig()))
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = make_server(service)
    threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return service, listening.getsockname()[1]


def post(port: int, path: str, data: bytes) -> tuple[int, bytes]:
    """Sends a request, and returns status and body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def malformed(port: int, count: int, rng: random.Random) -> list[str]:
    """Sends malformed bodies, headers and connections. Returns the ones that got a status of 500 or above."""
    bad = []
    for number in range(count):
        path = rng.choice(PATHS)
        prompt: dict[str, Any] = (
            dict(messages=[dict(role="user", content="a")]) if "chat" in path else dict(prompt="a")
        )
        body = (
            prompt
            | dict(max_tokens=1)
            | {rng.choice(_NAMES): rng.choice(_VALUES) for _ in range(rng.randint(1, 4))}
        )
        data = json.dumps(body).encode()
        if number % 8 == 0:
            data = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        elif number % 8 == 1:
            data = data[: rng.randrange(len(data))]
        elif number % 8 == 2:
            _send_cut(port, path, data, rng)
            continue
        status, text = post(port, path, data)
        if status >= 500:
            bad.append(f"{data!r}: {status} {text!r}"[:300])
    return bad


def _send_cut(port: int, path: str, data: bytes, rng: random.Random) -> None:
    """Sends a request that is cut within its head or its body, in one or two parts, then closes or
    half-closes.
    """
    json_head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head = rng.choice([
        f"{json_head}content-length: 500\r\n\r\n",
        f"{json_head}content-length: x\r\n\r\n",
        f"{json_head}transfer-encoding: chunked\r\n\r\nzz\r\n",
        f"NONSENSE {'a' * rng.randrange(5000)}\r\n\r\n",
    ])  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    with connection as raw, contextlib.suppress(OSError):  # the server may close it first
        cut = head.encode() + data
        cut = cut[: rng.randrange(1, len(cut))]
        half = len(cut) // 2
        raw.sendall(cut[:half])
        time.sleep(rng.choice([0, 0, 0.01]))
        raw.sendall(cut[half:])
        if rng.random() < 0.5:
            raw.shutdown(socket.SHUT_WR)


def wait_idle(service: Service, seconds: float) -> bool:
    """Waits until no row, page or call is in use. Returns True if that happened within this many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = service.engine.stats if service.engine else None
        if stats and not (
            stats.running + stats.prefilling + stats.waiting + stats.pages_used + service.in_flight.total()
        ):
            return True
        time.sleep(0.02)
    return False


def resident() -> float:
    """Returns the anonymous memory of this process in MiB, without free memory that the allocator keeps."""
    gc.collect()
    release_free_memory()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024
