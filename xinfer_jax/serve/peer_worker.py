"""A process that only prefills, or only decodes, for a front process (`peer_front`): an engine of that role,
and the connection by which the front process gives it rows.

front ─ submit ─► prefill process ─ progress, prefilled ─► front ─ decode ─► decode process ─ pull ─► front
─ send ─► prefill process ─ offer ─► front ─► decode process, which pulls the pages from the prefill process

A row at a process has a number, its ticket, that no other row has.
"""

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

import jax
import numpy as np

from .. import __version__
from ..cache.fingerprint import fingerprint
from ..cli.channel import Channel
from ..engine.engine import Engine
from ..engine.host_tier import COPIED_PAGES
from ..engine.messages import decode_message, encode_message
from ..engine.page_transfer import PageTransfer
from ..engine.pages import num_pages_for
from ..engine.prefilled_row import PrefilledRow
from ..engine.requests import Answer, Request
from ..engine.row import Row
from ..engine.submission import make_request
from ..errors import InputError, format_message
from ..grammar.pool import GrammarPool
from ..ops.cpu import cpu_features
from ..sampling.logprobs import TokenLogprobs
from ..sharding import concrete_mesh_of

_POLL_SECONDS = 0.2  # for the end
_COUNT_SECONDS = 1.0  # between two reports of counters
_MAX_PROMPT_LOGPROBS = 1024  # tokens of a prompt whose alternatives go in one message


class DistantRow(PrefilledRow):
    """A row that another process prefilled."""

    def __init__(self, worker: "PeerWorker", ticket: int):
        self._worker = worker
        self._ticket = ticket
        self.lost: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        return self.lost

    def pull(self, shardings: Any, arrive: Callable[[Any], None]) -> None:
        self._worker.arrivals[self._ticket] = arrive
        self._worker.send("pull", self._ticket)

    def release(self) -> None:
        self._worker.send("release", self._ticket)

    def forget(self) -> None:
        self._worker.send("forget", self._ticket)

    def return_pages(self, ids: Any, first: int, contents: list[Any]) -> None:
        """Pages of answers stay in their process."""


