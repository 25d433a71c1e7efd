"""`Pausing`: an engine stops between two steps, and lends the memory of its pages: to a trainer, say."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import InputError, format_value
from ..ops.operation import without_mesh_context
from .row import HeldAdapter

RUNNING = "running"
PAUSED = "paused"
RELEASED = "without pages"
PAUSE_MODES = ("keep", "wait", "abort")  # vLLM's


class Pausing:
    """Pauses an engine, or all that one stands for. Its methods are in the order in which they are called.

    Attributes:
        phase: "running", "paused", or "without pages".
    """

    def __init__(self, owner: Any):
        """owner: the engine."""
        self._owner = owner
        self.phase = RUNNING

    def pause(self, mode: str = "keep") -> None:
        """Waits for the end of the current step; no other begins before `resume`. Requests are taken, and
        wait. Cancels, deadlines and `update` are handled, and `close` works.

        Args:
            mode: what becomes of unfinished answers, as in vLLM. "keep": they continue after `resume`.
                "wait": answers that have begun are finished first, while no other answer starts. "abort":
                they end with the finish_reason "abort".

        Raises:
            InputError: it is paused already; it is closed, or has failed; the mode is none of these.
        """
        if mode not in PAUSE_MODES:
            raise InputError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {format_value(mode)}")
        owner = self._owner
        owner.check_local("pages")
        if mode != "wait":
            self._change("pause", RUNNING, PAUSED, mode == "abort")
            return
        with owner.updating:  # an update may wait for answers too
            self._check_phase("pause", RUNNING)
            with drained(owner):
                self._change("pause", RUNNING, PAUSED)

    @without_mesh_context
    def abort(self) -> None:
        """Ends all unfinished answers with the finish_reason "abort", whether the engine is paused or not.
        Raises InputError where it is closed, or has failed.
        """
        owner = self._owner
        owner.check_local("requests")
        with without_steps(owner):
            owner.check_open()
            abort_unfinished(owner)

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
    def _change(self, name: str, before: str, after: str, aborts: bool = False) -> None:
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
            if aborts:
                abort_unfinished(owner)

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


def abort_unfinished(owner: Any, adapter: HeldAdapter | None = None) -> None:
    """Ends all answers, or those with an adapter, with the finish_reason "abort". The caller holds
    `without_steps`.
    """
    for loop in [owner] if owner.engines[0].role is not None else owner.engines:
        loop.abort_unfinished("aborted", adapter)


@contextmanager
def drained(owner: Any) -> Iterator[None]:
    """Ends all answers that have begun, and starts no others within the `with` block."""
    cores = [engine.core for engine in owner.engines]
    try:
        with without_steps(owner):
            for core in cores:
                core.hold(True)
        while not all(core.is_drained for core in cores):  # first where prompts are prefilled
            owner.check_open()
            if owner.pausing.phase != RUNNING:
                remedy = "call resume() first, or take another mode"
                raise InputError(f"mode='wait' is for an engine that runs: {remedy}")
            owner.step()
        yield
    finally:
        for core in cores:
            core.hold(False)


@contextmanager
def without_steps(owner: Any) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step, nor does who gives them requests."""
    with ExitStack() as stack:
        for loop in dict.fromkeys((owner, *owner.engines)):
            if hasattr(loop, "without_steps"):
                stack.enter_context(loop.without_steps())
        yield
