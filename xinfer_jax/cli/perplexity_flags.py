"""The flags of `xinfer-jax perplexity` and scripts/perplexity.py. perplexity.py does the work, and jax is
imported with it.
"""

from pathlib import Path

from ..errors import InputError
from ..plugins import names
from .answer_flags import define_model
from .flag_parser import FlagParser
from .process import command_main
from .terminal import status

PARSER = FlagParser(
    "xinfer-jax perplexity",
    "Measure the perplexity of a checkpoint on a text, over sliding windows. The text is one sequence "
    "of tokens. Each token except the first is scored once, given all tokens before it in its window: "
    "at least window - stride tokens, if the text has that many (as in Hugging Face's guide to "
    "perplexity). A smaller stride is slower, and its windows give more context. The last line of the "
    "output is one JSON object.",
    "--text FILE [flags]",
    "--text TEXT.txt --model Qwen/Qwen2.5-0.5B-Instruct --window 2048 --stride 512",
)
PARSER.group = "text and windows"
PARSER.add_text("text", "File of UTF-8 text.", empty="give a file")
PARSER.add_integer(
    "window", "Tokens of a window. Default: 1024, or the model's context if that is smaller.", least=2
)
PARSER.add_integer(
    "stride", "Tokens from the start of one window to the next. Default: half a window.", least=1
)
PARSER.add_choice(
    "cache_dtype",
    "Score through a KV cache of this dtype. Default: without a cache.",
    *(*names("cache dtype"), "float32", "bfloat16", "float16"),
)
define_model(PARSER)


def _run() -> int:
    flags = PARSER.values
    if flags.text is None:
        raise InputError("no text: give --text=FILE (see --help)")
    text = Path(flags.text).expanduser().read_text(encoding="utf-8")
    if flags.window and flags.stride and flags.stride >= flags.window:
        raise InputError(f"--stride={flags.stride} must be less than --window={flags.window}: lower it")
    with status("loading jax"):
        from .perplexity import measure_perplexity
    return measure_perplexity(PARSER.name, flags, text)


main = command_main(PARSER, _run)