class PeerWorker:
    """Serves one front process until the connection is lost.

    Attributes:
        arrivals: by ticket, what to call with the state and pages of a row.
    """

    def __init__(self, engine: Engine, address: tuple[str, int], secret: bytes, log: Callable[[str], None]):
        """Connects, and says who it is.

        Args:
            engine: with a role and a thread.
            address: of the front process.
            secret: of the run.
            log: writes a line.

        Raises:
            InputError: nobody answers there, or without the secret.
        """
        self._engine = engine
        self._core = cast(Any, engine._core)
        self._log = log
        self.arrivals: dict[int, Callable[[Any], None]] = {}
        self._requests: dict[int, Request] = {}
        self._rows: dict[tuple[int, int], Row] = {}  # prefilled here, by ticket and number of the answer
        self._offers: dict[tuple[int, int], list[Any]] = {}
        self._parts: dict[int, dict[int, list[np.ndarray]]] = {}
        self._tickets: dict[Request, int] = {}
        self._gone = threading.Event()
        self._events: SimpleQueue = SimpleQueue()
        try:
            connection = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise InputError(f"no front process at {address[0]}:{address[1]}: {error}") from error
        host = connection.getsockname()[0]
        self._transfer = PageTransfer(host, log)
        self._grammars = GrammarPool(engine.model.tokenizer, engine.model.config.vocab_size)
        self._like = _contents_like(engine)
        self._core.on_prefilled = self._prefilled
        try:
            self._channel = Channel(connection, self._events, secret, listens=False)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise InputError(f"the front process at {where} closed the connection: {error}") from error
        self.send("register", _description(engine, host), engine.counts())
        threading.Thread(target=self._send_counts, daemon=True).start()

    def send(self, name: str, *args: Any) -> None:
        """Sends a message to the front process."""
        self._channel.send(message=encode_message([name, *args]).decode())

    def run(self, stop: threading.Event) -> str:
        """Handles messages until the front process is gone; returns why. "": it closed, or `stop` is set."""
        handlers: dict[str, Callable[..., None]] = dict(
            submit=self._submit, cancel=self._cancel, send=self._send_row, release=self._release,
            forget=self._forget, decode=self._decode, offer=self._offer, part=self._part,
        )  # fmt: skip
        while not stop.is_set() and self._engine.error is None:
            try:
                _, message = self._events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if "gone" in message:
                self._gone.set()
                return str(message["gone"])
            if "message" in message:
                name, *args = decode_message(message["message"].encode())
                if name == "reject":
                    raise InputError(args[0])
                if name == "close":
                    return ""
                handlers[name](*args)
        if error := self._engine.error:
            raise error
        return ""

    # --- both roles ---------------------------------------------------------------------------------------

    def _make_request(self, ticket: int, args: dict[str, Any], numbers: list[int]) -> Request:
        """A request with the answers of these numbers only."""
        options = args["options"]
        if options.grammar is not None:
            grammar = self._grammars.prepare(args["row"]["client"], options.grammar)
            options = dataclasses.replace(options, grammar=grammar)
        what = args["ids"], options, args["key"], args["number"]
        request = make_request(self._engine, *what, **args["text"])
        request.answers = [request.answers[j] for j in numbers]
        request.live = args["live"]
        request.num_prompt_logprobs = args["prompt_logprobs"]
        if args["seconds"] is not None:
            request.deadline = request.submitted + args["seconds"]
        for answer in request.answers:
            for name, value in args["row"].items():
                setattr(answer.row, name, value)
            answer.row.salt = bytes.fromhex(args["salt"])
            answer.row.logprobs_from = args["logprobs_from"] if answer.number == 0 else None
        self._requests[ticket] = request
        self._tickets[request] = ticket
        return request

    def _report(self, request: Request, sent: dict[int, int], logprobs: list[int]) -> None:
        """Sends what is new of a request. sent: tokens of each answer that were sent."""
        ticket = self._tickets.get(request)
        if ticket is None:
            return
        news = []
        for answer in request.answers:
            j = answer.number
            start = sent.get(j, 0)
            if start >= 0 and (len(answer.logprobs) > start or answer.finish_reason):
                more = [list(x[start:]) for x in (answer.sampled, answer.logprobs, answer.alternatives)]
                about = len(answer.tokens), answer.finish_reason, answer.row.hits
                news.append([j, start, *more, *about, answer.passes, answer.accepted])
                sent[j] = -1 if answer.finish_reason else len(answer.logprobs)
        of_prompt = request.prompt_logprobs[logprobs[0] :]
        before = logprobs[0]
        logprobs[0] += len(of_prompt)
        while len(of_prompt) > _MAX_PROMPT_LOGPROBS:
            part, of_prompt = of_prompt[:_MAX_PROMPT_LOGPROBS], of_prompt[_MAX_PROMPT_LOGPROBS:]
            self.send("progress", ticket, [], [before, part], None, None)
            before += len(part)
        error: str | None = None
        if request.error:
            error = format_message(request.error) or type(request.error).__name__
        prefill = request.times.get("prefill")
        seconds = None if prefill is None else request.times.get("first", prefill) - prefill
        if news or of_prompt or error:
            self.send("progress", ticket, news, [before, of_prompt], seconds, error)
        self._drop_if_over(ticket, request)

    def _drop_if_over(self, ticket: int, request: Request) -> None:
        """Forgets a request once all its answers have ended, or are elsewhere with their pages."""
        over = all(a.engine is None or a.finish_reason is not None for a in request.answers)
        rows = list(self._rows)  # other threads change it
        if request.ended or (over and not any(at[0] == ticket for at in rows)):
            self._drop(ticket)

    def _watch(self, request: Request, sent: dict[int, int]) -> None:
        request.listeners.append(partial(self._report, request, sent, [0]))

    def _drop(self, ticket: int) -> None:
        if request := self._requests.pop(ticket, None):
            self._tickets.pop(request, None)
        self.arrivals.pop(ticket, None)
        self._parts.pop(ticket, None)

    def _refuse(self, ticket: int, error: InputError) -> None:
        """A request cannot be answered here: it fails, others go on."""
        self._drop(ticket)
        self.send("progress", ticket, [], [0, []], None, str(error))

    def _cancel(self, ticket: int) -> None:
        if request := self._requests.get(ticket):
            request.cancelled = True
            self._engine.cancel(request)

    def _send_counts(self) -> None:
        while not self._gone.wait(_COUNT_SECONDS):
            self.send("counts", self._engine.counts())

    # --- prefill ------------------------------------------------------------------------------------------

    def _submit(self, ticket: int, args: dict[str, Any], numbers: list[int]) -> None:
        try:
            request = self._make_request(ticket, args, numbers)
            self._watch(request, {})
            self._engine._enqueue([request])
        except InputError as error:
            self._refuse(ticket, error)

    def _prefilled(self, answer: Answer, row: Row) -> None:
        """On the engine's thread: an answer has its first token, and is decoded elsewhere."""
        request = answer.request
        ticket = self._tickets.get(request)
        if ticket is None:
            answer.engine = None
            self._core.release(row)
            return
        self._rows[ticket, answer.number] = row
        answer.engine = None
        for listener in request.listeners:  # its first token goes first
            listener()
        self.send("prefilled", ticket, answer.number)
        self._engine._notify([request])

    def _send_row(self, ticket: int, number: int, target: int) -> None:
        """Offers a row to the process where it has the ticket `target`."""
        if (row := self._rows.get((ticket, number))) is None:
            return

        def deliver(contents: Any) -> None:
            def send_part(i: int, is_first: bool, part: np.ndarray) -> None:
                self.send("part", target, i, is_first, part)

            offer = self._transfer.offer(contents, send_part)
            self._offers[ticket, number] = offer
            if (ticket, number) in self._rows:
                self.send("offer", target, offer)
            elif self._offers.pop((ticket, number), None):  # it was released meanwhile
                self._transfer.withdraw(offer[0])

        shardings = jax.tree.map(lambda x: x.sharding, self._like)
        self._engine.call_soon(lambda: self._core.send(row, shardings, deliver))

    def _release(self, ticket: int, number: int) -> None:
        if row := self._rows.pop((ticket, number), None):
            self._engine.call_soon(lambda: self._core.release(row))
        if offer := self._offers.pop((ticket, number), None):
            self._transfer.withdraw(offer[0])
        if request := self._requests.get(ticket):
            self._drop_if_over(ticket, request)

    def _forget(self, ticket: int, number: int) -> None:
        if row := self._rows.get((ticket, number)):
            self._engine.call_soon(lambda: self._core.scheduler.forget_pages(row))

    # --- decode -------------------------------------------------------------------------------------------

    def _decode(self, ticket: int, args: dict[str, Any], number: int, first: list[Any], hits: int) -> None:
        (sampled, logprobs, alternatives) = first
        try:
            request = self._make_request(ticket, args, [number])
            (answer,) = request.answers
            answer.append(sampled, logprobs, False)
        except InputError as error:  # this process may have fewer pages
            self._refuse(ticket, error)
            return
        request.times["first"] = time.monotonic()
        answer.alternatives += map(logprobs_from_message, alternatives)
        row = answer.row
        answer.row = dataclasses.replace(row, num_computed=len(row.ids), hits=hits, logprobs_from=None)
        answer.swapped_pages = DistantRow(self, ticket)
        self._watch(request, {number: len(answer.logprobs)})
        engine = self._engine
        with engine._queue.condition:
            if engine.error is None:
                engine._queue_answers([answer])

    def _offer(self, ticket: int, offer: list[Any]) -> None:
        """Pulls the pages of a row in a thread, as their process may end meanwhile."""
        parts = self._parts.pop(ticket, {})
        if (request := self._requests.get(ticket)) is None or ticket not in self.arrivals:
            return
        arrive = self.arrivals[ticket]
        (answer,) = request.answers
        source = answer.swapped_pages

        def pull() -> None:
            (state, group) = self._like
            groups = -(-num_pages_for(len(answer.row.ids)) // COPIED_PAGES)
            try:
                lost = lambda: self._gone.is_set() or ticket not in self._requests  # noqa: E731
                like = state, [group] * groups
                contents = self._transfer.pull(offer, like, parts, lost)
            except Exception as error:  # its row fails, others go on
                if isinstance(source, DistantRow):
                    source.lost = InputError(f"the pages of a row were lost: {error}")
                self._engine.call_soon(self._core.fail_lost_rows)
            else:
                self._engine.call_soon(lambda: arrive(contents))

        threading.Thread(target=pull, daemon=True).start()

    def _part(self, ticket: int, number: int, is_first: bool, part: np.ndarray) -> None:
        if ticket not in self._requests:  # it has ended
            return
        parts = self._parts.setdefault(ticket, {})
        if is_first:
            parts[number] = []
        parts[number].append(part)


def logprobs_from_message(fields: list[Any]) -> TokenLogprobs:
    """The log-probabilities of a token that another process has sent."""
    (token, logprob, processed, top, processed_top) = fields
    pairs = [[(i, x) for i, x in alternatives] for alternatives in (top, processed_top)]
    return TokenLogprobs(token, logprob, processed, *pairs)


def _contents_like(engine: Engine) -> Any:
    """A row's state and recurrent states, and a group of pages, as they arrive. Called before the engine has
    rows.
    """
    device = engine._core.device
    row = device.get_row(0)
    jax.random.key_data(row[0].key_B)  # compiled now
    return row, device.copy_pages([0])[0]


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
        cache_dtype=engine._core.shape.cache_dtype, page_bytes=engine._core.shape.page_bytes,
        devices=mesh.size if mesh else 1,
    )  # fmt: skip
    own = {name: getattr(engine, name) for name in ("rows", "pages", "usable_capacity", "num_draft_tokens")}
    sizes = dict(weight_bytes=engine.weight_bytes, cache_bytes=engine.cache_bytes)
    about = dict(role=engine.role, name=f"{engine.role} process {os.getpid()} ({host})")
    return about | own | sizes | dict(same={name: str(value) for name, value in same.items()})
