"""What the programs beside it have in common. It comes first among their imports: it finds the package in a
checkout where it is not installed, and Ctrl-C while the rest is imported ends them with 130.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

from xinfer_jax import process, terminal  # noqa: E402
from xinfer_jax.errors import InputError, one_line  # noqa: E402

NAME = Path(sys.argv[0]).stem
if Path(sys.argv[0]).resolve().parent == HERE:  # not where a test imports a program
    process.catch_interrupts()


def start(main: Callable[[list[str]], int | None]) -> None:
    """Reads the flags, runs a program and exits: 2 with one line on standard error that begins with the
    program's name where the input is at fault, 130 at once at Ctrl-C.
    """

    def work(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # not jax's search for back ends
        process.run(lambda: process.finish(NAME, lambda: main(argv)))

    app.run(work, flags_parser=parse)


def refuse(error: Exception) -> NoReturn:
    terminal.status.say(f"{NAME}: {one_line(error)}")
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
