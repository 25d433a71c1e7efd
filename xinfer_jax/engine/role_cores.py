"""`PrefillCore` and `DecodeCore`: the steps of an engine that only prefills, and of one that only decodes.

prefill ─ first token ─► on_prefilled ─► a preempted row of `DecodeCore` ─ slot ─► pull ─ send ─► arrive
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax

from .core import EngineCore
from .pages import PAGE_SIZE, num_pages_for
from .prefilled_row import PrefilledRow
from .requests import Answer
from .row import Action, PrefillChunk, Row, Swap


class PrefillCore(EngineCore):
    """Prefills prompts and samples the first token of each. Rows keep slot and pages until they have arrived
    at the engine that decodes them; while that is full, no more prompts get a slot here.

    Attributes:
        on_prefilled: is called with each answer after its first token, and with its row here. From then on
            the answer has another row, which was preempted before its second token.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_prefilled: Callable[[Answer, Row], None]
        self._prefilled: dict[Row, Any] = {}  # their contents in host memory, if they were preempted

    def send(self, row: Row, shardings: Any, deliver: Callable[[Any], None]) -> None:
        """Copies the state, recurrent states and pages of a prefilled row to other devices, while the host
        goes on.

        Args:
            row: if it was released, nothing is sent.
            shardings: of what `Device.get_row` returns, and of the pages of a group.
            deliver: is called with both.
        """
        if row not in self._prefilled:
            return
        contents = self._prefilled[row]
        if contents is None:
            pages = self.device.copy_pages(row.pages[: num_pages_for(row.num_computed)])
            contents = self.device.get_row(row.slot), pages
        ((state, recurrent), pages) = contents
        ((of_state, of_recurrent), of_pages) = shardings
        if (state.alternatives is None) != (of_state.alternatives is None):  # only one side has a mesh
            state, of_state = (
                dataclasses.replace(row, alternatives=None, output_start_B=None) for row in (state, of_state)
            )
        slot = jax.device_put((state, recurrent), (of_state, of_recurrent))
        deliver((slot, [jax.device_put(part, of_pages) for part in pages]))

    def release(self, row: Row) -> None:
        """Frees the slot and pages of a prefilled row."""
        if self._prefilled.pop(row, self) is not self:
            self.scheduler.end(row)

    def cache_pages(self, salt: bytes, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Keeps pages that another engine decoded, as `PrefilledRow.return_pages` says."""
        actions, pages = self.scheduler.cache_pages_of_answer(salt, ids, first)
        self._execute(actions)
        if pages:
            shardings = jax.tree.map(lambda x: x.sharding, self.device.copy_pages([0])[0])
            self.device.copy_pages_in(pages, [jax.device_put(part, shardings) for part in contents])

    def _sample_first(self, answer: Answer, outputs: Any) -> None:
        super()._sample_first(answer, outputs)
        row = answer.row
        if row not in self._answers:  # its first token ended it
            return
        del self._answers[row]
        row.moving = True
        self._prefilled[row] = None
        answer.row = dataclasses.replace(row, slot=None, pages=[], moving=False, overtaken=0)
        self.on_prefilled(answer, row)

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Swap) and action.row in self._prefilled:
                pages = self.device.copy_pages_out(action.pages)
                self._prefilled[action.row] = self.device.get_row(action.slot, True), pages
                self.scheduler.end(action.row)
            elif not isinstance(action, PrefillChunk | Swap) or not action.row.ended:
                super()._execute([action])


class DecodeCore(EngineCore):
    """Decodes rows that another engine prefilled. They come as preempted rows do, and their pages are pulled
    once the scheduler gives them a slot; rows that decode go on meanwhile.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sources: dict[Answer, PrefilledRow] = {}  # of answers that have not ended
        self._placed: Any = None

    def add(self, answers: Iterable[Answer]) -> None:
        answers = list(answers)
        self._sources |= {answer: answer.swapped_pages for answer in answers}
        super().add(answers)
        self.fail_lost_rows()

    def fail_lost_rows(self) -> None:
        """Ends requests whose pages are with an engine that has failed."""
        for answer, source in list(self._sources.items()):
            if answer.swapped_pages is source and source.error and answer in self._sources:
                self._fail(answer.request, source.error)
                self._notify([answer.request])

    def _swap_out(self, swap: Swap, answer: Answer) -> None:
        if isinstance(answer.swapped_pages, PrefilledRow):  # it has not arrived yet
            answer.row.moving = False
        else:
            super()._swap_out(swap, answer)

    def _swap_in(self, swap: Swap, answer: Answer) -> None:
        if isinstance(answer.swapped_pages, PrefilledRow):
            answer.row.moving = True
            answer.swapped_pages.pull(self._shardings, partial(self._arrive, answer))
        else:
            super()._swap_in(swap, answer)

    def _arrive(self, answer: Answer, contents: Any) -> None:
        """Puts the state and pages of a row where the scheduler gave it room; if it was preempted meanwhile,
        it is an ordinary preempted row from now on.
        """
        source = answer.swapped_pages
        if not isinstance(source, PrefilledRow):  # it arrived before, or has ended
            return
        ((state, recurrent), answer.swapped_pages) = contents
        (of_state, _) = self._shardings[0]
        if of_state.alternatives is not None and state.alternatives is None:
            own = self.device.new_row(answer.request.call, answer.key_1)
            output = own.alternatives, own.output_start_B
            output = jax.device_put(output, (of_state.alternatives, of_state.output_start_B))
            state = dataclasses.replace(state, alternatives=output[0], output_start_B=output[1])
        answer.swapped_row = state, recurrent
        source.release()
        row = answer.row
        if row.slot is not None:
            row.moving = False
            pages = row.pages[: num_pages_for(row.num_computed)]
            self._swap_in(Swap(row, row.slot, pages, False), answer)

    @property
    def _shardings(self) -> Any:
        """Those of what `Device.get_row` returns, and of a group of pages."""
        if self._placed is None:
            of_both = self.device.get_row(0), self.device.copy_pages([0])[0]
            self._placed = jax.tree.map(lambda x: x.sharding, of_both)
        return self._placed

    def _end(self, answer: Answer, reason: str, valid: bool = True) -> None:
        source = self._sources.pop(answer)
        row = answer.row
        if not valid:
            source.forget()
        elif row.share_answers and row.state == "running":
            ids = [*row.ids, *answer.sampled][: row.num_computed // PAGE_SIZE * PAGE_SIZE]
            first = len(row.ids) // PAGE_SIZE
            if pages := row.pages[first : len(ids) // PAGE_SIZE]:
                source.return_pages(ids, first, self.device.copy_pages(pages))
        if answer.swapped_pages is source:
            source.release()
        super()._end(answer, reason, valid)
