"""The flags of `xinfer-jax quantize` and scripts/quantize.py. quantize.py does the work, and jax is imported
with it.
"""

import re
from pathlib import Path

from ..errors import InputError
from .answer_flags import define_checkpoint
from .flag_parser import FlagParser
from .process import command_main
from .terminal import status

_W4A16 = "compressed-tensors"
_SAMPLED = "sampled"
_SEPARATOR = "<|endoftext|>"

PARSER = FlagParser(
    "xinfer-jax quantize",
    "Write a checkpoint with its matrices quantized to int8 or int4, and report the loss of quality. "
    "--model DIR of any command opens the result. The last line of the output is one JSON object.",
    "[flags]",
    "--model Qwen/Qwen2.5-0.5B-Instruct --output DIR --quantize int4 --eval sampled",
)
PARSER.group = "checkpoints"
define_checkpoint(PARSER)
PARSER.add_text("output", "Directory to write to. Default: only report.", empty="give a directory")
PARSER.add_choice(
    "format",
    "xinfer_jax: files that only this library reads. compressed-tensors: W4A16 files, also for transformers;"
    " they are for --quantize=int4, rounded to nearest around 0, also after awq's scales, and the vocabulary"
    " stays float.",
    "xinfer_jax", _W4A16, default="xinfer_jax",
)  # fmt: skip
PARSER.group = "quantization"
PARSER.add_choice("quantize", "Format of the weights.", "int8", "int4", default="int4")
PARSER.add_integer(
    "group",
    "Number of inputs that share a scale, even. Default: int8: all inputs of an output; int4: 64; small"
    " matrices: 8 and 32.",
    least=2,
)
PARSER.add_choice(
    "method",
    "rtn: round to nearest. awq: scale by activations (Lin et al. 2023), refit, and round so that errors"
    " compensate each other.",
    "rtn", "awq", default="awq",
)  # fmt: skip
PARSER.add_choice(
    "activations",
    "Also quantize the inputs of matrix products; --quantize=int8 then has no --group. Inputs are rotated in"
    " blocks (QuaRot, Ashkboos et al. 2024) against outliers, instead of AWQ's scales.",
    "int8",
)
PARSER.group = "texts"
PARSER.add_text(
    "calibration",
    f"Texts for awq: a file of UTF-8 text, with lines {_SEPARATOR} between its documents; or {_SAMPLED}:"
    " texts that the model itself samples at temperature 1.",
    empty="give a file",
    default=_SAMPLED,
)
PARSER.add_text(
    "eval",
    f"Report perplexity and top-1 agreement with float32 on such texts. {_SAMPLED}: with another seed. Texts"
    " of --calibration are left out.",
    empty="give a file",
)


def _run() -> int:
    flags = PARSER.values
    if flags.group is not None and flags.group % 2:
        raise InputError(f"--group={flags.group}: give an even number of inputs")
    if flags.activations and flags.quantize == "int8" and flags.group is not None:
        raise InputError(
            f"--group={flags.group} does not go with --quantize=int8 --activations=int8, which have one"
            " scale for all inputs of an output: leave out --group"
        )
    if flags.format == _W4A16 and (flags.quantize != "int4" or flags.activations):
        raise InputError(
            f"--format={_W4A16} is for --quantize=int4 without --activations: leave out one of them"
        )
    texts = {name: _documents(flags[name].value) for name in ("calibration", "eval")}
    with status("loading jax"):
        from .quantize import quantize_checkpoint
    return quantize_checkpoint(flags, **texts)


main = command_main(PARSER, _run)


def _documents(source: str | None) -> list[str] | None:
    """Returns the documents of a file, or None if the model samples them, or if none are wanted."""
    if source in (None, _SAMPLED):
        return None
    text = Path(source).expanduser().read_text(encoding="utf-8")
    parts = re.split(rf"^{re.escape(_SEPARATOR)}\n", text, flags=re.MULTILINE)
    return [part for part in parts if part.strip()]
