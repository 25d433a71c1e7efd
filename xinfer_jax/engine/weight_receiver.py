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
    """Lets trainers in other processes replace the weights of an engine by `send_weights`, until the result
    is closed: it goes in a `with` block, or has `close()`.

    Each stream is an `Engine.update`: the leaves are converted as they arrive, and the engine answers
    meanwhile. Who knows the secret may replace the weights. Messages are signed, and nothing is encrypted:
    use a network that you trust.

    Args:
        engine: an engine of this process alone.
        address: HOST:PORT to listen at; port 0: any free one, which `address` of the result has.
        secret_file: as of `send_weights`.

    Raises:
        InputError: the address or the secret cannot be used; the engine is over several processes.
    """
    (host, port) = parse_host_port("address", address)
    secret = load_secret(secret_file, host)
    return WeightReceiver(engine, listen(host, port, "address"), secret)


class WeightReceiver:
    """Takes weights for one engine. `receive_weights` makes it.

    Attributes:
        address: HOST:PORT where it listens.
    """

    def __init__(
        self, engine: Any, listening: socket.socket, secret: bytes, log: Callable[[str], None] | None = None
    ):
        """log: is called with a line for each stream that has ended."""
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
        """Takes no more weights. Streams that have not ended fail."""
        self._listener.close()
        for channel, stream in list(self._streams.items()):
            stream.put(Message(channel, GONE, ["the engine takes no more weights"]))

    def _receive(self, message: Message) -> None:
        """On the thread of a connection. What it raises ends the connection."""
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
