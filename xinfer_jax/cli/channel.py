"""The connection between the parents of two processes: JSON lines, each signed with the run's secret.

both send a random number ─ both prove that they know the secret ─► signed lines, numbered in each direction
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import InputError
from ..signing import SIGNATURE_SIZE, Signer, is_local

HEARTBEAT_SECONDS = 20  # of silence after which a process counts as gone, for parents and for jax
_BEAT_SECONDS = 5  # between two heartbeats
_PROOF_SECONDS = 10  # for the other end to prove that it knows the secret
_MAX_LINE = 1 << 26  # bytes: a body of a client, escaped twice, is less
_UNPROVED = 64  # most connections at a time that have not yet proved that they know the secret

Receive = Callable[["Channel", dict[str, Any]], None]


class Channel:
    """One end of a connection. It calls `receive`, on a thread of its own, with itself and each message that
    comes; at the end with {"gone": why}.
    """

    def __init__(self, connection: socket.socket, receive: Receive, secret: bytes, listens: bool):
        """Both ends prove to each other that they know the secret, or InputError. listens: this end
        accepted the connection. If this fails, the connection is closed.
        """
        self._connection = connection
        self._on_message = receive
        self._lock = threading.Lock()
        self._gone = threading.Event()
        try:
            self._authenticate(secret, listens)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(HEARTBEAT_SECONDS)
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Sends one line. If the connection is lost, `receive` is called with {"gone": why}."""
        with self._lock, suppress(OSError):
            line = self._out.sign("line", json.dumps(message).encode())
            self._connection.sendall(line[:SIGNATURE_SIZE].hex().encode() + line[SIGNATURE_SIZE:] + b"\n")

    def _authenticate(self, secret: bytes, listens: bool) -> None:
        deadline = time.monotonic() + _PROOF_SECONDS
        number = secrets.token_bytes(SIGNATURE_SIZE)
        self._connection.settimeout(_PROOF_SECONDS)
        self._connection.sendall(number)
        other = self._receive_exactly(SIGNATURE_SIZE, deadline)
        run = (number + other if listens else other + number).hex()
        names = ("process 0", "another process") if listens else ("another process", "process 0")
        self._out, self._in = (Signer(secret, run, name) for name in names)
        self._connection.sendall(self._out.sign("proof", b""))
        self._in.verify("proof", self._receive_exactly(SIGNATURE_SIZE, deadline))

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (part := self._connection.recv(size - len(data))):
                raise ConnectionResetError("the connection was closed")
            data += part
        return data

    def _receive(self) -> None:
        why = "its connection was lost"
        try:
            file = self._connection.makefile("rb")
            while line := file.readline(_MAX_LINE):
                signature = bytes.fromhex(line[: 2 * SIGNATURE_SIZE].decode())
                content = line[2 * SIGNATURE_SIZE :].rstrip(b"\n")
                self._on_message(self, dict(json.loads(self._in.verify("line", signature + content))))
        except OSError:
            pass
        except (ValueError, TypeError):  # also InputError
            why = "it sent a line with a wrong signature"
        self._on_message(self, dict(gone=why))
        self._gone.set()
        self._connection.close()

    def _send_heartbeats(self) -> None:
        while not self._gone.wait(_BEAT_SECONDS):
            self.send()


class Listener:
    """Accepts connections, and makes a `Channel` of each whose other end proves that it knows the secret. Of
    those that have not proved it yet the oldest is closed, so they lock nobody out.
    """

    def __init__(self, server: socket.socket, secret: bytes, receive: Receive):
        """server: from `listen`; secret: of the run; receive: of the channels."""
        self.rejected = 0  # connections that did not know the secret
        self._server = server
        self._secret = secret
        self._on_message = receive
        self._lock = threading.Lock()
        self._unproved = dict[socket.socket, None]()  # the oldest first
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections."""
        self._closed = True
        with suppress(OSError):
            self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._server.accept()[0]
            except OSError:  # too many open files, or closed
                time.sleep(0.1)
                continue
            with self._lock:
                self._unproved[connection] = None
                if len(self._unproved) > _UNPROVED:  # a process of ours proves the secret at once
                    oldest = next(iter(self._unproved))
                    del self._unproved[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            Channel(connection, self._on_message, self._secret, listens=True)
        except InputError:
            self.rejected += 1
        except OSError:
            pass
        finally:
            with self._lock:
                self._unproved.pop(connection, None)


def listen(host: str, port: int, flag: str = "coordinator") -> socket.socket:
    """A server socket at the address of a flag, and at no other; it must be one that the others can reach."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_local(str(address[0])) and not is_local(host):
            raise InputError(
                f"--{flag}={host}:{port} is {address[0]} here, which other machines cannot reach: give"
                " an address that they can reach, or 127.0.0.1 if all processes are on this machine"
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"--{flag}={host}:{port} cannot be listened on: {error.strerror}") from error
