"""Senders of the requests of an attack: by an HTTP client, or as no HTTP client sends them. A sender gets the
target, a path and a body, and returns a status and the start of the server's response.
"""

import contextlib
import dataclasses
import http.client
import json
import random
import select
import socket
import time

from soak import hostile_adapters

HOST = "127.0.0.1"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LINES = b"".join(b"a:%04d\r\n" % i for i in range(8092)) + b"\r\n"  # of a head, 64 kB
TRAILERS = _CHUNKED + b"1\r\na\r\n0\r\n" + LINES
TARGET = "/" + "%41%C3%28" * 7000  # 63 kB


@dataclasses.dataclass
class Target:
    """The attacked server.

    Attributes:
        headers: headers of each request.
        end: `time.monotonic()` at which all waiting ends.
        source: the address from which the attacker connects.
    """

    port: int
    headers: dict[str, str]
    end: float
    source: str = HOST

    @property
    def seconds(self) -> float:
        """The seconds that are left."""
        return max(0.1, self.end - time.monotonic())

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(self.seconds)
        raw.bind((self.source, 0))
        raw.connect((HOST, self.port))
        return raw

    def head(self, path: str, length: int | None = None) -> bytes:
        """Returns the head of a request. Without a length it also lacks its end."""
        headers = dict(self.headers, host=f"{HOST}:{self.port}")
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        end = [""] if length is None else [f"content-length: {length}", "", ""]
        return "\r\n".join([*lines, *end]).encode()


def post(target: Target, path: str, body: bytes) -> str:
    """Sends a request and reads the response."""
    connection = http.client.HTTPConnection(
        HOST, target.port, timeout=target.seconds, source_address=(target.source, 0)
    )
    try:
        # The server may answer before the end of the body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, body, target.headers)
        answer = connection.getresponse()
        start = answer.read(300)
        while answer.read(2**16):
            pass
        return str(answer.status) if answer.status == 200 else f"{answer.status} {start.decode()}"
    finally:
        connection.close()


def post_as_user(target: Target, path: str, body: bytes) -> str:
    """Sends `post` as a separate client: the field `user` is its address, which a trusted proxy would
    forward.
    """
    headers = target.headers | {"x-forwarded-for": json.loads(body)["user"]}
    return post(dataclasses.replace(target, headers=headers), path, body)


def post_as_admin(target: Target, path: str, body: bytes) -> str:
    """Runs `post` with the key of an admin."""
    headers = target.headers | {"authorization": f"Bearer {hostile_adapters.ADMIN_KEY}"}
    return post(dataclasses.replace(target, headers=headers), path, body)


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


def post_or_leave(target: Target, path: str, body: bytes) -> str:
    """Runs `post`, or three times in ten `send_and_disconnect`."""
    if random.random() < 0.3:
        return send_and_disconnect(target, path, body, 0.0, 0.2)
    return post(target, path, body)


def hold(target: Target, path: str, body: bytes) -> str:
    """Sends a request, or nothing if the path is empty, and reads nothing until the server closes the
    connection.
    """
    with contextlib.closing(target.connect(4096)) as raw:
        if path:
            raw.sendall(target.head(path, len(body)) + body)
        return "closed" if _waits(raw, select.POLLRDHUP, target) else "open"


def unfinished(target: Target, path: str, body: bytes) -> str:
    """Sends a request without the last byte of its body, and waits."""
    with contextlib.closing(target.connect()) as raw:
        try:
            raw.sendall(target.head(path, len(body)) + body[:-1])
        except OSError:
            return _response(raw)
        return _response(raw) if _waits(raw, select.POLLIN | select.POLLRDHUP, target) else "open"


def _waits(raw: socket.socket, events: int, target: Target) -> bool:
    """Waits for events of a socket. Returns True if one came."""
    poll = select.poll()
    poll.register(raw, events)
    return bool(poll.poll(1e3 * max(0.0, target.end - time.monotonic())))


def _response(raw: socket.socket) -> str:
    """Returns the status of a response that has arrived, and the bytes that follow it."""
    raw.settimeout(0.5)
    with contextlib.suppress(OSError):
        text = raw.recv(400).decode(errors="replace")
        return text.partition(" ")[2] or "closed"
    return "closed"


def drip(target: Target, path: str, body: bytes) -> str:
    """Sends the body one byte per second, or the head if there is no body."""
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


def chunks(target: Target, path: str, unit: bytes, start: bytes = _CHUNKED) -> str:
    """Sends a body without an end: a unit of chunks again and again, until the server closes. start: the end
    of the head.
    """
    with contextlib.closing(target.connect()) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            raw.sendall(target.head(path) + start)
            while time.monotonic() < target.end:
                raw.sendall(unit)
        except OSError:
            return _response(raw)
    return "open"


def tiny_reads(target: Target, path: str, byte: bytes) -> str:
    """Sends a body in segments of one byte each, as fast as possible."""
    return chunks(target, path, byte, b"content-length: 4000000\r\n\r\n")


def heads(target: Target, path: str, rest: bytes) -> str:
    """Sends a request again and again, on a new connection each time. rest: the lines after its first
    lines.
    """
    status = ""
    while time.monotonic() < target.end:
        with contextlib.closing(target.connect()) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(target.head(path) + rest)
            status = _response(raw)
    return status


def pipelined(target: Target, path: str, body: bytes) -> str:
    """Sends 1,000 requests on one connection before it reads a response."""
    with contextlib.closing(target.connect()) as raw:
        with contextlib.suppress(OSError):
            raw.sendall((target.head(path, len(body)) + body) * 1000)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(2**16):
                pass
    return "left"
