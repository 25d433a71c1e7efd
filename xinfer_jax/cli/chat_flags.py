"""`xinfer-jax-chat` and scripts/chat.py: flags. chat.py does the work; jax is imported with it."""

import sys
from collections.abc import Sequence

from ..errors import InputError
from .answer_flags import define_escaping, define_model, define_temperature
from .process import finish
from .program import Program
from .terminal import status

PROGRAM = Program(
    "xinfer-jax-chat",
    "Talk to a model: the cache is kept from turn to turn, so each turn reads only what is new.\n"
    "An empty line or /exit ends the talk, /reset forgets it, /stats switches figures on and off.\n"
    "Ctrl-C stops an answer; twice, or at the prompt, it ends the talk.",
    "xinfer-jax-chat [flags]",
    "xinfer-jax-chat --model Qwen/Qwen2.5-0.5B-Instruct --quantize int8",
)
PROGRAM.text("system", "System message.")
define_escaping(PROGRAM)
PROGRAM.integer("max_tokens", "Most tokens of an answer.", default=256, least=1)
PROGRAM.integer("capacity", "Tokens that the talk may reach. Default: 4096, or the model's limit.", least=2)
define_temperature(PROGRAM)
define_model(PROGRAM)
PROGRAM.switch("stats", "Print what each answer cost.")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in this thread and exits: 0 at the end of the talk, 2 with one line on standard error
    where the input is at fault. `__main__.chat` is the process, which minds Ctrl-C too.
    """
    finish(PROGRAM.name, lambda: _run(sys.argv if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    PROGRAM.parse(argv)
    new = PROGRAM.values.max_tokens
    capacity = PROGRAM.values.capacity
    if capacity is not None and capacity <= new:
        where = f"a --capacity of {capacity}"
        raise InputError(f"--max_tokens={new} leaves no room for a question in {where}: lower it")
    with status("loading jax"):
        from ..generation.programs import settle
        from .chat import talk
    try:
        return talk(PROGRAM.values)
    finally:
        settle()
