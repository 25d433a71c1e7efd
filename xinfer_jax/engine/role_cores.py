"""`PrefillCore` and `DecodeCore`: the steps of an engine that only prefills, and of one that only decodes.

prefill ─ first token ─► (dispatcher) ─► a preempted row of `DecodeCore` ─ slot ─► pull ─► send ─► arrive
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax

from .core import EngineCore
from .device_programs import SampledTokens
from .endpoint import ELSEWHERE, PREFILLED
from .pages import PAGE_SIZE, num_pages_for
from .requests import Answer
from .row import Action, PrefillChunk, Row, Swap


class RoleCore(EngineCore):
    """What both roles need to move rows."""

    def example_row(self) -> Any:
        """What `PrefillCore.send` delivers: the state with recurrent states, and here one group of pages."""
        return self.device.get_row(0), self.device.copy_pages([0])[0]

    @cached_property
    def placement(self) -> Any:
        """The shardings of a row's state and recurrent states, and of a group of pages."""
        return jax.tree.map(lambda x: x.sharding, self.example_row())


class PrefillCore(RoleCore):
    """Prefills prompts and samples the first token of each, which ends the answer here. Its row keeps slot
    and pages until these have arrived at the engine that decodes it; while that is full, no more prompts get
    a slot here.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._prefilled: dict[Row, Any] = {}  # their contents in host memory, if they were preempted

    def send(self, row: Row, shardings: Any, deliver: Callable[[Any], None]) -> None:
        """Copies a prefilled row to other devices, while the host goes on, unless it was released. shardings:
        `placement` of the engine that decodes; None: of this one; deliver: is called with the copies.
        """
        if row not in self._prefilled:
            return
        contents = self._prefilled[row]
        if contents is None:
            pages = self.device.copy_pages(row.pages[: num_pages_for(row.num_computed)])
            contents = self.device.get_row(row.slot), pages
        ((state, recurrent), pages) = contents
        ((of_state, of_recurrent), of_pages) = shardings or self.placement
        if (state.alternatives is None) != (of_state.alternatives is None):  # only one side has a mesh
            state, of_state = (
                dataclasses.replace(row, alternatives=None, output_start_B=None) for row in (state, of_state)
            )
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
            del self._answers[row]
            row.moving = True
            self._prefilled[row] = None
            answer.finish_reason = PREFILLED
        return True

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Swap) and action.row in self._prefilled:
                pages = self.device.copy_pages_out(action.pages)
                self._prefilled[action.row] = self.device.get_row(action.slot, True), pages
                self.scheduler.end(action.row)
            elif not isinstance(action, PrefillChunk | Swap) or not action.row.ended:
                super()._execute([action])


class DecodeCore(RoleCore):
    """Decodes rows that another engine prefilled. They come as preempted rows do, and their pages are pulled
    once the scheduler gives them a slot; rows that decode go on meanwhile.
    """

    def lose(self, answer: Answer, error: BaseException) -> None:
        """The state and pages of a row will not come: its request fails."""
        if answer.swapped_pages is ELSEWHERE:
            self._fail(answer.request, error)
            self._notify([answer.request])

    def arrive(self, answer: Answer, contents: Any) -> None:
        """Puts the state and pages of a row where the scheduler gave it room; if it was preempted meanwhile,
        it is an ordinary preempted row from now on.
        """
        if answer.swapped_pages is not ELSEWHERE:  # it arrived before, or has ended
            return
        ((state, recurrent), answer.swapped_pages) = contents
        ((of_state, _), _) = self.placement
        if of_state.alternatives is not None and state.alternatives is None:
            own = self.device.new_row(answer.request.call, answer.key_1)
            output = own.alternatives, own.output_start_B
            output = jax.device_put(output, (of_state.alternatives, of_state.output_start_B))
            state = dataclasses.replace(state, alternatives=output[0], output_start_B=output[1])
        answer.swapped_row = state, recurrent
        answer.emit("arrived")
        row = answer.row
        if row.slot is not None:
            row.moving = False
            pages = row.pages[: num_pages_for(row.num_computed)]
            self._swap_in(Swap(row, row.slot, pages, False), answer)

    def _swap_out(self, swap: Swap, answer: Answer) -> None:
        if answer.swapped_pages is ELSEWHERE:  # it has not arrived yet
            answer.row.moving = False
        else:
            super()._swap_out(swap, answer)

    def _swap_in(self, swap: Swap, answer: Answer) -> None:
        if answer.swapped_pages is ELSEWHERE:
            answer.row.moving = True
            answer.emit("pull", self.placement)
        else:
            super()._swap_in(swap, answer)

    def _end(self, answer: Answer, reason: str, valid: bool = True) -> None:
        row = answer.row
        if not valid:
            answer.emit("invalid")
        elif row.share_answers and row.state == "running":
            ids = [*row.ids, *answer.sampled][: row.num_computed // PAGE_SIZE * PAGE_SIZE]
            first = len(row.ids) // PAGE_SIZE
            if pages := row.pages[first : len(ids) // PAGE_SIZE]:
                answer.emit("return_pages", ids, first, self.device.copy_pages(pages))
        super()._end(answer, reason, valid)
