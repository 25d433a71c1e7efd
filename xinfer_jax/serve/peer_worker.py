"""A process that only prefills, or only decodes, for a front process (`peer_front`): the endpoint of an
engine of that role, and the connection over which the front process uses it.

front ─ submit ─► prefill process ─ progress ─► front ─ submit ─► decode process ─ pull ─► front ─ send ─►
prefill process ─ pages ─► front ─ receive ─► decode process, which pulls the pages from the prefill process
"""

import dataclasses
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import jax
import numpy as np

from .. import __version__
from ..backends.cpu import cpu_features
from ..cache.fingerprint import fingerprint
from ..engine.answers import Progress
from ..engine.engine import LocalEngine
from ..engine.host_tier import COPIED_PAGES
from ..engine.pages import num_pages_for
from ..engine.shape import head_fingerprint
from ..errors import InputError
from ..grammar.pool import GrammarPool
from ..processes.array_transfer import ArrayTransfer
from ..processes.channel import GONE, Message, connect
from ..sharding import concrete_mesh_of
from .peer_messages import answer_from_message

_POLL_SECONDS = 0.2  # for the end
_COUNT_SECONDS = 1.0  # between two reports of counters


@dataclasses.dataclass
class _Work:
    """The state of a ticket in this process."""

    length: int  # tokens of its prompt
    target: int = 0  # the ticket where it is decoded
    offer: list[Any] | None = None  # its pages, which are sent there
    arrays: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # its pages that have come


