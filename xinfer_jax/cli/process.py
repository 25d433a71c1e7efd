"""Running a command: Ctrl-C ends it at once, bad input is one line on standard error and exit code 2.

Python runs signal handlers in the main thread alone, and not while XLA compiles there. So the work is done in
a second thread, and the main thread waits.
"""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from ..errors import InputError, format_message
from .terminal import discard_output, log_on_terminal, one_line_warnings, restore_terminal, status, write

_STARTED = time.monotonic()
_STACK = 64 << 20  # bytes; the main thread has 8 MiB and more, another may have 512 KiB
_captures: list["SignalEvent"] = []  # of `capture_signals`; the last one gets a signal first


class SignalEvent(threading.Event):
    """An event that a signal sets."""

    number = 0  # of the signal


def seconds_since_start() -> float:
    """Returns the seconds since a command imported this module, which it does first."""
    return time.monotonic() - _STARTED


def run_interruptible(program: Callable[[], object], *signals: signal.Signals) -> None:
    """Runs a program in a second thread and ends the process with its exit code. It ends at once with 130 at
    Ctrl-C, and with 128 plus its number at one of the further signals.
    """
    install_signal_handlers(*signals)
    _fill_closed_streams()
    raised = []

    def work() -> None:
        try:
            program()
        except BaseException as error:  # SystemExit too: in this thread it would not end the process
            raised.append(error)

    before = threading.stack_size(_STACK)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    threading.stack_size(before)
    while worker.is_alive():
        worker.join(0.1)  # with a limit: a signal that reaches another thread does not wake this one
    if raised and isinstance(raised[0], SystemExit) and isinstance(raised[0].code, int):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, full, or None
                stream.flush()
        os._exit(raised[0].code)  # the shutdown of jax takes up to 0.7 s
    if raised:
        raise raised[0]


def install_signal_handlers(*signals: signal.Signals) -> None:
    """Installs handlers, so that Ctrl-C ends the process with exit code 130, and the given signals end it
    with 128 plus their number. A signal that was ignored, for example in a background job, stays ignored.
    """
    for number in (signal.SIGINT, *signals):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle_signal)


@contextmanager
def capture_signals() -> Iterator[SignalEvent]:
    """Within, the first signal sets this event instead of ending the process."""
    event = SignalEvent()
    _captures.append(event)
    try:
        yield event
    finally:
        _captures.remove(event)


@contextmanager
def uncaptured(event: SignalEvent) -> Iterator[None]:
    """Within, a signal ends the process again, although `capture_signals` gave this event."""
    _captures.remove(event)
    try:
        yield
    finally:
        _captures.append(event)


def _handle_signal(number: int, _: object) -> None:
    unset = [event for event in _captures if not event.is_set()]
    if unset:
        unset[-1].number = number
        unset[-1].set()
        return
    with suppress(RuntimeError):  # Python is exiting, and no thread can start
        # In a thread, since the reader of standard output, or the terminal, may have stopped.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(0.2)
    status.close()
    os._exit(128 + number)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        restore_terminal()
        sys.stdout.flush()


def _fill_closed_streams() -> None:
    """Opens /dev/null for closed standard streams: else the next file would get such a descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # print(file=None) would write to standard output


def command_main(parser: Any, work: Callable[[], int]) -> Callable[..., NoReturn]:
    """Returns the `main` of a command: parses the flags, does the work, and exits as `run_and_exit`."""

    def main(argv: Sequence[str] | None = None) -> NoReturn:
        def run() -> int:
            parser.parse(sys.argv if argv is None else argv)
            try:
                return work()
            except InputError as error:
                raise InputError(parser.with_flag_names(error)) from error

        run_and_exit(parser.name, run)

    return main


def run_and_exit(name: str, work: Callable[[], int | None]) -> NoReturn:
    """Does the work and exits with one of these codes:

    - The result of `work` (None: 0).
    - 2, with one line on standard error, for bad input, a file or stream that fails, or too little memory.
    - 1 if the reader of the answer has gone.
    - 130 at Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding does not have is printed as "?".
        sys.stdout.reconfigure(errors="replace")
    with one_line_warnings(name), log_on_terminal(name):
        try:
            if sys.stdout is None:
                raise InputError("standard output is closed: there is nowhere to write the answer to")
            code = work() or 0
            write("")  # flushes what was printed without `write`
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:  # the reader has gone: an error line would reach nobody
            code = 1
        except Exception as error:
            if (reason := _user_error(error)) is None:
                raise
            status.log(f"{name}: {format_message(reason)}")
            code = 2
    discard_output(sys.stdout)
    sys.exit(code)


def _user_error(error: Exception) -> str | None:
    """Returns the message for an error that the user can correct, or None for a bug."""
    text = str(error)
    if isinstance(error, InputError):
        return text
    if isinstance(error, OSError | UnicodeDecodeError):  # an unreadable file, a full disk, no UTF-8
        return f"{type(error).__name__}: {text}"
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return (
            f"out of memory ({text[:150] or 'an allocation failed'}): ask for less at a time, or for weights,"
            " keys and values in fewer bytes"
        )
    if isinstance(error, RuntimeError) and "nable to initialize backend" in text:
        return f"{text}: see JAX_PLATFORMS"
    return None
