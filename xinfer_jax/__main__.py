"""Entry points of the installed commands. `python -m xinfer_jax` is `xinfer-jax`."""

import os
import signal
import sys
from importlib import import_module

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `run_interruptible` replaces it
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from .cli.process import run_interruptible


def main() -> None:
    _run("cli.answer_flags")


def chat() -> None:
    _run("cli.chat_flags")


def batch() -> None:
    _run("cli.batch_flags", signal.SIGTERM)


def serve() -> None:
    _run("serve.command", signal.SIGTERM)


def _run(module: str, *signals: signal.Signals) -> None:
    """Runs a command, whose module is imported after the signal handlers are installed."""
    run_interruptible(lambda: import_module(f".{module}", __package__).main(sys.argv), *signals)


if __name__ == "__main__":
    main()
