"""What the programs beside it have in common. It comes first among their imports: it finds the package in a
checkout where it is not installed, and Ctrl-C while the rest is imported ends them with 130.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
STARTED = Path(sys.argv[0])
sys.path.insert(1, str(HERE.parent))

from xinfer_jax.cli import process  # noqa: E402

if HERE in STARTED.resolve().parents:  # not where a test imports a program
    process.catch_interrupts()
    # For the processes that programs start.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[1], os.environ.get("PYTHONPATH")]))

from collections.abc import Callable  # noqa: E402
from typing import NoReturn  # noqa: E402

from absl import app, flags, logging  # noqa: E402

from xinfer_jax.cli.terminal import status  # noqa: E402
from xinfer_jax.errors import InputError, one_line  # noqa: E402


def start(main: Callable[[list[str]], int | None]) -> None:
    """Reads the flags, runs a program and exits: 2 with one line on standard error that begins with the
    program's name where the input is at fault, 130 at once at Ctrl-C.
    """

    def work(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # not jax's search for back ends
        process.run(lambda: process.finish(STARTED.stem, lambda: main(argv)))

    app.run(work, flags_parser=parse)


def refuse(error: Exception) -> NoReturn:
    status.say(f"{STARTED.stem}: {one_line(error)}")
    sys.exit(2)


def parse(argv: list[str]) -> list[str]:
    """The program's name; these programs take flags alone. absl would print a page about a wrong one."""
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        refuse(error)
    if len(rest) > 1:
        refuse(InputError(f"unexpected argument {rest[1]!r}: everything is a flag"))
    return rest
