"""A connection between two processes of a run. Each message has a name and arguments.

both send a random number ─ both prove that they know the secret ─► messages: signature, length, content. The
messages of each direction are numbered. A content is JSON, or a zero byte, a name, a zero byte and raw bytes.
"""

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from typing import Any, NamedTuple

from ..errors import InputError
from .codec import decode_message, encode_message
from .secret import SIGNATURE_SIZE, is_local, sign

GONE = "gone"  # the name of the last message; its argument says why no more come
OTHER_SECRET = (  # of an error, after the name of the process
    "has another secret: give all processes the same --secret_file, and keep others out of their network"
)
HEARTBEAT_SECONDS = 20  # of silence after which a process counts as gone, for parents and for jax
_BEAT = "beat"
_BEAT_SECONDS = 5  # between two heartbeats
_PROOF_SECONDS = 10  # for the other end to prove that it knows the secret
_LENGTH_SIZE = 4  # bytes
_MAX_BYTES = 1 << 30  # of a message
_SMALL_BYTES = 1 << 16  # of a content that is copied, to go in one packet with its signature
_RAW = b"\0"  # begins a content that is not JSON
_UNPROVED = 64  # most connections at a time that have not yet proved that they know the secret


class Message(NamedTuple):
    """A message that has come over a channel."""

    channel: "Channel"
    name: str
    args: list[Any]


Receive = Callable[[Message], object]


