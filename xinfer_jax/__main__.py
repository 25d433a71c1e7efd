"""The processes: `xinfer-jax`, which `python -m xinfer_jax` is too, and those of the other commands."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # at once; `run` knows better what to do
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from .cli.process import run  # noqa: E402


def main() -> None:
    run(_main)


def chat() -> None:
    run(_chat)


def batch() -> None:
    run(_batch, signal.SIGTERM)


def serve() -> None:
    run(_serve, signal.SIGTERM)


def _main() -> None:
    from .cli import answer_flags  # only here: Ctrl-C is caught by now

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
