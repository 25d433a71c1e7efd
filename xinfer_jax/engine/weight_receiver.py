"""`receive_weights`: an engine takes new weights from trainers in other processes (`send_weights`)."""

import socket
import threading
from collections.abc import Callable
from typing import Any, Self

from ..errors import InputError, format_message
from ..processes.channel import GONE, Channel, Listener, Message, listen, parse_host_port
from ..processes.secret import load_secret
from ..processes.tensor_stream import FAILED, UPDATE, UPDATED, TensorStream


def receive_weights(engine: Any, address: str, *, secret_file: str | None = None) -> "WeightReceiver":
    """Lets trainers in other processes replace the weights of an engine by `send_weights`.

    Use the result in a `with` block, or call its `close()`. Until then, each received stream is an
    `Engine.update`: the leaves are converted as they arrive, and the engine answers meanwhile.

    Anybody who knows the secret can replace the weights. Messages are signed, and they are not encrypted, so
    use a network that you trust.

    Args:
        engine: an engine in this process alone.
        address: HOST:PORT to listen at. With port 0 any free port is taken, and `address` of the result has
            it.
        secret_file: the file with the secret, equal on both machines (see `send_weights`).

    Returns:
        A `WeightReceiver`.

    Raises:
        InputError: the address or the secret cannot be used, or the engine is over several processes.
    """
    (host, port) = parse_host_port("address", address)
    secret = load_secret(secret_file, host)
    return WeightReceiver(engine, listen(host, port, "address"), secret)


class WeightReceiver:
    """Receives weights for one engine. `receive_weights` creates it.

    Attributes:
        address: HOST:PORT at which it listens.
    """

    def __init__(
        self, engine: Any, listening: socket.socket, secret: bytes, log: Callable[[str], None] | None = None
    ):
        """Creates a receiver. `receive_weights` does it for you.

        Args:
            engine: the engine whose weights are replaced.
            listening: the socket.
            secret: the secret that signs messages.
            log: a function that is called with a line for each stream that has ended. None logs nothing.
        """
        try:
            engine.check_local("weights")
            if any(each.channel for each in engine.engines):
                raise InputError(
                    "an engine over several processes takes no weights from a stream: give update() the"
                    " directory of a checkpoint in process 0"
                )
        except InputError:
            listening.close()
            raise
        self._engine = engine
        self._log = log or (lambda line: None)
        self._lock = threading.Lock()  # one update at a time, so that each stream gets its own version
        self._streams: dict[Channel, TensorStream] = {}
        (host, port) = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = Listener(listening, self._receive, secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening. Streams that have not ended fail."""
        self._listener.close()
        for channel, stream in list(self._streams.items()):
            stream.put(Message(channel, GONE, ["the engine takes no more weights"]))

    def _receive(self, message: Message) -> None:
        """Handles a message on the thread of a connection. If it raises an error, the connection ends."""
        channel = message.channel
        stream = self._streams.get(channel)
        if stream is not None:
            stream.put(message)
            if message.name == GONE:
                del self._streams[channel]
        elif message.name == UPDATE:
            (version, mode) = message.args
            stream = self._streams[channel] = TensorStream(channel)
            threading.Thread(target=self._update, args=(stream, version, mode), daemon=True).start()
        elif message.name != GONE:
            raise InputError(f"a trainer sent {message.name!r} in place of an update: use one version")

    def _update(self, stream: TensorStream, version: int | None, mode: str) -> None:
        channel = stream.channel
        try:
            with self._lock:
                self._engine.update(stream, version=version, mode=mode)
                new = self._engine.version
            self._log(f"weights of version {new} have come from a trainer")
            channel.send(UPDATED, new)
        except Exception as error:  # whatever it is, the trainer waits for an answer
            why = format_message(error) or type(error).__name__
            self._log(f"new weights of a trainer were rejected: {why}")
            channel.send(FAILED, why)
        finally:
            stream.close()
            channel.end()
