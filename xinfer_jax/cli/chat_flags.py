"""The flags of `xinfer-jax-chat` and scripts/chat.py. chat.py does the work, and jax is imported with it."""

from ..errors import InputError
from .answer_flags import (
    HEAD_OR_MODEL,
    check_draft,
    check_grammar,
    define_adapter,
    define_draft,
    define_escaping,
    define_grammar,
    define_model,
    define_sampling,
    define_seed,
)
from .flag_parser import FlagParser
from .process import command_main
from .terminal import status

PARSER = FlagParser(
    "xinfer-jax-chat",
    "Chat with a model. The KV cache is reused, so each turn prefills only its new tokens.\n"
    "An empty line or /exit ends the chat, /reset starts a new one, /stats switches statistics on and off.\n"
    "Ctrl-C stops an answer; twice, or at the prompt, it ends the chat.",
    "[flags]",
    "--model Qwen/Qwen2.5-0.5B-Instruct --quantize int8",
)
PARSER.group = "chat"
PARSER.add_text("system", "System message.")
define_escaping(PARSER)
PARSER.add_integer("max_tokens", "Most tokens of an answer.", default=256, least=1)
PARSER.add_integer("capacity", "Most tokens of the chat. Default: 4096, or the model's limit.", least=2)
PARSER.add_switch("stats", "Print statistics of each answer.")
define_sampling(PARSER)
define_seed(PARSER)
define_grammar(PARSER)
PARSER.group = "speculative decoding"
define_draft(PARSER, HEAD_OR_MODEL, with_tokens=True)
define_model(PARSER)
define_adapter(PARSER)


def _run() -> int:
    check_grammar(PARSER)
    check_draft(PARSER)
    new = PARSER.values.max_tokens
    capacity = PARSER.values.capacity
    if capacity is not None and capacity <= new:
        raise InputError(
            f"--max_tokens={new} leaves no tokens for a question in a --capacity of {capacity}: lower it"
        )
    with status("loading jax"):
        from ..layerwise.precompile import stop_compiling
        from .chat import chat_loop
    try:
        return chat_loop(PARSER.name, PARSER.values)
    finally:
        stop_compiling()


main = command_main(PARSER, _run)
