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
    """Pauses an engine, or all engines behind a queue. Its methods are in the order in which you call them.

    Attributes:
        phase: "running", "paused", or "without pages".
    """

    def __init__(self, owner: Any):
        """owner: the engine."""
        self._owner = owner
        self.phase = RUNNING

    def pause(self, mode: str = "keep") -> None:
        """Pauses the engine after its current step, until you call `resume`.

        While it is paused, you can submit requests, and they wait. Cancelled requests, deadlines, `update`
        and `close` work.

        Args:
            mode: the fate of unfinished answers (vLLM has the same values):

                - "keep": they continue after `resume`.
                - "wait": answers that have begun are finished first, while no other answer starts.
                - "abort": they end with the finish_reason "abort".

        Raises:
            InputError: the engine is paused already, is closed or has failed, or the mode is none of these.
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

        Raises:
            InputError: the engine is closed or has failed.
        """
        owner = self._owner
        owner.check_local("requests")
        with without_steps(owner):
            owner.check_open()
            abort_unfinished(owner)

    def resume(self) -> None:
        """Continues a paused engine.

        Raises:
            InputError: the engine is not paused, or has no pages (call `restore_cache` first).
        """
        self._change("resume", PAUSED, RUNNING)

    def release_cache(self) -> None:
        """Frees the device memory of the KV cache of a paused engine, for example for a training step.

        It frees the pages, recurrent states and snapshots of these states. Rows that have begun are
        preempted: their pages are copied to host memory, and they later continue with the same bits. The
        prefix cache is emptied.

        Raises:
            InputError: the engine is not paused, or has no pages already.
        """
        self._change("release_cache", PAUSED, RELEASED)

    def restore_cache(self) -> None:
        """Allocates the memory that `release_cache` freed. The engine stays paused, and nothing is compiled.

        Raises:
            InputError: the engine has its pages.
            jax.errors.JaxRuntimeError: too little memory is free. Free more memory, and call it again.
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
