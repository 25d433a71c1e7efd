"""Entry points of the installed commands. `python -m xinfer_jax` is `xinfer-jax`."""

import os
import signal
import sys
from importlib import import_module

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `run_interruptible` replaces it
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from .cli.commands import COMMANDS, DEFAULT, overview, unknown_command
from .cli.process import run_and_exit, run_interruptible
from .cli.terminal import status

_HELP = {"--help", "-help", "-h", "--h"}


def main() -> None:
    """Runs `xinfer-jax COMMAND [flags]`, or `xinfer-jax [flags]` for `generate`."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] in COMMANDS:
            _run(arguments[0], f"xinfer-jax {arguments[0]}", arguments[1:])
        else:
            run_interruptible(lambda: run_and_exit("xinfer-jax", _reject))
    else:
        _run(DEFAULT, "xinfer-jax", arguments, "" if _HELP.isdisjoint(arguments) else f"{overview()}\n")


def chat() -> None:
    _run("chat", "xinfer-jax-chat", sys.argv[1:])


def batch() -> None:
    _run("batch", "xinfer-jax-batch", sys.argv[1:])


def serve() -> None:
    _run("serve", "xinfer-jax-serve", sys.argv[1:])


def run_subcommand(command: str) -> None:
    """Runs a subcommand with the arguments of this process, as the programs in scripts/ do."""
    _run(command, f"xinfer-jax {command}", sys.argv[1:])


def _run(command: str, name: str, arguments: list[str], heading: str = "") -> None:
    """Runs a command, whose module is imported after the signal handlers are installed. name: the name in its
    errors and in --help. heading: a text that is printed first.
    """
    module, _, signals = COMMANDS[command]

    def work() -> None:
        program = import_module(f".{module}", __package__)
        program.PARSER.name = name
        program.PARSER.heading = heading
        program.main([name, *arguments])

    run_interruptible(work, *signals)


def _reject() -> int:
    status.log(unknown_command(sys.argv[1]).rstrip())
    return 2


if __name__ == "__main__":
    main()
