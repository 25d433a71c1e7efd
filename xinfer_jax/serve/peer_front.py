"""`PeerEngines`: a dispatcher over engines of other processes, in a process without weights. It holds the
requests. Processes that prefill or decode register with it, and may come and go.

They are separate jax processes, because the members of one `jax.distributed` run end together. All messages
go through this process. Only pages go from one to another. Pages that decoding wrote do not go back.
"""

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from ..checkpoint.loading import Model
from ..engine.dispatcher import Dispatcher
from ..engine.engine_loop import EngineLoop
from ..engine.row import HeldAdapter
from ..engine.statistics import EngineStats, collect_stats
from ..errors import InputError
from ..processes.channel import GONE, Channel, Listener, Message
from ..processes.coordinator import find_difference
from .peer_messages import EVENTS, REQUESTS

_SUMS = {  # of `EngineStats`
    "hits",
    "preemptions",
    "prefill_tokens",
    "generated_tokens",
    "programs",
    "passes",
    "drafted",
    "drafted_by_place",
    "accepted",
}


class Peer:
    """An `EngineEndpoint` in another process, which has registered."""

    def __init__(self, channel: Channel, about: dict[str, Any], counts: dict[str, int]):
        """Makes a peer. about: its description of itself."""
        self.channel = channel
        self.about = about
        self.role = about["role"]
        self.name = str(about["name"])
        self.pages = about["pages"]
        self.reported = counts
        self.error: BaseException | None = None  # why it is gone

    @property
    def last_step_time(self) -> float:
        """Now: a process that does not answer is removed."""
        return time.monotonic()

    def counts(self) -> dict[str, int]:
        """Returns the counters that it reported last. Once it is gone, only the counters that are sums."""
        return {name: x if not self.error or name in _SUMS else 0 for name, x in self.reported.items()}

    def __getattr__(self, name: str) -> Any:
        if name not in REQUESTS:
            raise AttributeError(name)
        return partial(self.channel.send, name)


class PeerEngines(EngineLoop):
    """Gives prompts to processes that prefill, and prefilled rows to processes that decode. If a process that
    prefills ends, its prompts go to another. If a process that decodes ends, the requests of its rows fail.
    """

    version = 0  # the processes keep their weights

    def __init__(self, model: Model, listening: socket.socket, secret: bytes, log: Callable[[str], None]):
        """Accepts processes from now on. model: a model without weights. listening: the socket to which they
        connect.
        """
        self.create_parts()
        self.model = model
        self._log = log
        self.core = self._dispatcher = Dispatcher(self._notify, self._wait_for_work)
        # Also sizes of the first of the processes that are connected.
        self.shape = cast(Any, SimpleNamespace(impl=None, routed_experts=False, support=False))
        self._past: list[Peer] = []
        self.__enter__()
        self._listener = Listener(listening, self._receive, secret)

    @property
    def engines(self) -> Sequence[Any]:
        """The processes that are connected."""
        return list(self._dispatcher.endpoints)

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Slots of all processes that decode."""
        return max(1, sum(peer.about["rows"] for peer in self._dispatcher.of_role("decode")))

    @property
    def usable_capacity(self) -> int:  # type: ignore[override]
        """Tokens of a prompt and its answer together that every process can hold."""
        least = self.shape.usable_capacity
        return min((peer.about["usable_capacity"] for peer in self.engines), default=least)

    @property
    def missing(self) -> str:
        """The role that no process has. "": none."""
        for role in ("prefill", "decode"):
            if not self._dispatcher.of_role(role):
                return f"no {role} process is connected"
        return ""

    @property
    def alive(self) -> bool:
        return self.error is None and not self.missing

    @property
    def stats(self) -> EngineStats:
        """Returns the statistics, also of processes that have ended."""
        return collect_stats([*self.engines, *self._past], [self.counters])

    def check_local(self, what: str) -> None:
        raise InputError(f"engines in other processes keep their {what}: start them with others")

    def close(self) -> None:
        """Ends all requests with an error, and the connections."""
        super().close()
        for peer in self.engines:
            peer.channel.send("close")
        self._listener.close()

    def wait_for_both(self, stop: Callable[[], bool]) -> None:
        """Waits until a process that prefills and one that decodes are connected, or `stop` returns True."""
        with self._condition:
            while not stop() and self.missing:
                self._condition.wait(0.2)

    def check_open(self) -> None:
        super().check_open()
        if self.missing:
            raise InputError(self.missing)

    # --- messages -----------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        self.call_soon(partial(self._handle, message))

    def _handle(self, message: Message) -> None:
        (channel, name, args) = message
        peer = next((peer for peer in self.engines if peer.channel is channel), None)
        try:
            if peer is None:
                if name == "register":
                    self._register(channel, *args)
            elif name == GONE:
                self._remove(peer, args[0])
            elif name == "counts":
                (peer.reported,) = args
            elif name in EVENTS:
                getattr(self._dispatcher, name)(*args)
            else:
                raise InputError(f"{name!r} is unknown: start all processes with one version")
        except Exception as error:  # the others go on
            why = f"{type(error).__name__} in a message: {error}"
            channel.send("reject", why)
            if peer and not peer.error:
                self._remove(peer, why)

    def _register(self, channel: Channel, about: dict[str, Any], counts: dict[str, int]) -> None:
        peer = Peer(channel, about, counts)
        others = self.engines
        own = others[0].about["same"] if others else dict(config=str(self.model.config))
        there = {name: about["same"].get(name) for name in own}
        if difference := find_difference({"the front process": own, f"the {peer.name}": there}):
            self._log(f"the {peer.name} was rejected: {difference}")
            channel.send("reject", difference)
            return
        if not others:
            vars(self.shape).update(about)
        held: Any = self.shape.adapters
        adapters = {name: HeldAdapter(name, i, bytes.fromhex(digest)) for name, (i, digest) in held.items()}
        self.adapters.replace_all(adapters)
        self._dispatcher.endpoints.append(peer)
        self._log(f"the {peer.name} is connected")

    def _remove(self, peer: Peer, why: str) -> None:
        peer.error = InputError(f"the {peer.name} is gone ({why})")
        self._log(str(peer.error))
        self._past.append(peer)
        self._dispatcher.lose(peer)
