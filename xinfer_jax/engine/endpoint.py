"""An engine that only prefills, or only decodes: its steps, and `EngineEndpoint`, which a `Dispatcher` uses.

dispatcher ─ submit, send, receive, release, forget, drop ─► endpoint ─ events ─► dispatcher
prefill ─ first token ─► (dispatcher) ─► a preempted row of `DecodeCore` ─ slot ─► pull ─► send ─► arrive

Each answer at an endpoint has a ticket, a number that is used once. An event about a ticket that the
dispatcher does not know any more is ignored.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import jax

from ..errors import InputError
from ..generation.state import SampledTokens
from .answers import Answer
from .core import EngineCore
from .pages import PAGE_SIZE
from .requests import Request
from .row import Action, PrefillChunk, Row, Swap

PREFILLED = "prefilled"  # `Answer.ended_by` of an answer that another engine continues
ELSEWHERE = object()  # stands for the state and pages of a row that another engine prefilled


@dataclasses.dataclass
class _Work:
    """An answer at an endpoint, and the parts of it that the dispatcher has: its tokens, log-probabilities of
    its prompt, and its end.
    """

    answer: Answer
    tokens: int
    of_prompt: int = 0
    ended: bool = False
    # Of the prefix cache, when the prompt was prefilled; and the salt of its pages.
    prefilled: tuple[int, bytes] = (0, b"")


class EngineEndpoint:
    """An engine of this process. Its methods return at once.

    Args:
        engine: an `Engine` with a role.
        core: its `RoleCore`.
        emit: takes the name of an event (a method of `Dispatcher`), a ticket and more, on any thread.
    """

    def __init__(self, engine: Any, core: Any, emit: Callable[..., None]):
        self.role = engine.role
        self.pages = engine.pages
        self._engine = engine
        self._core = core
        self._emit = emit
        self._answers: dict[int, _Work] = {}

    @property
    def error(self) -> BaseException | None:
        return self._engine.error

    def example_row(self) -> Any:
        """Returns arrays as `receive` takes them, of a row with one group of pages, before the engine has
        rows.
        """
        return self._core.example_row()

    def submit(self, ticket: int, answer: Answer) -> None:
        """Prefills the prompt of another engine's answer, or continues that after its first token."""
        if not self._engine.started:
            self._engine.__enter__()
        first = answer if self.role == "decode" else None
        old = answer.request
        asked = old.request_options, old.adapter, old.factors
        request = Request(self._engine, old.call, *asked, [answer.number], first)
        own = request.single_answer
        if first is not None:
            self._core.expect(own, lambda name, *args: self._emit(name, ticket, *args))
        self._answers[ticket] = _Work(own, len(own.logprobs))
        request.listeners.append(partial(self._report, ticket))
        with suppress(InputError):  # it has failed: the dispatcher sees its error
            self._engine.enqueue([request])

    def send(self, ticket: int, target: int, shardings: Any = None) -> None:
        """Sends a prefilled row to the endpoint that knows it by the ticket `target`. shardings: the
        shardings of `pull`. None: this engine's.
        """
        deliver = partial(self._emit, "pages", target)
        self._call_soon(ticket, lambda answer: self._core.send(answer.row, shardings, deliver))

    def receive(self, ticket: int, contents: Any) -> None:
        """Handles the event that the state and pages of a row have arrived here."""
        self._call_soon(ticket, lambda answer: self._core.arrive(answer, contents))

    def fail(self, ticket: int, error: BaseException) -> None:
        """Fails the request of a row whose state and pages were lost."""
        self._call_soon(ticket, lambda answer: self._core.lose(answer, error))

    def release(self, ticket: int) -> None:
        """Frees the slot and pages of a prefilled row, which has arrived elsewhere."""
        self._call_soon(ticket, lambda answer: self._core.release(answer.row))

    def forget(self, ticket: int) -> None:
        """Handles a row whose numbers were not finite: no other prompt finds its pages."""
        self._call_soon(ticket, lambda answer: self._core.scheduler.prefixes.uncache(answer.row))

    def cache_pages(self, ticket: int, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Keeps pages that another engine decoded in the prefix cache. The tokens are `ids`, the prompt and
        more in full pages. The pages are the ones from `first` on, in the form of `Device.copy_pages`.
        """
        prefilled = self._answers[ticket].prefilled if ticket in self._answers else None

        def cache(answer: Answer) -> None:
            row = answer.row
            # Else they are of old weights, or of an old adapter.
            if row.cacheable and prefilled == (self._core.scheduler.resets, row.page_salt):
                self._core.cache_pages(row.page_salt, ids, first, contents)

        self._call_soon(ticket, cache)

    def drop(self, ticket: int) -> None:
        """Ends the work for a ticket, and frees its slot and pages here."""
        if work := self._answers.get(ticket):
            self._engine.cancel(work.answer.request)  # first: the row may be prefilled meanwhile
            if self.role == "prefill":
                self.release(ticket)
            del self._answers[ticket]

    def _call_soon(self, ticket: int, call: Callable[[Answer], None]) -> None:
        """Calls a function with an answer that is here, on the engine's thread."""
        if work := self._answers.get(ticket):
            self._engine.call_soon(lambda: call(work.answer))

    def _report(self, ticket: int) -> None:
        """Sends the new part of an answer. Runs on the engine's thread."""
        work = self._answers.get(ticket)
        if work is None or work.ended or self.error is not None:
            return
        answer = work.answer
        request = answer.request
        start = work.tokens
        prompt_start = work.of_prompt
        work.tokens = len(answer.logprobs)
        work.of_prompt = len(request.prompt_logprobs)
        work.ended = answer.ended_by is not None
        if (start, prompt_start) == (work.tokens, work.of_prompt) and not work.ended:
            return
        if answer.ended_by == PREFILLED:
            work.prefilled = self._core.scheduler.resets, answer.row.page_salt
        self._emit("progress", ticket, answer.progress(start, prompt_start))


class RoleCore(EngineCore):
    """The methods that both roles need to move rows."""

    def example_row(self) -> Any:
        """Returns an example of the values that `PrefillCore.send` delivers: the state with recurrent states,
        and one group of pages.
        """
        return self.device.get_row(0), self.device.copy_pages([0])[0]

    @cached_property
    def placement(self) -> Any:
        """The shardings of a row's state and recurrent states, and of a group of pages."""
        return jax.tree.map(lambda x: x.sharding, self.example_row())

    def release_cache(self) -> None:
        _ = self.placement  # rows still arrive, and leave, without pages here
        super().release_cache()


class PrefillCore(RoleCore):
    """Prefills prompts and samples the first token of each, which ends the answer here. Its row keeps slot
    and pages until these have arrived at the engine that decodes it. While that engine is full, no more
    prompts get a slot here.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._prefilled: dict[Row, Any] = {}  # their contents in host memory, if they were preempted

    @property
    def is_drained(self) -> bool:
        return super().is_drained and not self._prefilled

    @property
    def _is_live(self) -> bool:
        """Returns True: engines that decode wait for first tokens, whether callers stream or not."""
        return True

    def send(self, row: Row, shardings: Any, deliver: Callable[[Any], None]) -> None:
        """Copies a prefilled row to other devices, while the host goes on, unless it was released. shardings:
        the `placement` of the engine that decodes. None: this engine's. deliver: a function that is called
        with the copies.
        """
        if row not in self._prefilled:
            return
        contents = self._prefilled[row]
        if contents is None:
            pages = self.device.copy_pages(self.scheduler.swap(row, True).pages)
            contents = self.device.get_row(row.slot), pages
        ((state, recurrent), pages) = contents
        ((of_state, of_recurrent), of_pages) = shardings or self.placement
        slot = jax.device_put((state, recurrent), (of_state, of_recurrent))
        deliver((slot, [jax.device_put(part, of_pages) for part in pages]))

    def release(self, row: Row) -> None:
        if self._prefilled.pop(row, self) is not self:
            self.scheduler.end(row)

    def cache_pages(self, salt: bytes, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Keeps pages that another engine decoded, as `EngineEndpoint.cache_pages` says."""
        actions, pages = self.scheduler.cache_pages_of_answer(salt, ids, first)
        self._execute(actions)
        if pages:
            (_, of_pages) = self.placement
            self.device.copy_pages_in(pages, [jax.device_put(part, of_pages) for part in contents])

    def _append(self, answer: Answer, out: SampledTokens, slot: int) -> bool:
        if not super()._append(answer, out, slot):
            row = answer.row
            del self.answers[row]
            self.scheduler.set_moving(row, True)
            self._prefilled[row] = None
            answer.end(PREFILLED)
        return True

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Swap):
                self.sample_firsts()
            if isinstance(action, Swap) and action.row in self._prefilled:
                pages = self.device.copy_pages_out(action.pages)
                self._prefilled[action.row] = self.device.get_row(action.slot, True), pages
                self.scheduler.end(action.row)
            elif not isinstance(action, PrefillChunk | Swap) or not action.row.ended:
                super()._execute([action])


