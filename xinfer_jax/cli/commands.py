"""The subcommands of `xinfer-jax`. Only the standard library is imported, so that Ctrl-C is handled early."""

import difflib
import signal
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand."""

    module: str  # of the library; it has the flags (`PARSER`) and `main`
    about: str
    signals: tuple[signal.Signals, ...] = ()  # that end it with a grace time, or at once, as Ctrl-C does


DEFAULT = "generate"
COMMANDS = {
    "generate": Command("cli.answer_flags", "Answer one prompt; `xinfer-jax --prompt TEXT` does it too."),
    "chat": Command("cli.chat_flags", "Chat with a model in the terminal."),
    "serve": Command("serve.command", "Serve the OpenAI API, and a chat page, over HTTP.", (signal.SIGTERM,)),
    "batch": Command("cli.batch_flags", "Answer a file of prompts.", (signal.SIGTERM,)),
    "quantize": Command("cli.quantize_flags", "Write a checkpoint with weights in int8 or int4."),
    "plan": Command("cli.plan_flags", "Say how much memory a model takes on GPUs and TPUs, and if it fits."),
    "perplexity": Command("cli.perplexity_flags", "Measure the perplexity of a model on a text."),
    "bench": Command("cli.bench_flags", "Time a model on this machine: prefill, decode and an engine."),
}


def overview() -> str:
    """Returns the lines of --help about the subcommands."""
    names = "".join(f"  {name:<12}{command.about}\n" for name, command in COMMANDS.items())
    return f"commands (`xinfer-jax COMMAND --help` lists the flags of a command):\n{names}"


def unknown_command(name: str) -> str:
    """Returns the error for a subcommand that does not exist, with the list of the subcommands that do."""
    close = difflib.get_close_matches(name[:50], COMMANDS, 1)
    meant = f"did you mean {close[0]!r}?" if close else "give one of these, or a prompt by --prompt TEXT:"
    shown = name if len(name) <= 100 else f"{name[:100]} …"
    return f"xinfer-jax: there is no command {shown!r}: {meant}\n{overview()}"
