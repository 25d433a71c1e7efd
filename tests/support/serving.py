"""Runs a server in this process, on a free port of the loopback interface, and sends requests to it."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from soak import server_requests

import xinfer_jax as xj
from xinfer_jax.serve.app import make_server
from xinfer_jax.serve.service import Service

SHAPE = dict(rows=4, capacity=512, pages=60, chunk=128, warm_up=True)
SETTINGS = dataclasses.replace(
    server_requests.SETTINGS, max_waiting=64, max_waiting_per_client=64, engine=xj.EngineOptions(**SHAPE)
)


@dataclasses.dataclass
class RunningServer:
    service: Service
    port: int
    log: list[str]
    server: Any = None

    @property
    def engine(self) -> Any:
        return self.service.engine

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Sends a request and returns (status, JSON or text, headers)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            own = {"content-type": "application/json"} if data is not None else {}
            more = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, own | more)
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.headers.get("content-type", "")
            return answer.status, json.loads(text) if "json" in kind else text, answer.headers
        finally:
            connection.close()

    def ask(self, kind: str, **body: Any) -> Any:
        status, found, _ = self.call("POST", endpoint(kind), body)
        assert status == 200, found
        return found

    def events(self, kind: str, **body: Any) -> list[Any]:
        """Returns the chunks of a streamed answer."""
        status, text, _ = self.call("POST", endpoint(kind), dict(body, stream=True))
        assert status == 200, text
        parts = [
            part.removeprefix("data: ") for part in text.strip().split("\n\n") if part.startswith("data: ")
        ]
        assert parts.pop() == "[DONE]"
        return [json.loads(part) for part in parts]

    def idle(self, seconds: float = 120) -> bool:
        """Waits until all rows and pages are free. Returns False after so many seconds."""
        return server_requests.wait_idle(self.service, seconds)


def endpoint(kind: str) -> str:
    return "/v1/chat/completions" if kind == "chat" else "/v1/completions"


@contextlib.contextmanager
def run_server(model: Any = None, listening: Any = None, **more: Any) -> Iterator[RunningServer]:
    """Runs a server inside the block. Without a model it never becomes ready."""
    log: list[str] = []
    service = Service(dataclasses.replace(SETTINGS, **more), log.append)
    if model is not None:
        service.start(model, xj.GenerateOptions(max_tokens=200))
    listening = listening or socket.create_server(("127.0.0.1", 0))
    server = make_server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield RunningServer(service, listening.getsockname()[1], log, server)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(120)
        service.close()
