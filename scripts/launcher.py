"""Starts the programs of this folder. They import it first: it finds the package in a checkout in which
xinfer_jax is not installed. From then on Ctrl-C ends the program with exit code 130, even during imports.
"""

import os
import sys
from pathlib import Path

from script_paths import ROOT, SCRIPTS

from xinfer_jax.cli import process

STARTED = Path(sys.argv[0])

if SCRIPTS in STARTED.resolve().parents:  # a test imports programs; it handles Ctrl-C itself
    process.install_signal_handlers()
    # For the processes that programs start.
    folders = [str(ROOT), str(SCRIPTS), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))

from collections.abc import Callable  # noqa: E402
from typing import NoReturn  # noqa: E402

from absl import app, flags, logging  # noqa: E402

from xinfer_jax.cli.terminal import status  # noqa: E402
from xinfer_jax.errors import InputError, format_message  # noqa: E402


def start(main: Callable[[list[str]], int | None]) -> None:
    """Parses the flags, runs `main` and exits. Bad input: one line on standard error that begins with the
    program's name, and exit code 2. Ctrl-C: exit code 130 at once.
    """

    def work(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # hides jax's messages about its search for backends
        process.run_interruptible(lambda: process.run_and_exit(STARTED.stem, lambda: main(argv)))

    app.run(work, flags_parser=parse)


def exit_with_error(error: Exception) -> NoReturn:
    """Prints one line on standard error and exits with code 2."""
    status.log(f"{STARTED.stem}: {format_message(error)}")
    sys.exit(2)


def parse(argv: list[str]) -> list[str]:
    """Parses the flags and returns the program's name: these programs take only flags. For a wrong flag it
    prints one line, not absl's page of help.
    """
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        exit_with_error(error)
    if len(rest) > 1:
        exit_with_error(InputError(f"unexpected argument {rest[1]!r}: everything is a flag"))
    return rest
