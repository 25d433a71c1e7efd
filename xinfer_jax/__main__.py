"""Entry points of the installed commands. `python -m xinfer_jax` is `xinfer-jax`."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `run_interruptible` replaces it
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from .cli.process import run_interruptible  # noqa: E402


def main() -> None:
    run_interruptible(_main)


def chat() -> None:
    run_interruptible(_chat)


def batch() -> None:
    run_interruptible(_batch, signal.SIGTERM)


def serve() -> None:
    run_interruptible(_serve, signal.SIGTERM)


def _main() -> None:
    from .cli import answer_flags  # imported here, after the signal handler is installed

    answer_flags.main(sys.argv)


def _chat() -> None:
    from .cli import chat_flags

    chat_flags.main(sys.argv)


def _batch() -> None:
    from .cli import batch_flags

    batch_flags.main(sys.argv)


def _serve() -> None:
    from .serve import command

    command.main(sys.argv)


if __name__ == "__main__":
    main()
