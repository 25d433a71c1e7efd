"""Ways in which an attacker of soak_serve.py sends a request. Each returns a status, or a word."""

import contextlib
import dataclasses
import http.client
import random
import select
import socket
import time

HOST = "127.0.0.1"


@dataclasses.dataclass
class Target:
    """The attacked server.

    Attributes:
        headers: headers of each request.
        end: `time.monotonic()` at which all waiting ends.
    """

    port: int
    headers: dict[str, str]
    end: float

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(max(0.1, self.end - time.monotonic()))
        raw.connect((HOST, self.port))
        return raw

    def head(self, path: str, length: int) -> bytes:
        headers = dict(self.headers, host=f"{HOST}:{self.port}") | {"content-length": length}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()


def post(target: Target, path: str, body: bytes) -> str:
    """Sends a request and reads the response."""
    seconds = max(0.1, target.end - time.monotonic())
    connection = http.client.HTTPConnection(HOST, target.port, timeout=seconds)
    try:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the server answered before the end of the body
            connection.request("POST", path, body, target.headers)
        answer = connection.getresponse()
        start = answer.read(300)
        while answer.read(2**16):
            pass
        return str(answer.status) if answer.status == 200 else f"{answer.status} {start.decode()}"
    finally:
        connection.close()


def send_and_disconnect(target: Target, path: str, body: bytes, least: float, most: float) -> str:
    """Sends a request and disconnects after some seconds."""
    with contextlib.closing(target.connect()) as raw:
        raw.sendall(target.head(path, len(body)) + body)
        time.sleep(random.uniform(least, most))
        raw.setblocking(False)
        try:
            response = raw.recv(300).decode()
        except BlockingIOError:
            return "left"
        return "left" if " 200 " in response[:20] or not response else response.split(" ", 1)[1]


def hold(target: Target, path: str, body: bytes) -> str:
    """Sends a request, or nothing if the path is empty, and reads nothing until the server closes the
    connection.
    """
    with contextlib.closing(target.connect(4096)) as raw:
        if path:
            raw.sendall(target.head(path, len(body)) + body)
        poll = select.poll()
        poll.register(raw, select.POLLRDHUP)
        closed = poll.poll(1e3 * max(0.0, target.end - time.monotonic()))
        return "closed" if closed else "open"


def drip(target: Target, path: str, body: bytes) -> str:
    """Sends one byte per second: of the body, or of the head if there is no body."""
    with contextlib.closing(target.connect()) as raw:
        head = target.head(path, len(body))
        if body:
            raw.sendall(head)
        for byte in body or head:
            if time.monotonic() > target.end:
                return "open"
            raw.sendall(bytes([byte]))
            time.sleep(1)
    return "sent"
