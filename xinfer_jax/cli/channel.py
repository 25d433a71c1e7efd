"""The connection between the parents of two processes: JSON lines, each signed with the run's secret.

both send a random number ─ both prove that they know the secret ─► signed lines, numbered in each direction
"""

import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ..errors import InputError
from ..signing import SIZE, Signer, is_local

HEARTBEAT_SECONDS = 20  # of silence, after which a process counts as gone: between parents, and to jax
_BEAT_SECONDS = 5
_PROOF_SECONDS = 10  # between two signs of life; until the other has proved that it knows
_LONGEST = 1 << 22  # bytes of a line


class Channel:
    """One end of a connection. What comes is put into `events` with the channel itself; at last
    {"gone": why}.
    """

    def __init__(self, connection: socket.socket, events: SimpleQueue, secret: bytes, listens: bool):
        """Proves to the other end that this one knows the secret, and has it do the same.

        Args:
            connection: is closed where that fails.
            events: gets what comes.
            secret: of the run.
            listens: this end accepted the connection; the other one opened it.

        Raises:
            InputError: the other end does not know the secret.
            OSError: it is gone.
        """
        self._connection = connection
        self._events = events
        self._lock = threading.Lock()
        self._gone = threading.Event()
        try:
            self._meet(secret, listens)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(HEARTBEAT_SECONDS)
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def say(self, **said: Any) -> None:
        """Sends one line; who does not get it is gone, which is heard."""
        with self._lock, suppress(OSError):
            line = self._out.sign("line", json.dumps(said).encode())
            self._connection.sendall(line[:SIZE].hex().encode() + line[SIZE:] + b"\n")

    def _meet(self, secret: bytes, listens: bool) -> None:
        until = time.monotonic() + _PROOF_SECONDS
        number = secrets.token_bytes(SIZE)
        self._connection.settimeout(_PROOF_SECONDS)
        self._connection.sendall(number)
        other = self._exactly(SIZE, until)
        run = (number + other if listens else other + number).hex()
        names = ("process 0", "another process") if listens else ("another process", "process 0")
        self._out, self._in = (Signer(secret, run, name) for name in names)
        self._connection.sendall(self._out.sign("proof", b""))
        self._in.verify("proof", self._exactly(SIZE, until))

    def _exactly(self, size: int, until: float) -> bytes:
        data = b""
        while len(data) < size:
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            if not (part := self._connection.recv(size - len(data))):
                raise ConnectionResetError("the connection was closed")
            data += part
        return data

    def _read(self) -> None:
        why = "its connection was lost"
        try:
            file = self._connection.makefile("rb")
            while line := file.readline(_LONGEST):
                signature = bytes.fromhex(line[: 2 * SIZE].decode())
                content = line[2 * SIZE :].rstrip(b"\n")
                self._events.put((self, dict(json.loads(self._in.verify("line", signature + content)))))
        except OSError:
            pass
        except (ValueError, TypeError):  # InputError too
            why = "it sent a line with a wrong signature"
        self._events.put((self, dict(gone=why)))
        self._gone.set()
        self._connection.close()

    def _beat(self) -> None:
        while not self._gone.wait(_BEAT_SECONDS):
            self.say()


def listen(host: str, port: int) -> socket.socket:
    """Listens at the address that --coordinator names, and at no other.

    Raises:
        InputError: it is no address of this machine, one that others cannot reach, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_local(str(address[0])) and not is_local(host):
            raise InputError(
                f"--coordinator={host}:{port} is {address[0]} here, which other machines cannot reach: give"
                " the address that they know, or 127.0.0.1 where all processes are here"
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"--coordinator={host}:{port} cannot be listened on: {error.strerror}") from error
