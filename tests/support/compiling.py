"""Counts what jax compiles."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

import jax

from xinfer_jax.layerwise.precompile import stop_compiling


@contextlib.contextmanager
def events() -> Iterator[list[str]]:
    """Collects one entry for each trace, lowering and compilation inside the block, in any thread. It first
    waits for the background of engines of other tests.
    """
    _wait_for_engines()
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def programs() -> Iterator[Counter]:
    """Counts the programs that are compiled inside the block, by name, in any thread. It first waits for
    compilations that are already running, and for the background of engines of other tests.
    """
    stop_compiling()
    _wait_for_engines()
    seen: Counter[str] = Counter()

    def listen(event: str, duration: float, **of: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen[str(of["fun_name"]).removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _wait_for_engines() -> None:
    for thread in threading.enumerate():
        if thread.name == "xinfer_jax warm-up":
            thread.join(120)
