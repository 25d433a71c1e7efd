"""`WeightSwitch`: the part of a core that replaces the parameters between two steps, and says what becomes of
unfinished answers.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..weights.params import Params
from ..weights.params_like import is_deleted
from .answers import Answer
from .requests import Request
from .row import HeldAdapter, Row
from .scheduler import Scheduler


class WeightSwitch(abc.ABC):
    """Of `EngineCore`, which has the attributes.

    Attributes:
        version: of the parameters.
    """

    device: Any
    scheduler: Scheduler
    _answers: dict[Row, Answer]
    adapter_paths: Sequence[str]
    _held: dict[Answer, frozenset[str]]
    _swapped: dict[Answer, Any]
    _restarted: dict[Answer, Any]
    _holds = False  # no answer starts
    version = 0

    @abc.abstractmethod
    def _stages(self, answer: Answer) -> frozenset[str]: ...

    @abc.abstractmethod
    def _fail(self, request: Request, error: BaseException) -> None: ...

    def hold(self, holds: bool) -> None:
        """From now on no answer starts; holds: False: they do again."""
        self._holds = holds
        for answer in self._answers.values() if holds else ():
            if not answer.has_begun and answer not in self._held:
                self.scheduler.withdraw(answer.row)
                self._held[answer] = self._stages(answer)

    @property
    def is_drained(self) -> bool:
        """Whether all answers that had started when `hold` was called have ended."""
        return not any(answer.has_begun for answer in list(self._answers.values()))

    def switch(self, params: Params, version: int, recomputes: bool) -> None:
        """Replaces the parameters between two steps. Pages of earlier ones are not shared any more.
        recomputes: rows compute their keys anew; else they go on with those that they have.
        """
        for row, answer in self._answers.items():
            self._go_on(answer, recomputes, version)
            self.scheduler.prefixes.release_host_pages(row)  # they are of earlier parameters
        self.scheduler.reset_prefix_cache()
        self.device.params = params
        self.version = version

    def set_adapter(self, index: int, matrices: Mapping[str, Any]) -> None:
        """Writes (a, b, scale) of each matrix of an adapter, between two steps."""
        for path in self.adapter_paths:
            self.device.set_adapter(index, path, *matrices.get(path, (None, None, 0.0)))

    def switch_adapter(
        self, adapter: HeldAdapter, matrices: Mapping[str, Any], version: int, recomputes: bool
    ) -> None:
        """`switch` of an adapter, for the rows that have it. The caller then sets its version and digest."""
        for row, answer in self._answers.items():
            if row.adapter is not adapter:
                continue
            self._go_on(answer, recomputes, self.version, version)
            self.scheduler.forget_prompt(row)
        self.set_adapter(adapter.index, matrices)

    def _go_on(
        self, answer: Answer, recomputes: bool, version: int, adapter_version: int | None = None
    ) -> None:
        """What becomes of an answer whose next tokens come from these versions (`Answer.record_version`)."""
        restarts = recomputes and answer.row.num_computed > 0
        if answer.has_begun:
            answer.record_version(self.version)  # it may have nothing but found pages
            answer.record_version(version, restarts, adapter_version)
        if restarts:
            self._restart(answer)

    def _restart(self, answer: Answer) -> None:
        """Lets a row compute its keys anew; then it goes on from the token sampled last."""
        row = answer.row
        if row.is_prefilled:
            state, *_ = self._swapped.get(answer) or (self.device.get_row(row.slot),)
            self._restarted[answer] = state
        else:
            answer.request.prompt_logprobs.clear()
        self._swapped.pop(answer, None)
        self.scheduler.restart(row, answer.ids_with_keys)

    def _fail_without_params(self) -> bool:
        """Fails all requests if parameters were donated or deleted. Returns whether they were."""
        if not is_deleted(getattr(self.device, "params", None)):
            return False
        error = InputError(
            "the engine's parameters were donated to another program, or deleted: give it others by"
            " engine.update(params), with copy=True if these will be donated"
        )
        for request in {answer.request: None for answer in self._answers.values()}:
            self._fail(request, error)
        return True
