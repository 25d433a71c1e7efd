"""`Engine`: takes turns between reading prompts and decoding, on a thread of its own or the caller's.

submit ─► queue ─ a turn: who ended? ─ a piece of a prompt ─ a window of decoding for all rows ─► answers
"""

import dataclasses
import heapq
import itertools
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import cache_bytes
from ..cache.quantized import KV_BITS
from ..checkpoint.loading import Model
from ..checks import whole
from ..config.model_config import with_fixed_rope
from ..errors import InputError, shown
from ..generation.programs import Ahead
from ..generation.speculation import MOST_GUESSES
from ..memory import check_memory, memory_bytes
from ..model.attention import check_impl
from ..sampling.choice import answer_keys
from ..sampling.logprobs import rows_of_tokens
from ..sharding import MODEL, lies_over, share
from ..weights.params import Params, cache_dtype as usual_dtype, resolve_dtype, tree_bytes
from .device import WINDOW, Device, Window
from .lockstep import Leader, calls_for, follow
from .requests import Answer, Request
from .scheduler import PAGE, Action, Read, Row, Scheduler, pages_for
from .statistics import Recent
from .submission import Entrance

_LOOK_SECONDS = 0.1  # between two looks of the host, while requests may come or are read along
_BUSY_SECONDS = 0.01  # the same, while others wait or are read
_LONGEST_SECONDS = 1.0  # the same, where nobody reads along: so soon it can be told to end
_MOST_UNDECODED = 32  # turns that prefill and do not decode, where nobody reads along
_UNKNOWN = 8  # steps of the first window, as nobody knows how long they take
_SHARE = 0.5  # of the memory beside the weights, for pages


