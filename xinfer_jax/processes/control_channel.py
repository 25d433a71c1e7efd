"""Ordered messages between process 0 and the other processes of a `jax.distributed` run."""

import itertools
import socket
from queue import Empty, SimpleQueue
from typing import Any

from jax._src import distributed

from ..errors import InputError
from .channel import GONE, OTHER_SECRET, Channel, Listener, Message, connect
from .codec import encode_message
from .secret import is_local, load_secret, sign

_WAIT = 2**31 - 1  # milliseconds: jax ends this process if process 0 ends meanwhile
_numbers = itertools.count()


class ControlChannel:
    """Connections of process 0 to all others. Every process creates the same ones in the same order.

    The others find the port in the store of JAX's coordination service. Anyone who reaches that service can
    write there, but connects nobody to a process without the secret, or of another run.
    """

    def __init__(self, run: Any, name: str, secret: bytes):
        """Makes the channel of a process. run: `jax._src.distributed.global_state`. name: no other channel of
        the run has it.
        """
        self._events = SimpleQueue[Message]()
        host, _, port = run.coordinator_address.rpartition(":")
        host = host.strip("[]")
        own_secret = sign(secret, f"{run.coordinator_address} {name}".encode())
        self._leads = run.process_id == 0
        if not self._leads:
            port = run.client.blocking_key_value_get(name, _WAIT)
            try:
                self._channels = [connect(host, int(port), self._events.put, own_secret)]
            except OSError as error:
                raise InputError(
                    f"process 0 does not answer at {host}:{port}, for its messages: {error}"
                ) from error
            self._channels[0].send("begin")
            return
        with socket.create_connection((host, int(port))) as probe:
            own = probe.getsockname()[0]  # this machine's own address, if the name stands for several
        bind = "" if is_local(own) and not is_local(host) else own
        server = socket.create_server((bind, 0), family=probe.family)
        listener = Listener(server, self._events.put, own_secret)
        run.client.key_value_set(name, str(server.getsockname()[1]))
        try:
            self._channels = [self._next_member(listener) for _ in range(1, run.num_processes)]
        finally:
            listener.close()

    def _next_member(self, listener: Listener) -> Channel:
        """Returns the connection to one more process. Raises InputError if one is gone or not admitted."""
        while True:
            try:
                channel, name, args = self._events.get(timeout=1)
            except Empty:
                if listener.rejected:
                    raise InputError(f"another process {OTHER_SECRET}") from None
                continue
            if name == GONE:
                raise InputError(f"another process is gone ({args[0]})")
            return channel

    def send(self, name: str, *args: Any) -> None:
        """Sends a message to process 0, or from process 0 to all others."""
        content = encode_message([name, *args])
        for channel in self._channels:
            channel.send_encoded(content)

    def receive(self) -> list[Any]:
        """Returns the name and the arguments of the next message. Raises InputError if a process is gone."""
        (_, name, args) = self._events.get()
        if name == GONE:
            raise InputError(f"{'another process' if self._leads else 'process 0'} is gone ({args[0]})")
        return [name, *args]

    def broadcast(self, value: Any) -> Any:
        """Returns the value of process 0 in every process."""
        if not self._leads:
            return self.receive()[1]
        self.send("value", value)
        return value

    def agree(self, problem: str) -> str:
        """Returns the problem of one of the processes. "": there is none. All call it, each with its
        problem.
        """
        if not self._leads:
            self.send("problem", problem)
        for _ in self._channels if self._leads else ():
            problem = self.receive()[1] or problem
        return str(self.broadcast(problem))

    def end(self) -> None:
        """Sends no more. The others receive all messages."""
        for channel in self._channels:
            channel.end()


def open_control_channel() -> ControlChannel:
    """Returns a channel between the processes that `jax.distributed.initialize` connected. Raises InputError
    if they share no secret, or have different ones.
    """
    run: Any = distributed.global_state
    secret = load_secret(None, run.coordinator_address.rpartition(":")[0])
    return ControlChannel(run, f"xinfer_jax/{next(_numbers)}", secret)
