"""Output of a command: the answer on standard output, log lines and the status line on standard error."""

import logging
import os
import sys
import termios
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ..errors import InputError, format_message

_ERASE = "\x1b[K"  # from the cursor to the end of the line
_reading: list[list[Any]] = []  # the terminal's settings before the line that is being read
_LIBRARY = __name__.partition(".")[0]  # the name of the logger above those of all modules
_CACHE_WARNING = "persistent compilation cache entry"  # jax warns once for each program


def write(text: str) -> None:
    """Writes to standard output and flushes it. BrokenPipeError: the reader has gone."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"standard output cannot be written ({error.strerror}): give another") from error


def read_line(prompt: str) -> str:
    """Reads a line from a terminal, with editing and a history of earlier lines. "" at its end."""
    with suppress(ImportError):  # without readline the terminal's own editing is left
        import readline  # noqa: F401  `input` uses it once it is imported
    _reading.append(termios.tcgetattr(sys.stdin))
    try:
        return f"{input(prompt)}\n"
    except EOFError:
        return ""
    finally:
        _reading.pop()


def restore_terminal() -> None:
    """Gives the terminal back as it was before `read_line`, for a process that ends within it."""
    for settings in _reading:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
        write("\n")


class StatusLine:
    """A line on a terminal's standard error that shows the present work and its time. It is erased
    afterwards.

    `with status("loading"): …` writes nothing if standard error is not a terminal. Lines that `log` writes
    meanwhile appear above it.
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
            self.log()

    def log(self, *lines: str) -> None:
        """Writes lines to standard error, if it is open."""
        with self._lock:
            self._replace("".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        """Erases the line for good. Gives up after 0.2 s: a stopped terminal may block a writing thread."""
        if self._lock.acquire(timeout=0.2):
            self._replace("")

    def _replace(self, text: str) -> None:
        _write((f"\r{_ERASE}" if self._shown else "") + text)
        self._shown = False


status = StatusLine()  # one for the process, as its terminal is


@contextmanager
def one_line_warnings(name: str) -> Iterator[None]:
    """Within the block, a warning is one line with the program's name. Only the first of jax's warnings about
    its cache is shown.
    """
    warned_of_cache = False

    def show(message: Warning | str, *_: object, **__: object) -> None:
        nonlocal warned_of_cache
        text = str(message)
        if _CACHE_WARNING in text:
            if warned_of_cache:
                return
            warned_of_cache = True
            reason = text.partition("': ")[2]
            done = "read" if "reading" in text else "written"
            text = (
                f"the compilation cache has an entry that cannot be {done} ({format_message(reason)[:100]}):"
                " compiled without it; delete the cache's directory if this comes again"
            )
        status.log(f"{name}: {format_message(text)}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def log_on_terminal(name: str) -> Iterator[None]:
    """Within the block, log lines of the library appear on standard error: a warning in one line with the
    program's name, as Python's warnings, and other lines from the level INFO on as they are.
    """
    logger = logging.getLogger(_LIBRARY)
    level = logger.level
    propagates = logger.propagate
    handler = _StatusHandler(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else a handler of the root logger would write the line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _StatusHandler(logging.Handler):
    """Writes records above the status line."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_warning = record.levelno == logging.WARNING
        status.log(f"{self._name}: {format_message(text)}" if is_warning else text)


def discard_output(stream: TextIO | None) -> None:
    """Discards buffered output that cannot be written: else Python would fail on it again when it exits."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(text: str) -> None:
    """Writes to standard error. A failure to do so is ignored."""
    if sys.stderr is None or not text:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)