class Channel:
    """One end of a connection. On a separate thread it calls `receive` with each message that comes, and at
    the end with the message `GONE`.
    """

    def __init__(self, connection: socket.socket, receive: Receive, secret: bytes, listens: bool):
        """Makes a channel. Both ends prove to each other that they know the secret. If this fails, the
        connection is closed, and InputError is raised. listens: True: this end accepted the connection.
        """
        self._connection = connection
        self._file = connection.makefile("rb")
        self._on_message = receive
        self._lock = threading.Lock()
        self._gone = threading.Event()
        try:
            self._authenticate(secret, listens)
            connection.settimeout(HEARTBEAT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.host = str(connection.getsockname()[0])  # the address of this machine for the other end
        except BaseException:
            self._close()
            raise
        for work in (self._receive, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()

    def send(self, name: str, *args: Any) -> None:
        """Sends a message. If the connection is lost, `receive` is called with `GONE`."""
        self.send_encoded(encode_message([name, *args]))

    def send_bytes(self, name: str, data: bytes | memoryview) -> None:
        """Sends a message whose one argument is raw bytes, which the other end gets as a `memoryview`."""
        self.send_encoded(b"".join((_RAW, name.encode(), _RAW, data)))

    def send_encoded(self, content: bytes) -> None:
        """Sends the list of a name and arguments that `encode_message` encoded."""
        if len(content) > _MAX_BYTES:
            raise InputError(f"a message has {len(content)} bytes, more than {_MAX_BYTES}: send less at once")
        length = len(content).to_bytes(_LENGTH_SIZE)
        with self._lock:
            head = self._sign(length, content) + length
            try:
                for part in (head, content) if len(content) > _SMALL_BYTES else (head + content,):
                    self._connection.sendall(part)
            except OSError:  # a part may have been sent, so no other message can follow
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Sends no more. The other end receives all messages, and then `GONE`."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _authenticate(self, secret: bytes, listens: bool) -> None:
        deadline = time.monotonic() + _PROOF_SECONDS
        number = secrets.token_bytes(SIGNATURE_SIZE)
        self._connection.settimeout(_PROOF_SECONDS)
        self._connection.sendall(number)
        other = self._read_until(deadline)
        run = number + other if listens else other + number
        self._sign = _signer(sign(secret, run, bytes([listens])))
        self._sign_other = _signer(sign(secret, run, bytes([not listens])))
        self._connection.sendall(self._sign())
        if not compare_digest(self._read_until(deadline), self._sign_other()):
            raise InputError(f"the other process {OTHER_SECRET}")

    def _read_until(self, deadline: float) -> bytes:
        """Returns the bytes of a signature. Raises OSError if they have not all come by then."""
        data = b""
        while len(data) < SIGNATURE_SIZE:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            data += self._read(1)
        return data

    def _read(self, size: int) -> bytes:
        if len(data := self._file.read(size)) < size:
            raise ConnectionResetError("the connection was closed")
        return data

    def _receive(self) -> None:
        why = "its connection was lost"
        try:
            while True:
                signature = self._read(SIGNATURE_SIZE)
                length = self._read(_LENGTH_SIZE)
                content = self._read(min(int.from_bytes(length), _MAX_BYTES))
                if not compare_digest(signature, self._sign_other(length, content)):
                    raise InputError("it sent a message with a wrong signature")
                (name, *args) = _decode_content(content)
                if name != _BEAT:
                    self._on_message(Message(self, name, args))
        except OSError:
            pass
        except Exception as error:  # whatever it is, somebody waits for the next message
            why = str(error) or type(error).__name__
        self._on_message(Message(self, GONE, [why]))
        self._gone.set()
        self._close()

    def _send_heartbeats(self) -> None:
        while not self._gone.wait(_BEAT_SECONDS):
            self.send(_BEAT)

    def _close(self) -> None:
        self._file.close()
        self._connection.close()


def _decode_content(content: bytes) -> list[Any]:
    """Returns the name and the arguments of a message."""
    if content[:1] != _RAW:
        decoded: list[Any] = decode_message(content)
        return decoded
    end = content.find(_RAW, 1)
    if end < 0:
        raise InputError("a message of another process has bytes without a name: use one version")
    return [content[1:end].decode(), memoryview(content)[end + 1 :]]


def _signer(key: bytes) -> Callable[..., bytes]:
    """Returns a function that signs the messages of one direction, in their order."""
    numbers = itertools.count()
    return lambda *parts: sign(key, next(numbers).to_bytes(8), *parts)


def connect(host: str, port: int, receive: Receive, secret: bytes) -> Channel:
    """Returns a channel to the process that listens at an address. Raises OSError if none answers there, and
    InputError if it has another secret.
    """
    return Channel(socket.create_connection((host, port), HEARTBEAT_SECONDS), receive, secret, listens=False)


class Listener:
    """Accepts connections, and makes a `Channel` of each whose other end proves that it knows the secret. If
    too many have not proved it yet, the oldest is closed, so they lock nobody out.
    """

    def __init__(self, server: socket.socket, receive: Receive, secret: bytes):
        """Accepts connections from now on. server: the result of `listen`. receive: the function that the
        channels call. secret: the secret of the run.
        """
        self.rejected = 0  # connections that did not know the secret
        self._server = server
        self._on_message = receive
        self._secret = secret
        self._lock = threading.Lock()
        self._unproved = dict[socket.socket, None]()  # the oldest first
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections."""
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
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


def parse_host_port(what: str, text: str, least_port: int = 0, more: str = "") -> tuple[str, int]:
    """Returns the host and the port of HOST:PORT. Raises InputError for another text.

    Args:
        what: the name of the text in errors, such as "--peers".
        text: HOST:PORT. A host with colons has brackets.
        least_port: 0 lets the system choose a port.
        more: another form that the text may have, for an error.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and least_port <= int(port) < 2**16):
        raise InputError(f"{what}={text} must be HOST:PORT{more}")
    return host.strip("[]"), int(port)


def listen(host: str, port: int, what: str = "--coordinator") -> socket.socket:
    """Returns a server socket at an address, and at no other address. Raises InputError, also if other
    machines cannot reach it. what: the name of the address in errors.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_local(str(address[0])) and not is_local(host):
            raise InputError(
                f"{what}={host}:{port} is {address[0]} here, which other machines cannot reach: give"
                " an address that they can reach, or 127.0.0.1 if all processes are on this machine"
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"{what}={host}:{port} cannot be listened on: {error.strerror}") from error
