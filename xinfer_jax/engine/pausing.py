"""`Pausing`: an engine stops between two steps, and lends the memory of its pages: to a trainer, say."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import InputError
from ..ops.operation import without_mesh_context

RUNNING = "running"
PAUSED = "paused"
RELEASED = "without pages"


class Pausing:
    """Pauses an engine, or all that one stands for. Its methods are in the order in which they are called.

    Attributes:
        phase: "running", "paused", or "without pages".
    """

    def __init__(self, owner: Any):
        """owner: `Engine` or `Engines`."""
        self._owner = owner
        self.phase = RUNNING

    def pause(self) -> None:
        """Waits for the end of the current step; no other begins before `resume`. Requests are taken, and
        wait. Cancels, deadlines and `update` are handled, and `close` works.

        Raises:
            InputError: it is paused already; it is closed, or has failed.
        """
        self._change("pause", RUNNING, PAUSED)

    def resume(self) -> None:
        """Ends `pause`. Raises InputError where it is not paused, or has no pages."""
        self._change("resume", PAUSED, RUNNING)

    def release_cache(self) -> None:
        """Frees the device memory of the pages of a paused engine, of recurrent states and their snapshots.
        Rows that have begun are preempted: what they use is copied to host memory, and they continue with the
        bits that they have otherwise. The prefix cache is emptied.

        Raises:
            InputError: it is not paused, or has no pages already.
        """
        self._change("release_cache", PAUSED, RELEASED)

    def restore_cache(self) -> None:
        """Allocates what `release_cache` freed. The engine stays paused. Nothing is compiled.

        Raises:
            InputError: it has its pages.
            jax.errors.JaxRuntimeError: too little memory is free: free more, and call it again.
        """
        self._change("restore_cache", RELEASED, PAUSED)

    @without_mesh_context
    def _change(self, name: str, before: str, after: str) -> None:
        owner = self._owner
        owner.check_local("pages")
        with without_steps(owner):
            owner.check_open()
            self._check_phase(name, before)
            # After an error in one of them the call is repeated, for those that have not changed.
            for engine in owner.engines:
                if engine.pausing.phase != after:
                    engine.pausing.enter(after)
            self.phase = after

    def enter(self, phase: str) -> None:
        """Begins a phase of this engine alone, between two steps."""
        if phase == RELEASED:
            self._owner.core.release_cache()
        elif self.phase == RELEASED:
            self._owner.core.device.restore_cache()
        self.phase = phase

    def _check_phase(self, name: str, before: str) -> None:
        if self.phase != before:
            raise InputError(
                f"{name}() is for an engine that is {before}, and this one is {self.phase}: the order is"
                " pause, release_cache, restore_cache, resume; the two in the middle may be left out"
            )


@contextmanager
def without_steps(owner: Any) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step, nor does who gives them requests."""
    with ExitStack() as stack:
        for loop in dict.fromkeys((owner, *owner.engines)):
            if hasattr(loop, "without_steps"):
                stack.enter_context(loop.without_steps())
        yield
