"""`PeerEngines`: the engines of other processes behind one queue, in a process without a model. It holds the
requests; processes that prefill or decode register with it, and may come and go.

They are jax processes of their own, because the members of one `jax.distributed` run end together. All
messages go through this process, only pages go from one to another; pages that decoding wrote do not go back.
A row at a process has a ticket, a number that is used once: a late message about a row that is elsewhere by
now is ignored.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self

from ..checkpoint.loading import Model
from ..cli.channel import Channel
from ..engine.messages import decode_message, encode_message
from ..engine.requests import Request
from ..engine.statistics import EngineStats, collect_stats
from ..engine.submission import EngineBase, WaitsOnCondition
from ..errors import InputError
from .peer_dispatch import Peer, PeerDispatch
from .peer_worker import logprobs_from_message

_UNPROVED = 64  # most connections that have not yet proved that they know the secret; the oldest is closed


class PeerEngines(PeerDispatch, WaitsOnCondition, EngineBase):
    """Gives prompts to processes that prefill, and prefilled rows to processes that decode, as
    `DisaggregatedEngine` does within a process. If a process that prefills ends, its prompts go to another.
    If a process that decodes ends, the requests of its rows fail.

    Attributes:
        model: without weights.
    """

    def __init__(self, model: Model, listening: socket.socket, secret: bytes, log: Callable[[str], None]):
        """Accepts processes from now on.

        Args:
            model: of a `Checkpoint`.
            listening: where they connect.
            secret: that they know.
            log: writes a line.
        """
        super().__init__(log)
        self.model = model
        self.impl = None
        self._secret = secret
        self._listening = listening
        self._closed: BaseException | None = None
        self._about: dict[str, Any] = {}  # sizes of the first of the processes that are connected
        self._unproved: dict[socket.socket, None] = {}  # the oldest first
        self._events: SimpleQueue = SimpleQueue()
        for work in (self._accept, self._handle_events):
            threading.Thread(target=work, daemon=True).start()

    # --- as an engine -------------------------------------------------------------------------------------

    @property
    def engines(self) -> Sequence[Any]:
        return list(self.peers)

    @property
    def started(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        """Slots of all processes that decode."""
        return max(1, sum(peer.about["rows"] for peer in self._of("decode")))

    @property
    def load(self) -> int:
        """Answers of unfinished requests."""
        with self._condition:
            return sum(len(request.answers) for request in self._unfinished)

    @property
    def usable_capacity(self) -> int:
        """Tokens of a prompt and its answer together that every process can hold."""
        return min(
            (peer.about["usable_capacity"] for peer in list(self.peers)),
            default=self._about["usable_capacity"],
        )

    def __getattr__(self, name: str) -> Any:
        if name not in ("num_draft_tokens", "weight_bytes", "cache_bytes"):
            raise AttributeError(name)
        return self._about[name]

    @property
    def missing(self) -> str:
        """The role that no process has; "": none."""
        roles = (role for role in ("prefill", "decode") if not self._of(role))
        return next((f"no {role} process is connected" for role in roles), "")

    @property
    def alive(self) -> bool:
        return self._closed is None and not self.missing

    @property
    def stats(self) -> EngineStats:
        """Also of processes that have ended."""
        return collect_stats([*self.peers, *self._past])

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Ends all requests with an error, and the connections."""
        with self._condition:
            self._closed = InputError("the engine was closed before the request ended")
            for request in list(self._unfinished):
                self._end(request, self._closed)
            for peer in self.peers:
                peer.send("close")
        with suppress(OSError):
            self._listening.close()

    def wait_for_both(self, stop: Callable[[], bool]) -> None:
        """Waits until a process that prefills and one that decodes are connected, or `stop` returns True."""
        with self._condition:
            while not stop() and self.missing:
                self._condition.wait(0.2)

    def cancel(self, request: Request) -> None:
        """Ends a request soon."""
        with self._condition:
            self._send_cancels(request)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed
        if self.missing:
            raise InputError(self.missing)

    def _enqueue(self, requests: list[Request]) -> None:
        with self._condition:
            self._check_open()
            for request in requests:
                request.engine = self
                self._unfinished[request] = None
                self._prefill(request, request.answers)

    # --- messages -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)
                continue
            self._unproved[connection] = None
            for oldest in list(self._unproved)[:-_UNPROVED]:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            with suppress(InputError, OSError):
                Channel(connection, self._events, self._secret, listens=True)
        finally:
            self._unproved.pop(connection)

    def _handle_events(self) -> None:
        while True:
            channel, message = self._events.get()
            peer = next((peer for peer in self.peers if peer.channel is channel), None)
            with self._condition:
                try:
                    self._handle(channel, peer, message)
                except Exception as error:  # the others go on
                    why = f"{type(error).__name__} in a message: {error}"
                    channel.send(message=encode_message(["reject", why]).decode())
                    if peer in self.peers:
                        self._remove(peer, why)

    def _handle(self, channel: Channel, peer: Peer | None, message: dict[str, Any]) -> None:
        if "gone" in message and peer:
            self._remove(peer, message["gone"])
        elif "message" in message:
            name, *args = decode_message(message["message"].encode())
            if peer is None and name == "register":
                self._register(channel, *args)
            elif peer is not None:
                self._HANDLERS[name](self, peer, *args)

    def _register(self, channel: Channel, about: dict[str, Any], counts: dict[str, int]) -> None:
        peer = Peer(channel, about, counts)
        own = dict(config=str(self.model.config)) if not self.peers else self.peers[0].about["same"]
        for name, value in own.items():
            if about["same"].get(name) != value:
                there = about["same"].get(name)
                values = f"{str(there)[:200]} there and {str(value)[:200]} here"
                text = f"{name} is {values}: start all processes alike"
                self._log(f"the {peer.name} was rejected: {text}")
                peer.send("reject", text)
                return
        self._about = self._about if self.peers else about
        self.peers.append(peer)
        self._log(f"the {peer.name} is connected")
        self._condition.notify_all()

    def _progress(  # noqa: PLR0913  the fields of the message
        self, peer: Peer, ticket: int, news: list[Any], of_prompt: list[Any], seconds: float | None,
        error: str | None,
    ) -> None:  # fmt: skip
        """New tokens. After a prompt was given to another process, its first token comes again."""
        answers = {answer.number: answer for answer in peer.answers.get(ticket, ())}
        if not answers:
            return
        request = next(iter(answers.values())).request
        if error is not None:
            self._end(request, InputError(error))
            self._drop(peer, ticket)
            return
        now = time.monotonic()
        (before, of_prompt) = of_prompt
        more = of_prompt[max(0, len(request.prompt_logprobs) - before) :]
        request.prompt_logprobs += map(logprobs_from_message, more)
        for number, start, sampled, logprobs, alternatives, tokens, reason, hits, passes, accepted in news:
            answer = answers.get(number)
            if answer is None or answer.finish_reason is not None or answer.engine is not peer:
                continue
            if seconds is not None:
                request.times.setdefault("prefill", now - seconds)
            request.times.setdefault("first", now)
            answer.row.hits = hits
            answer.passes = passes
            answer.accepted = accepted
            new = max(0, len(answer.logprobs) - start)
            answer.alternatives += map(logprobs_from_message, alternatives[new:])
            answer.logprobs += logprobs[new:]
            answer.sampled += sampled[new:]
            answer.tokens += answer.sampled[len(answer.tokens) : tokens]
            answer.row.num_computed = len(answer.row.ids) + len(answer.logprobs)
            if reason is not None:
                answer.finish_reason = reason
                self._release(answer)
        if all(a.finish_reason is not None for a in answers.values()):
            self._drop(peer, ticket)
        if request.answered:
            self._end(request, None)
        else:
            self._condition.notify_all()
            request.notify()

    def _prefilled(self, peer: Peer, ticket: int, number: int) -> None:
        answer = next((a for a in peer.answers.get(ticket, ()) if a.number == number), None)
        if answer is None or answer.finish_reason is not None:
            peer.send("release", ticket, number)
            return
        peer.answers[ticket].remove(answer)
        if not peer.answers[ticket]:
            self._drop(peer, ticket)
        self._sources[answer] = peer, ticket
        self._decode(answer)

    def _pull(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            if at := self._sources.get(answer):
                at[0].send("send", at[1], answer.number, ticket)

    def _pass_on(self, peer: Peer, name: str, ticket: int, *args: Any) -> None:
        if target := self._places.get(ticket):
            target.send(name, ticket, *args)

    def _released(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            self._release(answer)

    def _forget(self, peer: Peer, ticket: int) -> None:
        for answer in peer.answers.get(ticket, ()):
            if at := self._sources.get(answer):
                at[0].send("forget", at[1], answer.number)

    def _counts(self, peer: Peer, counts: dict[str, int]) -> None:
        peer.reported = counts

    _HANDLERS: dict[str, Callable[..., None]] = dict(
        progress=_progress, prefilled=_prefilled, pull=_pull, release=_released, counts=_counts,
        offer=lambda self, peer, *args: self._pass_on(peer, "offer", *args),
        part=lambda self, peer, *args: self._pass_on(peer, "part", *args),
        forget=_forget,
    )  # fmt: skip
