"""A process that only prefills, or only decodes, for a front process (`peer_front`): the endpoint of an
engine of that role, and the connection over which the front process uses it.

front ─ submit ─► prefill process ─ progress ─► front ─ submit ─► decode process ─ pull ─► front ─ send ─►
prefill process ─ pages ─► front ─ receive ─► decode process, which pulls the pages from the prefill process
"""

import os
import socket
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np

from .. import __version__
from ..backends.cpu import cpu_features
from ..cache.fingerprint import fingerprint
from ..cli.channel import Channel, Receive
from ..engine.answers import Progress
from ..engine.engine import Engine
from ..engine.host_tier import COPIED_PAGES
from ..engine.page_transfer import PageTransfer
from ..engine.pages import num_pages_for
from ..errors import InputError
from ..grammar.pool import GrammarPool
from ..sharding import concrete_mesh_of
from .peer_messages import answer_from_message, progress_to_message, received_message, send_message

_POLL_SECONDS = 0.2  # for the end
_COUNT_SECONDS = 1.0  # between two reports of counters
_MAX_PROMPT_LOGPROBS = 1024  # tokens of a prompt whose alternatives go in one message


class PeerWorker:
    """Serves one front process until the connection is lost."""

    def __init__(self, engine: Engine, address: tuple[str, int], secret: bytes, log: Callable[[str], None]):
        """Connects to the front process, and says who this is. engine: with a role and a thread."""
        self._engine = engine
        self._endpoint = engine.endpoint(self._emit)
        self._lengths: dict[int, int] = {}  # of the prompts of all tickets
        self._targets: dict[int, int] = {}  # the tickets of rows that are sent, where they are decoded
        self._offers: dict[int, list[Any]] = {}  # by the ticket where a row is decoded
        self._parts: dict[int, dict[int, list[np.ndarray]]] = {}
        self._gone = threading.Event()
        self._events: SimpleQueue = SimpleQueue()
        where = f"{address[0]}:{address[1]}"
        try:
            connection = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise InputError(f"no front process at {where}: {error}") from error
        host = connection.getsockname()[0]
        self._transfer = PageTransfer(host, log)
        self._grammars = GrammarPool(engine.model.tokenizer, engine.model.config.vocab_size)
        self._example = self._endpoint.example_row()
        jax.random.key_data(self._example[0][0].key_B)  # compiled now
        receive: Receive = lambda _, message: self._events.put(message)  # noqa: E731
        try:
            self._channel = Channel(connection, receive, secret, listens=False)
        except OSError as error:
            raise InputError(f"the front process at {where} closed the connection: {error}") from error
        self._message("register", _description(engine, host), engine.counts())
        threading.Thread(target=self._send_counts, daemon=True).start()

    def run(self, stop: threading.Event) -> str:
        """Handles messages until the front process is gone; returns why. "": it closed, or `stop` is set."""
        handlers: dict[str, Callable[..., None]] = dict(
            submit=self._submit, send=self._send, receive=self._receive, release=self._release,
            forget=self._endpoint.forget, drop=self._drop,
        )  # fmt: skip
        while not stop.is_set() and self._engine.error is None:
            try:
                message = self._events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if "gone" in message:
                self._gone.set()
                return str(message["gone"])
            if "message" in message:
                name, *args = received_message(message)
                if name == "reject":
                    raise InputError(args[0])
                if name == "close":
                    return ""
                handlers[name](*args)
        if error := self._engine.error:
            raise error
        return ""

    def _message(self, name: str, *args: Any) -> None:
        send_message(self._channel, name, *args)

    def _send_counts(self) -> None:
        while not self._gone.wait(_COUNT_SECONDS):
            self._message("counts", self._engine.counts())

    # --- messages of the front process --------------------------------------------------------------------

    def _submit(self, ticket: int, fields: list[Any]) -> None:
        try:
            answer = answer_from_message(fields, self._engine, self._grammars)
        except InputError as error:
            self._message("progress", ticket, progress_to_message(Progress(error=error)))
            return
        self._lengths[ticket] = len(answer.row.ids)
        self._endpoint.submit(ticket, answer)

    def _send(self, ticket: int, target: int) -> None:
        self._targets[ticket] = target
        self._endpoint.send(ticket, target)

    def _receive(self, ticket: int, contents: list[Any]) -> None:
        """Keeps a part of the pages of a row, or pulls them in a thread: their process may end meanwhile."""
        if ticket not in self._lengths:  # it has ended
            return
        kind, *args = contents
        if kind == "part":
            number, is_first, part = args
            parts = self._parts.setdefault(ticket, {})
            if is_first:
                parts[number] = []
            parts[number].append(part)
        else:
            threading.Thread(target=self._pull, args=(ticket, args), daemon=True).start()

    def _pull(self, ticket: int, offer: list[Any]) -> None:
        (state, group) = self._example
        try:
            groups = -(-num_pages_for(self._lengths[ticket]) // COPIED_PAGES)
            lost = lambda: self._gone.is_set() or ticket not in self._lengths  # noqa: E731
            parts = self._parts.pop(ticket, {})
            contents = self._transfer.pull(offer, (state, [group] * groups), parts, lost)
        except Exception as error:  # its row fails, others go on
            self._endpoint.fail(ticket, InputError(f"the pages of a row were lost: {error}"))
        else:
            self._endpoint.receive(ticket, contents)

    def _release(self, ticket: int) -> None:
        self._withdraw(ticket)
        self._endpoint.release(ticket)

    def _drop(self, ticket: int) -> None:
        self._lengths.pop(ticket, None)
        self._parts.pop(ticket, None)
        self._withdraw(ticket)
        self._endpoint.drop(ticket)

    def _withdraw(self, ticket: int) -> None:
        """The pages of a row have arrived, or are not wanted."""
        if offer := self._offers.pop(self._targets.pop(ticket, 0), None):
            self._transfer.withdraw(offer[0])

    # --- events of the engine, on its thread --------------------------------------------------------------

    def _emit(self, name: str, ticket: int, *args: Any) -> None:
        if name == "pages":
            self._offer(ticket, *args)
        elif name == "progress":
            self._report(ticket, *args)
        elif name == "pull":
            self._message(name, ticket, None)  # where pages go is known where they are pulled
        elif name != "return_pages":  # pages of answers stay in their process
            self._message(name, ticket)

    def _report(self, ticket: int, new: Progress) -> None:
        most = _MAX_PROMPT_LOGPROBS
        while len(new.prompt_logprobs) > most:
            begin = new.prompt_start
            part = Progress(start=new.start, prompt_start=begin, prompt_logprobs=new.prompt_logprobs[:most])
            self._message("progress", ticket, progress_to_message(part))
            new = new._replace(prompt_start=begin + most, prompt_logprobs=new.prompt_logprobs[most:])
        self._message("progress", ticket, progress_to_message(new))

    def _offer(self, target: int, contents: Any) -> None:
        """Offers a row to the process where it has the ticket `target`."""

        def send_part(number: int, is_first: bool, part: np.ndarray) -> None:
            self._message("pages", target, ["part", number, is_first, part])

        offer = self._transfer.offer(contents, send_part)
        self._offers[target] = offer
        if target in list(self._targets.values()):
            self._message("pages", target, ["offer", *offer])
        elif self._offers.pop(target, None):  # it was released meanwhile
            self._transfer.withdraw(offer[0])


def _description(engine: Engine, host: str) -> dict[str, Any]:
    """What the front process has to know; `same` must be equal in all processes."""
    model = engine.model
    mesh = concrete_mesh_of(model.params)
    device = jax.devices()[0]
    same = dict(
        version=__version__, jax=jax.__version__, device=device.device_kind,
        cpu=" ".join(cpu_features.numerics_features()) if device.platform == "cpu" else "",
        weights=fingerprint(model.params, model.config), config=str(model.config), rows=engine.rows,
        capacity=engine.capacity, chunk=engine.chunk, draft_tokens=engine.num_draft_tokens,
        cache_dtype=engine.shape.cache_dtype, page_bytes=engine.shape.page_bytes,
        devices=mesh.size if mesh else 1, adapters=[dict(engine.adapters), engine.shape.max_rank],
    )  # fmt: skip
    own = {name: getattr(engine, name) for name in ("rows", "pages", "usable_capacity", "num_draft_tokens")}
    sizes = dict(weight_bytes=engine.weight_bytes, cache_bytes=engine.cache_bytes)
    adapters = {name: [held.index, held.digest.hex()] for name, held in engine.adapters.items()}
    about = dict(adapters=adapters, role=engine.role, name=f"{engine.role} process {os.getpid()} ({host})")
    return about | own | sizes | dict(same={name: str(value) for name, value in same.items()})