class Engine(Entrance):
    """Answers requests as they come, several at a time (continuous batching, Yu et al. 2022) over one set of
    pages (PagedAttention, Kwon et al. 2023). Each gets, bit for bit, the tokens and log-probabilities that it
    gets alone in an engine of the same shape, whatever else runs.

    Attributes:
        model: with the weights of the last `update`.
        rows, capacity, pages, chunk, guesses, impl: its shape.
        about: what it has, and the seconds that it took to be ready.
        last_turn: when it last ended one, as time.monotonic says; its thread takes one a second at least.
        error: what broke it down, or says that it was closed; None: it can answer.
        name: in messages.
    """

    def __init__(  # noqa: PLR0913  a door
        self,
        model: Model,
        *,
        rows: int = 8,
        capacity: int | None = None,
        pages: int | None = None,
        chunk: int = 256,
        prefix_cache: bool = True,
        draft: str | None = None,
        draft_tokens: int = 3,
        cache_dtype: Any = None,
        impl: str | None = None,
    ):
        """Compiles all that it will ever run, and runs it once.

        Args:
            model: from `load_model`.
            rows: answers that are decoded at a time.
            capacity: tokens of a prompt and its answer together, at most; None: 4096, or the model's context.
            pages: of 64 tokens each, for all rows and for prompts that may come again; None: half of the
                memory beside the weights (on a CPU its devices' part of it), at most what all rows can fill
                twice.
            chunk: tokens of a prompt that are read between two windows of decoding; a multiple of 64.
            prefix_cache: prompts that begin alike are read once.
            draft: "lookup": guesses tokens by what followed before, and checks several in a pass.
            draft_tokens: guesses per pass.
            cache_dtype: of keys and values: a float type, "int8" or "int4"; None: as in `GenerateOptions`.
            impl: as in `GenerateOptions`.

        Raises:
            InputError: a value that cannot be served, before anything is compiled.
        """
        if not isinstance(model, Model):
            raise InputError(f"model must be what load_model gives, got {shown(model)}")
        if (mesh := lies_over(model.params)) is not None and mesh.size > mesh.shape[MODEL]:
            raise InputError(
                f"an engine lies over an axis {MODEL!r} alone, not over {dict(mesh.shape)}: make one for each"
                " group of devices"
            )
        if draft not in (None, "lookup"):
            raise InputError(f"draft={shown(draft)}: an engine guesses by 'lookup', or not at all (None)")
        check_impl(impl)
        model = dataclasses.replace(model, params=jax.tree.map(_held, model.params))
        config = model.config
        longest = model.config.context_length
        self.rows = whole("rows", rows, 1)
        self.capacity = whole("capacity", min(4096, longest) if capacity is None else capacity, 2, longest)
        self.chunk = whole("chunk", chunk, PAGE)
        if self.chunk % PAGE:
            raise InputError(f"chunk must be a multiple of {PAGE}, got {chunk}")
        self.guesses = whole("draft_tokens", draft_tokens, 1, MOST_GUESSES) if draft else 0
        self.model = model
        self.impl = impl
        self.switches_at = config.rope.switches_at
        self.weight_bytes = tree_bytes(model.params)
        dtype = _dtype(model.params, cache_dtype)
        page_bytes = cache_bytes(config, 1, PAGE, dtype)
        self._share = share(lies_over(model.params))
        self.pages = self._number_of_pages(page_bytes) if pages is None else whole("pages", pages, 2)
        self._calls = calls_for(model.params)
        if self._calls:  # hosts may have different amounts of memory
            self.pages = self._calls.same(self.pages)
        self.cache_bytes = self.pages * page_bytes
        need = self.weight_bytes + self.cache_bytes
        what = f"weights and {self.pages} pages"
        check_memory(int(self._share * need), what, "ask for fewer pages, or a smaller cache_dtype")
        self._scheduler = Scheduler(self.rows, self.pages, self.capacity, self.chunk, prefix_cache)
        self._news = threading.Condition()
        self._turn = threading.Lock()
        self._new: list[Answer] = []  # submitted, and not seen by the scheduler yet
        self._cancelled: list[Request] = []  # and not seen yet
        self._open: dict[Request, None] = {}  # in the order in which they came
        # A heap; those that ended before are let go of.
        self._deadlines: list[tuple[float, int, weakref.ref[Request]]] = []
        self._numbers = itertools.count()
        self._answers: dict[Row, Answer] = {}  # that have not ended
        self._orders: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.name = "the engine"
        self.recent = Recent()
        self._seconds = 0.0  # of a step of decoding, lately
        self._undecoded = 0  # turns since the last one that decoded
        self.last_turn = time.monotonic()
        self._device: Any = self._warm_up(dtype)
        if self._calls and jax.process_index() == 0:
            self._device = Leader(self._device, self._calls)
        elif self._calls:
            self.error = InputError("process 0 answers for all: submit there, and call follow() here")

    def update(self, params: Params) -> None:
        """Other weights of the same shapes, between two windows: nothing is compiled. Pages that the old ones
        wrote are not shared any more; rows under way go on with what they hold. The arrays must stay: not be
        donated to a step of training.
        """
        kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (params, self.model.params)]
        if kinds[0] != kinds[1]:
            raise InputError("the new parameters have other shapes or types: make an Engine of them")
        if self._calls:
            raise InputError("an engine over several processes keeps its weights: make another")
        params = jax.tree.map(_held, params, self.model.params)
        done = threading.Event()

        def order() -> None:
            self._device.params = params
            self._scheduler.drop_shared()
            self.model = dataclasses.replace(self.model, params=params)
            done.set()

        with self._news:
            self._check_open()
            self._orders.append(order)
            self._news.notify_all()
        self.wait(done.is_set)
        if not done.is_set():
            self._check_open()

    @property
    def load(self) -> int:
        """Answers of requests that have not ended."""
        with self._news:
            return sum(len(request.answers) for request in self._open)

    def counts(self) -> dict[str, int]:
        """What `EngineStats` says but for times."""
        counts = self._scheduler.counts() | self.recent.sums
        return counts | dict(waiting=counts["waiting"] + len(self._new))

    @property
    def room(self) -> int:
        """Tokens of a prompt and its answer together that it can hold."""
        return self._scheduler.room

    @property
    def started(self) -> bool:
        """Whether it has a thread of its own."""
        return self._thread is not None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="xinfer_jax engine", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; requests that have not ended get an error."""
        self._break(InputError("the engine was closed before the request ended"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if isinstance(self._device, Leader):
            self._device.close()

    def follow(self) -> None:
        """Where the model lies on devices of several processes, in all but process 0: takes part in what the
        engine of process 0 does, until that is closed.
        """
        if not self._calls or jax.process_index() == 0:
            raise InputError("there is nobody to follow: only processes beside process 0 follow it")
        follow(self._device, self._calls)

    def wake(self) -> None:
        """There is something to look at."""
        with self._news:
            self._news.notify_all()

    def cancel(self, request: Request) -> None:
        """Ends a request at the next turn."""
        with self._news:
            if request in self._open:
                self._cancelled.append(request)
                self._news.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Until it is so; without a thread by taking turns.

        Raises:
            TimeoutError: it is not so after so many seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        over = lambda: until() or self.error is not None  # noqa: E731
        if self.started:
            with self._news:
                self._news.wait_for(over, timeout)
        while not over():
            if time.monotonic() > end:
                raise TimeoutError(f"no end after {timeout} seconds")
            self.step()

    def step(self) -> bool:
        """One turn, on the caller's thread: who ended, a piece of a prompt, a window of decoding. Whether
        there was anything to do. Ctrl-C is raised behind it: nothing is left half done.
        """
        with self._turn, _interrupts_deferred():
            try:
                return self.error is None and self._take_turn()
            except BaseException as error:
                self._break(error)
                raise
            finally:
                self.last_turn = time.monotonic()

    def _run(self) -> None:
        try:
            while self.error is None:
                if not self.step():
                    with self._news:
                        self._news.wait_for(self._has_news, 1.0)
        except BaseException as error:  # every request has it, and whoever submits
            print(f"{self.name} broke down: {type(error).__name__}: {error}", file=sys.stderr)

    def _has_news(self) -> bool:
        return bool(self._new or self._cancelled or self._orders) or self.error is not None

    def _break(self, error: BaseException) -> None:
        with self._news:
            self.error = self.error or error
            self._new = []
            self._deadlines = []
            self._tell(list(self._open))

    def _take_turn(self) -> bool:
        now = time.monotonic()
        late = list[Request]()
        with self._news:  # at once: what ends now was submitted before
            new = self._new
            orders = self._orders
            self._new = []
            self._orders = []
            cancelled = self._cancelled
            self._cancelled = []
            while self._deadlines and self._deadlines[0][0] < now:
                if request := heapq.heappop(self._deadlines)[-1]():
                    late.append(request)
        for order in orders:
            order()
            self.wake()
        for answer in new:
            self._answers[answer.row] = answer
            self._scheduler.submit(answer.row)
        self._drop(cancelled, "cancelled")
        self._drop(late, "deadline")
        busy = False
        width = 0
        while width < self.chunk and (actions := self._scheduler.read_next()):
            busy = True
            self._carry_out(actions)
            # After a chunk, or as many pages, new requests, cancels and signals are looked at.
            width += sum(action.width for action in actions if isinstance(action, Read))
        # Where nobody reads along, free slots are filled first, for so many turns.
        fills = width >= self.chunk and not self._live and self._undecoded < _MOST_UNDECODED
        self._undecoded = self._undecoded + 1 if fills else 0
        if self._scheduler.running and not fills:
            busy = True
            self._decode()
        return busy

    @property
    def _live(self) -> bool:
        """Whether a row that decodes has somebody who may read along, and others may come meanwhile."""
        return any(self._answers[row].request.live for _, row in self._scheduler.running)

    def _drop(self, requests: list[Request], reason: str) -> None:
        """Ends requests, whatever they do."""
        for answer in (answer for request in requests for answer in request.answers):
            if answer.row in self._answers:
                self._end(answer, reason)
        self._tell(requests)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            row = action.row
            answer = self._answers[action.row]
            if isinstance(action, Read):
                self._read(action, answer)
            elif action.out:
                answer.pages = self._device.take_pages(action.pages)
                answer.state = self._device.take_row(action.slot) if row.read else answer.state
            else:
                self._device.put_pages(action.pages, answer.pages)
                if row.read:
                    self._device.place(action.slot, answer.state)
                answer.pages = answer.state = None

    def _read(self, piece: Read, answer: Answer) -> None:
        row = piece.row
        request = answer.request
        start = piece.start
        end = piece.start + piece.count
        request.times.setdefault("read", time.monotonic())
        if piece.last or row.scored is None:
            behind = self._device.read(row.pages, row.ids[start:end], start, piece.whole)
        if row.scored is not None:  # after it: the pages are to be this program's
            targets = row.ids[start + 1 : end + 1]
            noted = self._device.score(row.pages, row.ids[start:end], start, targets)
            logprobs_1T = np.asarray(noted.processed_BT)
            count_1 = np.array([len(targets)])
            (tokens,) = rows_of_tokens(noted, np.array([targets]), logprobs_1T, count_1, request.asks)
            request.prompt_logprobs += tokens[max(0, row.scored - start - 1) :]
        self.recent.read_tokens += piece.count
        self._scheduler.dispatched(piece)
        if piece.last:
            state, chosen = self._device.first_choice(behind, self._device.row(request.call, answer.key_1))
            out = jax.device_get(chosen)
            request.times.setdefault("first", time.monotonic())
            if not self._take(answer, out, 0):
                slot: Any = row.slot
                self._device.place(slot, state)
            self._tell([request])

    def _decode(self) -> None:
        """A window: so many steps, or until a row ends while somebody waits for its place."""
        scheduler = self._scheduler
        each = 1 + self.guesses
        steps = WINDOW // each
        look = _LONGEST_SECONDS
        others = bool(scheduler.clients.heads()) or len(scheduler.seated) > len(scheduler.running)
        if self._live:
            look = _BUSY_SECONDS if others else _LOOK_SECONDS
        steps = min(steps, max(1, int(look / self._seconds)) if self._seconds else _UNKNOWN)
        self._carry_out(scheduler.grow(steps * each))
        answers = {slot: self._answers[row] for slot, row in scheduler.running}
        waits = others or bool(self._new)
        began = time.perf_counter()
        pages = {slot: answer.row.pages for slot, answer in answers.items()}
        out = jax.device_get(self._device.window(pages, steps, waits))
        self._seconds = (time.perf_counter() - began) / max(1, int(out.passes_B.max()))
        for slot, answer in answers.items():
            scheduler.decoded(answer.row, int(out.count_B[slot]))
            answer.passes += int(out.passes_B[slot])
            answer.accepted += int(out.accepted_B[slot])
            if answer.row in self._answers:  # it did not fail with another of its request
                self._take(answer, out, slot)
        self._tell({answer.request for answer in answers.values()})

    def _take(self, answer: Answer, out: Window, slot: int) -> bool:
        """Hands a row's tokens to its answer; whether it has ended."""
        request = answer.request
        count = int(out.count_B[slot])
        self.recent.chosen_tokens += count
        if request.call.options.logprobs:
            parts = out.alternatives, out.tokens_BT, out.logprobs_BT, out.count_B
            noted, tokens_1T, logprobs_1T, count_1 = jax.tree.map(lambda x_B: x_B[slot : slot + 1], parts)
            most = request.call.options.logprobs
            (tokens,) = rows_of_tokens(noted, tokens_1T, logprobs_1T, count_1, most)
            answer.alternatives += tokens
        ids = out.tokens_BT[slot, :count].tolist()
        logprobs = out.logprobs_BT[slot, :count].tolist()
        try:
            ended = answer.push(ids, logprobs, bool(out.finished_B[slot]))
        except InputError as error:  # it fails alone
            request.error = error
            for other in request.answers:
                if other.row in self._answers:
                    self._end(other, "error", good=False)
            return True
        if ended:
            self._end(answer, answer.finish_reason or "")
        return ended

    def _end(self, answer: Answer, reason: str, good: bool = True) -> None:
        answer.finish_reason = reason
        answer.state = None
        answer.pages = None
        self._scheduler.end(answer.row, answer.chosen, good)
        del self._answers[answer.row]

    def _tell(self, requests: Collection[Request]) -> None:
        """There is something new of these."""
        with self._news:
            for request in requests:
                if request in self._open and (request.answered or self.error):
                    request.end(request.error or self.error)
                    self.recent.ended(request)
                    del self._open[request]
            self._news.notify_all()
        for request in requests:
            request.tell()

    def _queue(self, requests: list[Request]) -> None:
        with self._news:
            self._check_open()
            self._new += [answer for request in requests for answer in request.answers]
            self._open |= dict.fromkeys(requests)
            for request in requests:
                if math.isfinite(request.deadline):
                    entry = request.deadline, next(self._numbers), weakref.ref(request)
                    heapq.heappush(self._deadlines, entry)
            self._news.notify_all()

    def _number_of_pages(self, page_bytes: int) -> int:
        per_row = pages_for(self.capacity)
        own = self.model.params["final_norm"].sharding.addressable_devices
        # On a CPU all devices have one memory, and others may have their engines.
        part = len(own) / jax.local_device_count() if next(iter(own)).platform == "cpu" else 1
        left = max(0, part * memory_bytes() - self._share * self.weight_bytes)
        room = int(_SHARE * left / (self._share * page_bytes))
        return max(per_row + 1, min(2 * self.rows * per_row + 1, room))

    def _warm_up(self, dtype: Any) -> Device:
        """The device, with every program compiled and run once."""
        config = with_fixed_rope(self.model.config, 1, min(self.capacity, self.switches_at or self.capacity))
        shape = self.rows, self.pages, self.capacity, self.chunk, dtype, self.impl, self.guesses
        make = partial(Device, self.model.params, config, *shape)
        began = time.perf_counter()
        ahead = Ahead()
        if lies_over(self.model.params) is None:
            make(do=ahead).rehearse()
        ahead.end()
        ahead.wait()
        device = make()
        device.rehearse()
        device.rehearse()  # where parameters were put in a place, so are rows and pages from now on
        device.put_pages([0], device.take_pages([0]))
        device.place(0, device.take_row(0))
        answer_keys(jax.random.key(0), np.zeros(1, np.int32), np.zeros(1, np.int32))
        self.about = (
            f"{self.rows} rows of {self.capacity} tokens, {self.pages} pages of {PAGE}"
            f" ({self.cache_bytes / 2**20:.0f} MiB){f', {ahead.programs} programs' * (ahead.programs > 0)},"
            f" ready in {time.perf_counter() - began:.1f} s"
        )
        print(f"{self.about}\n", end="", file=sys.stderr)  # at once: others may be made meanwhile
        return device


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Within, in the main thread, Ctrl-C waits; its handler is called at the end."""
    usual = signal.getsignal(signal.SIGINT)
    seen = list[Any]()
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        for args in seen[:1]:
            usual(*args)


def _held(new: Any, old: Any = None) -> jax.Array:
    """An array that its owner cannot change; where a caller has put the old one, or as little put there."""
    if not isinstance(new, jax.Array):
        return jnp.array(new)
    if old is None or not (new.committed or old.committed):
        return new
    return jax.device_put(new, old.sharding) if old.committed else jax.device_put(np.asarray(new))


def _dtype(params: Params, asked_for: Any) -> Any:
    """Of keys and values: a float type, or a name in `KV_BITS`."""
    if isinstance(asked_for, str) and asked_for == "gear":
        raise InputError("cache_dtype='gear' has directions of a whole row, not pages: use 'int8' or 'int4'")
    if isinstance(asked_for, str) and asked_for in KV_BITS:
        return asked_for
    return usual_dtype(params) if asked_for is None else resolve_dtype(asked_for)