class PeerWorker:
    """Serves one front process until the connection is lost."""

    def __init__(
        self, engine: LocalEngine, address: tuple[str, int], secret: bytes, log: Callable[[str], None]
    ):
        """Connects to the front process, and says who this is. engine: an engine with a role and a thread."""
        self._engine = engine
        self._endpoint = engine.endpoint(self._emit)
        self._work: dict[int, _Work] = {}  # by ticket
        self._gone = threading.Event()
        self._events = SimpleQueue[Message]()
        try:
            self._channel = connect(*address, self._events.put, secret)
        except OSError as error:
            raise InputError(f"no front process at {address[0]}:{address[1]}: {error}") from error
        host = self._channel.host
        self._transfer = ArrayTransfer(host, log)
        self._grammars = GrammarPool(engine.model.tokenizer, engine.model.config.vocab_size)
        self._example = self._endpoint.example_row()
        jax.random.key_data(self._example[0][0].key_B)  # compiled now
        self._channel.send("register", _description(engine, host), engine.counts())
        threading.Thread(target=self._send_counts, daemon=True).start()

    def run(self, stop: threading.Event) -> str:
        """Handles messages until the front process is gone. Returns the reason. "": it closed, or `stop` is
        set.
        """
        handlers: dict[str, Callable[..., None]] = dict(
            submit=self._submit, send=self._send, receive=self._receive, release=self._release,
            forget=self._endpoint.forget, drop=self._drop,
        )  # fmt: skip
        while not stop.is_set() and self._engine.error is None:
            try:
                (_, name, args) = self._events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if name == GONE:
                self._gone.set()
                return str(args[0])
            if name == "reject":
                raise InputError(args[0])
            if name == "close":
                return ""
            handlers[name](*args)
        if error := self._engine.error:
            raise error
        return ""

    def _send_counts(self) -> None:
        while not self._gone.wait(_COUNT_SECONDS):
            self._channel.send("counts", self._engine.counts())

    # --- messages of the front process --------------------------------------------------------------------

    def _submit(self, ticket: int, fields: list[Any]) -> None:
        try:
            answer = answer_from_message(fields, self._engine, self._grammars)
        except InputError as error:
            self._channel.send("progress", ticket, Progress(error=error))
            return
        self._work[ticket] = _Work(len(answer.row.ids))
        self._endpoint.submit(ticket, answer)

    def _send(self, ticket: int, target: int, shardings: None) -> None:
        if work := self._work.get(ticket):
            work.target = target
        self._endpoint.send(ticket, target)

    def _receive(self, ticket: int, contents: list[Any]) -> None:
        """Keeps an array of a row's pages, or pulls them in a thread: their process may end meanwhile."""
        if (work := self._work.get(ticket)) is None:  # it has ended
            return
        kind, *args = contents
        if kind == "array":
            (number, array) = args
            work.arrays[number] = array
        else:
            arrays, work.arrays = work.arrays, {}
            threading.Thread(target=self._pull, args=(ticket, work.length, arrays, args), daemon=True).start()

    def _pull(self, ticket: int, length: int, arrays: dict[int, np.ndarray], offer: list[Any]) -> None:
        (state, group) = self._example
        groups = -(-num_pages_for(length) // COPIED_PAGES)
        lost = lambda: self._gone.is_set() or ticket not in self._work  # noqa: E731
        try:
            contents = self._transfer.pull(offer, (state, [group] * groups), arrays, lost)
        except Exception as error:  # its row fails, others go on
            self._endpoint.fail(ticket, InputError(f"the pages of a row were lost: {error}"))
        else:
            self._endpoint.receive(ticket, contents)

    def _release(self, ticket: int) -> None:
        self._withdraw(self._work.get(ticket))
        self._endpoint.release(ticket)

    def _drop(self, ticket: int) -> None:
        self._withdraw(self._work.pop(ticket, None))
        self._endpoint.drop(ticket)

    def _withdraw(self, work: _Work | None) -> None:
        """Withdraws the pages of a row, which have arrived or are not wanted."""
        if work:
            work.target = 0
            if work.offer:
                self._transfer.withdraw(work.offer[0])

    # --- events of the engine, on its thread --------------------------------------------------------------

    def _emit(self, name: str, ticket: int, *args: Any) -> None:
        if name == "pages":
            self._offer(ticket, *args)
        elif name == "pull":
            self._channel.send(name, ticket, None)  # where pages go is known where they are pulled
        elif name != "return_pages":  # pages of answers stay in their process
            self._channel.send(name, ticket, *args)

    def _offer(self, target: int, contents: Any) -> None:
        """Offers a row to the process that knows it by the ticket `target`."""

        def send_array(number: int, array: np.ndarray) -> None:
            self._channel.send("pages", target, ["array", number, array])

        offer = self._transfer.offer(contents, send_array)
        work = next((work for work in list(self._work.values()) if work.target == target), None)
        if work:
            work.offer = offer
            self._channel.send("pages", target, ["offer", *offer])
        if work is None or work.target != target:  # it was released meanwhile
            self._transfer.withdraw(offer[0])


def _description(engine: LocalEngine, host: str) -> dict[str, Any]:
    """Returns the description of this process for the front process. `same` must be equal in all
    processes.
    """
    model = engine.model
    mesh = concrete_mesh_of(model.params)
    device = jax.devices()[0]
    same = dict(
        version=__version__, jax=jax.__version__, device=device.device_kind,
        cpu=" ".join(cpu_features.numerics_features()) if device.platform == "cpu" else "",
        weights=fingerprint(model.params, model.config), config=str(model.config), rows=engine.rows,
        capacity=engine.capacity, chunk=engine.chunk, draft_tokens=engine.shape.draft_widths,
        draft=head_fingerprint(model.params, engine.shape),
        cache_dtype=engine.shape.cache_dtype, page_bytes=engine.shape.page_bytes,
        devices=mesh.size if mesh else 1, adapters=[dict(engine.adapters), engine.shape.max_rank],
    )  # fmt: skip
    own = {name: getattr(engine, name) for name in ("rows", "pages", "usable_capacity", "num_draft_tokens")}
    sizes = dict(weight_bytes=engine.weight_bytes, cache_bytes=engine.cache_bytes)
    adapters = {name: [held.index, held.digest.hex()] for name, held in engine.adapters.items()}
    about = dict(adapters=adapters, role=engine.role, name=f"{engine.role} process {os.getpid()} ({host})")
    return about | own | sizes | dict(same={name: str(value) for name, value in same.items()})
