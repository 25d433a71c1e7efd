"""Named tensors from one process to another: `send_weights` in a trainer, and the `TensorStream` that a
process with an engine reads.

trainer ─ update: version, mode ─► engine
trainer ─ tensor: name, dtype, shape; part: bytes, … ─► engine ─ taken ─► trainer sends the tensor after next
trainer ─ end ─► engine ─ updated: version, or failed: why ─► trainer
"""

from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Self

import ml_dtypes
import numpy as np

from ..errors import InputError, format_names, format_value
from ..modes import in_default_modes
from .channel import GONE, Channel, Message, connect, parse_host_port
from .secret import load_secret

UPDATE = "update"  # names of messages of a trainer
_TENSOR = "tensor"
_PART = "part"
_END = "end"
_TAKEN = "taken"  # names of messages of an engine
UPDATED = "updated"
FAILED = "failed"
_FLOATS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_PART_BYTES = 1 << 22
_AHEAD = 2  # tensors that are sent before the engine has taken them
_SILENT_SECONDS = 600.0  # without a message, after which a stream fails


class TensorStream:
    """The tensors of a trainer, as an iterator of their names and arrays. It is read in one thread, and
    messages are put into it by another.
    """

    def __init__(self, channel: Channel, silent_seconds: float = _SILENT_SECONDS):
        """Makes a stream. silent_seconds: the time without a message after which it fails."""
        self.channel = channel
        self._silent_seconds = silent_seconds
        self._messages = SimpleQueue[Message]()
        self._count = 0  # tensors that were read
        self._closed = False

    def put(self, message: Message) -> None:
        """Adds a message of the trainer."""
        if not self._closed:
            self._messages.put(message)

    def close(self) -> None:
        """Reads no more: messages that the trainer still sends are dropped."""
        self._closed = True
        self._messages = SimpleQueue()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, np.ndarray]:
        """Returns the next name and array, of float32, bfloat16 or float16. Raises InputError if the trainer
        is gone, or its messages are wrong.
        """
        name, args = self._next()
        if name == _END:
            raise StopIteration
        if name != _TENSOR:
            raise InputError(f"a trainer sent {format_value(name)} in place of a tensor: use one version")
        tensor, dtype, shape = args
        if dtype not in _FLOATS:
            raise InputError(
                f"{format_value(tensor)} has dtype {format_value(dtype)}: send {', '.join(_FLOATS)}"
            )
        array = np.empty(shape, _FLOATS[dtype])
        buffer = array.reshape(-1).view(np.uint8)
        filled = 0
        while filled < len(buffer):
            name, args = self._next()
            if name != _PART or not 0 < len(args[0]) <= len(buffer) - filled:
                raise InputError(f"the bytes of {format_value(tensor)} do not fit its shape {shape}")
            buffer[filled : filled + len(args[0])] = np.frombuffer(args[0], np.uint8)
            filled += len(args[0])
        self._count += 1
        self.channel.send(_TAKEN, self._count)
        return tensor, array

    def _next(self) -> tuple[str, list[Any]]:
        after = f"after {self._count} tensors"
        try:
            (_, name, args) = self._messages.get(timeout=self._silent_seconds)
        except Empty:
            raise InputError(
                f"a trainer sent nothing for {self._silent_seconds:g} seconds {after}: send the weights again"
            ) from None
        if name == GONE:
            raise InputError(f"the stream of weights broke off {after} ({args[0]}): send the weights again")
        return name, args


@in_default_modes
def send_weights(
    address: str,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    version: int | None = None,
    mode: str = "continue",
    secret_file: str | None = None,
) -> int:
    """Sends new weights to a running engine in another process, and waits until the engine has them.

    The engine calls `receive_weights`, or it is a server with `--weight_address`. Tensors are read one by
    one, and at most two wait at the engine. If this call fails, the engine keeps its old weights.

    Messages are signed with the secret, and they are not encrypted, so use a network that you trust.

    Args:
        address: HOST:PORT at which the engine listens.
        tensors: a mapping from published names to arrays, as `xj.params.params_to_tensors(params, config)`
            returns it, or pairs of a name and an array. The dtype is float32, bfloat16 or float16. An array
            on a device is copied to the host when its turn comes.
        version: the version of these weights. None takes the last version plus 1 (see `Engine.update`).
        mode: the fate of unfinished answers: "continue", "wait", "abort" or "recompute" (see
            `Engine.update`).
        secret_file: a file with the mode 0600 and 32 or more random bytes, equal on both machines. None takes
            the user's own secret, if the engine is on this machine.

    Returns:
        The version of the weights in the engine.

    Raises:
        InputError: nobody listens at the address, the secret differs, a tensor is not a float array, or the
            engine rejects the weights or is gone.
    """
    (host, port) = parse_host_port("address", address, 1)
    secret = load_secret(secret_file, host)
    events = SimpleQueue[Message]()
    try:
        channel = connect(host, port, events.put, secret)
    except OSError as error:
        raise InputError(
            f"no engine takes weights at {address} ({error}): call receive_weights, or start the server with"
            " --weight_address"
        ) from error
    try:
        return _Sender(channel, events, address).send(tensors, version, mode)
    finally:
        channel.end()


class _Sender:
    """The trainer's end of a connection."""

    def __init__(self, channel: Channel, events: SimpleQueue[Message], address: str):
        self._channel = channel
        self._events = events
        self._address = address
        self._taken = 0
        self._version: int | None = None  # of the engine, once it has the weights

    def send(self, tensors: Any, version: int | None, mode: str) -> int:
        self._channel.send(UPDATE, version, mode)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for number, (name, tensor) in enumerate(pairs):
            while self._taken <= number - _AHEAD:
                self._handle_event()
            self._send_tensor(name, tensor)
        self._channel.send(_END)
        while self._version is None:
            self._handle_event()
        return self._version

    def _send_tensor(self, name: str, tensor: Any) -> None:
        if not getattr(tensor, "is_fully_addressable", True):
            raise InputError(f"{name} lies on devices of several processes: gather it in this one first")
        array = np.asarray(tensor)
        if array.dtype.name not in _FLOATS:
            raise InputError(f"{name} is {array.dtype}: send tensors of {format_names(_FLOATS)}")
        self._channel.send(_TENSOR, name, array.dtype.name, list(array.shape))
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for at in range(0, len(data), _PART_BYTES):
            self._channel.send_bytes(_PART, data[at : at + _PART_BYTES])

    def _handle_event(self) -> None:
        """Waits for a message of the engine."""
        (_, name, args) = self._events.get()
        if name == _TAKEN:
            (self._taken,) = args
        elif name == UPDATED:
            (self._version,) = args
        elif name == FAILED:
            raise InputError(args[0])
        else:
            why = args[0] if name == GONE else f"it sent {format_value(name)}"
            raise InputError(f"the engine at {self._address} is gone ({why}), and may have its old weights")
