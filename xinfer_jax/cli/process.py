"""What a command line owes whoever started it: Ctrl-C ends it at once, bad input is one line and exit code 2.

Python's signal handlers run in the main thread alone, and not while XLA compiles there: the work is done in a
second thread, and the main one waits.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ..errors import InputError, one_line
from .terminal import let_go, one_line_warnings, status, write

_STACK = 64 << 20  # bytes; the main thread has 8 MiB and more, another may have 512 KiB
_told: list["Told"] = []  # who hears of Ctrl-C first; a signal belongs to the process


class Told(threading.Event):
    """Set at a signal.

    Attributes:
        number: which it was.
    """

    number = 0


def run(program: Callable[[], object], *signals: signal.Signals) -> None:
    """Runs a program in a second thread, and ends the process as that ends, or with 130 at Ctrl-C, 128 + its
    number at one of further signals; at once, whatever else is under way.
    """
    catch_interrupts(*signals)
    _fill_closed_streams()
    raised = []

    def work() -> None:
        try:
            program()
        except BaseException as error:  # SystemExit too: this thread's end is not the process's
            raised.append(error)

    before = threading.stack_size(_STACK)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    threading.stack_size(before)
    while worker.is_alive():
        worker.join(0.1)  # a signal may reach another thread, and does not wake this one then
    if raised and isinstance(raised[0], SystemExit) and isinstance(raised[0].code, int):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, full, or none at all
                stream.flush()
        os._exit(raised[0].code)  # taking jax and gigabytes of weights down piece by piece takes up to 0.7 s
    if raised:
        raise raised[0]


def catch_interrupts(*signals: signal.Signals) -> None:
    """From now on Ctrl-C ends the process with 130; where it was ignored (a job in the background) it still
    is. Further signals likewise.
    """
    for number in (signal.SIGINT, *signals):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)


@contextmanager
def told_first() -> Iterator[Told]:
    """Within, the first signal sets this event instead of ending the process."""
    event = Told()
    _told.append(event)
    try:
        yield event
    finally:
        _told.remove(event)


def _interrupted(number: int, _: object) -> None:
    waiting = [event for event in _told if not event.is_set()]
    if waiting:
        waiting[-1].number = number
        waiting[-1].set()
        return
    with suppress(RuntimeError):  # Python is ending: no thread starts any more
        # In a thread, for whoever should read us may have stopped reading.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(0.2)
    status.close()
    os._exit(128 + number)


def _flush() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()


def _fill_closed_streams() -> None:
    """Takes the places of standard streams that are closed, or the next file that is opened would: XLA's
    messages went into it.
    """
    while (place := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(place)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # print takes None for standard output


def finish(name: str, work: Callable[[], int | None]) -> NoReturn:
    """Does the work and exits: with what it returns (None: 0); with one line on standard error and 2 where
    the input, a file, a stream or the memory is at fault; with 1 where nobody reads the answer; with 130 at
    Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is shown as ?
        sys.stdout.reconfigure(errors="replace")
    with one_line_warnings(name):
        try:
            if sys.stdout is None:
                raise InputError("standard output is closed: there is nowhere to write the answer to")
            code = work() or 0
            write("")  # what was only printed has to arrive too
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:  # whoever reads us has gone; nobody is left to tell
            code = 1
        except Exception as error:
            if (reason := _reason(error)) is None:
                raise
            status.say(f"{name}: {one_line(reason)}")
            code = 2
    let_go(sys.stdout)
    sys.exit(code)


def _reason(error: Exception) -> str | None:
    """What to say of an error that whoever calls can mend; None: it is a fault of ours."""
    text = str(error)
    if isinstance(error, InputError):
        return text
    if isinstance(error, OSError | UnicodeDecodeError):  # an unreadable file, a full disk, no UTF-8
        return f"{type(error).__name__}: {text}"
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text:
        return (
            f"out of memory ({text[:150] or 'no more is granted'}): ask for less at a time, or for weights,"
            " keys and values in fewer bytes"
        )
    if isinstance(error, RuntimeError) and "nable to initialize backend" in text:
        return f"{text}: see JAX_PLATFORMS"
    return None
