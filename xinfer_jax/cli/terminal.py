"""What a command line writes: the answer on standard output, lines about it on standard error."""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..errors import InputError, one_line

_ERASE = "\x1b[K"  # from the cursor to the end of the line
_CACHE_WARNING = "persistent compilation cache entry"  # jax gives one for each program


def write(text: str) -> None:
    """Writes to standard output at once.

    Raises:
        InputError: it is full.
        BrokenPipeError: whoever reads us has gone.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"standard output cannot be written ({error.strerror}): give another") from error


class StatusLine:
    """A line on a terminal's standard error that says what is going on and for how long; gone afterwards.

    `with status("loading"): …` writes nothing where standard error is no terminal. What `say` writes
    meanwhile stands above the line.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = False

    @contextmanager
    def __call__(self, what: str | Callable[[], str]) -> Iterator[None]:
        if sys.stderr is None or not sys.stderr.isatty():
            yield
            return
        done = threading.Event()
        start = time.perf_counter()

        def draw() -> None:
            with self._lock:
                if not done.is_set():
                    now = what if isinstance(what, str) else what()
                    _write(f"\r{now} {time.perf_counter() - start:.1f} s{_ERASE}")
                    self._shown = True

        def tick() -> None:
            while not done.wait(0.1):
                draw()

        draw()
        threading.Thread(target=tick, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            self.say()

    def say(self, *lines: str) -> None:
        """Writes lines to standard error, where there is one."""
        with self._lock:
            self._replace("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        """Erases the line for good, unless a terminal that is stopped holds it."""
        if self._lock.acquire(timeout=0.2):
            self._replace("")

    def _replace(self, text: str) -> None:
        _write((f"\r{_ERASE}" if self._shown else "") + text)
        self._shown = False


status = StatusLine()  # one for the process, as its terminal is


@contextmanager
def one_line_warnings(name: str) -> Iterator[None]:
    """Within, a warning is a line that begins with the program's name; jax's many about its compilation cache
    are one.
    """
    said = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        about = None
        if _CACHE_WARNING in text:
            about = _CACHE_WARNING
            reason = text.partition("': ")[2]
            does = "read" if "reading" in text else "written"
            text = (
                f"the compilation cache has an entry that cannot be {does} ({one_line(reason)[:100]}):"
                " compiled without it; delete the cache's directory if this comes again"
            )
        if about not in said:
            status.say(f"{name}: {one_line(text)}")
        said.update({about} - {None})

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def let_go(stream: TextIO | None) -> None:
    """Sends nowhere what a stream holds that cannot be written: Python would fail on it again at its end."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(text: str) -> None:
    """To standard error; a program whose complaints cannot be heard goes on."""
    if sys.stderr is None or not text:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        let_go(sys.stderr)
