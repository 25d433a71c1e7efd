"""Compiling an engine's programs: those that a short greedy request needs before the engine is ready, the others
in the background, one kind of request after another. A call waits for its own program only.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..config.model_config import ModelConfig
from ..generation.precompile import ImmediateExecutor, Precompiler
from ..generation.runners import LayerwiseRunner, runner_class
from ..sharding import concrete_mesh_of
from ..weights.params import Params
from .device import Device
from .layerwise_device import LayerwiseDevice
from .shape import EngineShape

_IDLE_SECONDS = 0.5  # for which the engine must have no request before the background takes the processors
_PATIENCE = 5.0  # seconds that it waits for that before each stage
_POLL_SECONDS = 0.05


class WarmUp(ImmediateExecutor):
    """Runs jitted functions; while some are still compiled, each call waits for its own program.

    Attributes:
        compiler: of the programs.
        complete: all programs are compiled.
        is_waiting: a call waits for its program now.
        waited_seconds: that calls have waited for programs.
    """

    def __init__(self) -> None:
        self.complete = False
        self.is_waiting = False
        self.waited_seconds = 0.0
        self.compiler = Precompiler()
        self._stopped = threading.Event()

    def __call__(self, program: Any, *args: Any) -> Any:
        if not self.complete and not self.compiler.is_compiled(program, *args):
            self._wait_for(program, *args)
        return program(*args)

    @property
    def num_programs(self) -> int:
        """How many programs are compiled."""
        return self.compiler.num_compiled

    def compile_all(self, stages: list[Callable[[], Any]]) -> None:
        """Compiles the programs of these dry runs side by side, and waits for them."""
        for stage in stages:
            stage()
        self.compiler.wait()

    def compile_in_background(self, stages: list[Callable[[], Any]], is_busy: Callable[[], bool]) -> None:
        """Begins to compile the programs of these dry runs, one stage after another, and returns. Before each
        it waits a while for the engine to be idle, as compiling takes the processors from requests. The end
        of the process waits for the stage that has begun: the compiler cannot be interrupted.
        """

        def compile_stages() -> None:
            for stage in stages:
                began = idle_since = time.monotonic()
                while not self._is_ending and (now := time.monotonic()) < began + _PATIENCE:
                    if is_busy():
                        idle_since = now
                    if now > idle_since + _IDLE_SECONDS:
                        break
                    self._stopped.wait(_POLL_SECONDS)
                if self._is_ending:
                    return
                try:
                    stage()
                    self.compiler.wait()
                except Exception as error:  # a request that needs the program compiles it, or has the error
                    if not self._is_ending:
                        about = f"{type(error).__name__}: {error}"
                        print(f"a program was not compiled in the background: {about}", file=sys.stderr)
                    return
            self.finish()

        threading.Thread(target=compile_stages, name="xinfer_jax warm-up").start()

    @property
    def _is_ending(self) -> bool:
        """Whether the engine was closed, or the process ends."""
        return self._stopped.is_set() or not threading.main_thread().is_alive()

    def finish(self) -> None:
        """No call waits any more."""
        self.complete = True
        self.compiler.close()

    def stop(self) -> None:
        """Ends the background after the stage that has begun."""
        self._stopped.set()

    def _wait_for(self, program: Any, *args: Any) -> None:
        began = time.monotonic()
        self.is_waiting = True
        try:
            self.compiler.wait_for(program, *args)
        finally:
            self.is_waiting = False
            self.waited_seconds += time.monotonic() - began


def create_device(
    params: Params, config: ModelConfig, shape: EngineShape, warm_up: bool, is_busy: Callable[[], bool]
) -> tuple[Device, WarmUp]:
    """A device that can answer a short greedy request, and what compiles its other programs.

    Over a mesh all programs compile when they run, here: only running them shows their output shardings.

    Args:
        warm_up: wait for all programs.
        is_busy: whether the engine has requests.
    """
    layerwise = runner_class(params) is LayerwiseRunner and not shape.num_draft_tokens
    device_class = LayerwiseDevice if layerwise else Device
    warm = WarmUp()
    if concrete_mesh_of(params) is not None:
        warm.finish()
        device = device_class(params, config, shape, warm)
        for _ in range(2):  # rows and pages have their final shardings only after the first run
            for stage in device.stages():
                stage()
        return device, warm
    dry_device = device_class(params, config, shape, warm.compiler)
    first, *others = dry_device.stages()
    first()
    device = device_class(params, config, shape, warm)  # allocates the pages while programs are compiled
    warm.compile_all(others if warm_up else [])
    if warm_up:
        warm.finish()
    else:
        warm.compile_in_background(others, is_busy)
    return device, warm
