"""`PrefilledRow`: a row between the engine that prefilled it and the engine that decodes it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .row import Row


class PrefilledRow:
    """What an engine that decodes has of a row, before and after the row has arrived. In an answer it stands
    where the pages of a preempted row do. Its methods return at once, and may be called from any thread.

    Attributes:
        row: as the engine that prefilled it has it.
    """

    def __init__(self, source: Any, target: Any, row: Row):
        """source, target: the engines that prefill and decode it."""
        self._source = source
        self._target = target
        self._resets = source._core.scheduler.resets
        self.row = row

    @property
    def error(self) -> BaseException | None:
        """Why the engine that prefilled it has failed; None if it has not."""
        return self._source.error

    def pull(self, shardings: Any, arrive: Callable[[Any], None]) -> None:
        """Asks for its state and pages. `arrive` is called with them, on the thread of the engine that
        decodes.

        Args:
            shardings: of the state, and of the pages of a group, where they have to be.
            arrive: may be called more than once.
        """

        def deliver(contents: Any) -> None:
            self._target.call_soon(partial(arrive, contents))

        self._source.call_soon(lambda: self._source._core.send(self.row, shardings, deliver))

    def release(self) -> None:
        """It has arrived, or is not wanted any more: its pages are free for others."""
        self._source.call_soon(lambda: self._source._core.release(self.row))

    def forget(self) -> None:
        """Its numbers were not finite: no other prompt finds its pages."""
        self._source.call_soon(lambda: self._source._core.scheduler.forget_pages(self.row))

    def return_pages(self, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Gives pages that decoding wrote to the prefix cache of the engine that prefilled the row.

        Args:
            ids: the tokens from the first of the prompt on, in full pages.
            first: the first page in `contents`.
            contents: from `Device.copy_pages`.
        """
        core = self._source._core

        def cache() -> None:
            if self.row.cacheable and core.scheduler.resets == self._resets:  # else they are of old weights
                core.cache_pages(self.row.salt, ids, first, contents)

        self._source.call_soon(cache)