class DecodeCore(RoleCore):
    """Decodes rows that another engine prefilled. They come as preempted rows do, and their pages are pulled
    once the scheduler gives them a slot. Rows that decode continue meanwhile. If an update needs keys to be
    computed again, this engine computes them, by programs that are compiled then.
    """

    def lose(self, answer: Answer, error: BaseException) -> None:
        """Fails the request of a row whose state and pages will not come."""
        if self._is_elsewhere(answer):
            self._fail(answer.request, error)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._emits: dict[Answer, Callable[..., None]] = {}
        self._outdated: set[Answer] = set()  # whose keys are computed anew once they have arrived

    def expect(self, answer: Answer, emit: Callable[..., None]) -> None:
        """Notes that the row's state and pages are elsewhere. Call it before `add`. emit: a function that
        reports an event of the row.
        """
        self._swapped[answer] = ELSEWHERE
        self._emits[answer] = emit

    def _is_elsewhere(self, answer: Answer) -> bool:
        return self._swapped.get(answer) is ELSEWHERE

    def add(self, answers: Iterable[Answer]) -> None:
        answers = list(answers)
        for answer in answers:
            adapter = answer.row.adapter
            is_old: dict[Any, bool] = {None: answer.switches[-1].version != self.weights.version}
            if adapter:
                is_old[adapter] = answer.switches[-1].adapter_version != adapter.version
            if any(is_old[what] and self.weights.recomputes.get(what) for what in is_old):
                answer.record_version(self.weights.version, True)
                self._outdated.add(answer)
        super().add(answers)

    def restart(self, answer: Answer) -> None:
        if self._is_elsewhere(answer):
            self._outdated.add(answer)
        else:
            super().restart(answer)

    def arrive(self, answer: Answer, contents: Any) -> None:
        """Puts the state and pages of a row into the slot and pages that the scheduler gave it. If the row
        was preempted meanwhile, it is an ordinary preempted row from now on. A row with outdated keys
        computes them here.
        """
        if not self._is_elsewhere(answer):  # it arrived before, or has ended
            return
        self._swapped[answer] = contents
        self._emits[answer]("arrived")
        row = answer.row
        if answer in self._outdated:
            self._outdated.discard(answer)
            self.scheduler.set_moving(row, False)
            self.restart(answer)
        elif row.slot is not None:
            self.scheduler.set_moving(row, False)
            self._swap_in(self.scheduler.swap(row, False), answer)

    def _swap_out(self, swap: Swap, answer: Answer) -> None:
        if self._is_elsewhere(answer):  # it has not arrived yet
            self.scheduler.set_moving(answer.row, False)
        else:
            super()._swap_out(swap, answer)

    def _swap_in(self, swap: Swap, answer: Answer) -> None:
        if self._is_elsewhere(answer):
            self.scheduler.set_moving(answer.row, True)
            self._emits[answer]("pull", self.placement)
        else:
            super()._swap_in(swap, answer)

    def _end(self, answer: Answer, reason: str, valid: bool = True) -> None:
        row = answer.row
        emit = self._emits.pop(answer)
        if not valid:
            emit("invalid")
        elif row.share_answers and row.state == "running":
            prompt = answer.request.ids
            ids = [*prompt, *answer.tokens][: row.num_computed // PAGE_SIZE * PAGE_SIZE]
            first = len(prompt) // PAGE_SIZE
            self._finish_pages(answer, valid)
            if pages := row.pages[first : len(ids) // PAGE_SIZE]:
                emit("return_pages", ids, first, self.device.copy_pages(pages))
        self._outdated.discard(answer)
        super()._end(answer, reason, valid)
