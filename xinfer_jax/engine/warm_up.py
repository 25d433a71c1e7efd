"""Compilation of an engine's programs. The programs of a short greedy request compile before the engine is
ready. The others compile in the background, for one kind of request after another. A call waits for its own
program only.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..layerwise.precompile import CompilerStoppedError, Precompiler, shape_struct
from ..modes import in_default_modes
from ..sharding import concrete_mesh_of
from ..weights.params import Params
from .engine_device import Device
from .shape import EngineShape

_LOGGER = logging.getLogger(__name__)

Stage = Callable[[], Any]  # a dry run of calls
_IDLE_SECONDS = 0.5  # for which the engine must have no request before the background takes the processors
_PATIENCE = 5.0  # seconds that it waits for that before each stage
_POLL_SECONDS = 0.05


class WarmUp:
    """Runs jitted functions. Their programs are compiled in stages, most of them in the background. A call
    whose program is not compiled yet waits for it.
    """

    def __init__(self) -> None:
        self.compiler = Precompiler()
        self.complete = False  # all programs are compiled
        self.is_waiting = False  # a call waits for its program now
        self._left: dict[str, Stage] = {}  # the stages that are not compiled, the most likely first
        self._begun: dict[str, threading.Thread] = {}  # compiles the stage of this name
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __call__(self, program: Any, *args: Any) -> Any:
        if self.complete or self.compiler.is_compiled(program, *args):
            return program(*args)
        self.is_waiting = True
        try:
            self.compiler.wait_for(program, *args)
            return program(*args)  # compiles it now, if that has failed
        finally:
            self.is_waiting = False

    def is_ready(self, stages: frozenset[str]) -> bool:
        """Returns True if these stages are compiled. If some are not, they begin now, in addition to the
        stages that compile already.
        """
        needed = stages & self._left.keys()
        for name in needed:
            self._begin(name)
        return not needed

    def compile_in_background(self, stages: dict[str, Stage], is_busy: Callable[[], bool]) -> None:
        """Begins to compile these stages, one after another, and returns. A stage begins when a request needs
        it, or once the engine has been idle, or after some seconds: compiling takes the processors from
        requests. The end of the process waits for the programs that have begun: XLA cannot be interrupted.
        is_busy: returns True if the engine has requests.
        """
        self._left = dict(stages)

        @in_default_modes
        def compile_stages() -> None:
            while name := self._next_stage(is_busy):
                self._begin(name).join()
            with self._lock:  # a request may be about to start one
                begun = [*self._begun.values()]
            for thread in begun:
                thread.join()
            self.finish()

        threading.Thread(target=compile_stages, name="xinfer_jax warm-up").start()

    def _begin(self, name: str) -> threading.Thread:
        """Returns the thread that compiles a stage, after starting it if nobody has."""
        with self._lock:
            if name not in self._begun:
                compiling = threading.Thread(target=self._compile, args=(name,), name=f"xinfer_jax {name}")
                self._begun[name] = compiling
                compiling.start()
            return self._begun[name]

    def _compile(self, name: str) -> None:
        try:
            self.compiler.compile_all(self._left[name])
        except CompilerStoppedError:
            return
        except Exception as error:  # a request that needs the program compiles it, or has the error
            about = f"{type(error).__name__}: {error}"
            _LOGGER.error("a program was not compiled in the background: %s", about)
        with self._lock:
            self._left = {other: stage for other, stage in self._left.items() if other != name}

    def finish(self) -> None:
        """Ends the waiting: from now on no call waits, and a program that is not compiled compiles when it
        runs.
        """
        self._left = {}
        self.complete = True

    def stop(self) -> None:
        """Ends the background after the stages that have begun."""
        self._stopped.set()

    def _next_stage(self, is_busy: Callable[[], bool]) -> str | None:
        """Returns the next stage that has not begun, after waiting for an idle engine, or None at the end."""
        began = idle_since = time.monotonic()
        while threading.main_thread().is_alive() and not self._stopped.is_set():
            rest = [name for name in self._left if name not in self._begun]
            if not rest:
                return None
            now = time.monotonic()
            idle_since = now if is_busy() else idle_since
            if now > min(idle_since + _IDLE_SECONDS, began + _PATIENCE):
                return rest[0]
            self._stopped.wait(_POLL_SECONDS)
        return None


def create_device(
    params: Params, config: ModelConfig, shape: EngineShape, warm_up: bool, is_busy: Callable[[], bool]
) -> tuple[Device, WarmUp]:
    """Returns a device that can answer a short greedy request, and the `WarmUp` that compiles its other
    programs.

    Over a mesh all programs compile when they run, here: only running them shows their output shardings.
    warm_up: True: wait for all programs. is_busy: returns True if the engine has requests.
    """
    warm = WarmUp()
    if concrete_mesh_of(params) is not None:
        warm.finish()
        device = Device(params, config, shape, warm)
        for _ in range(2):  # rows and pages have their final shardings only after the first run
            for stage in device.stages().values():
                stage()
        return device, warm
    dry_device = Device(params, config, shape, warm.compiler, dry_run=True)
    dry_device.params = jax.tree.map(shape_struct, params)  # the weights may be replaced meanwhile
    (_, first), *others = dry_device.stages().items()
    for stage in (first, *(stage for _, stage in others if warm_up)):
        stage()
    device = Device(params, config, shape, warm)  # allocates the pages while programs are compiled
    warm.compiler.wait()
    if warm_up:
        warm.finish()
    else:
        warm.compile_in_background(dict(others), is_busy)
    return device, warm
