"""The flags of `xinfer-jax`, `python -m xinfer_jax` and scripts/generate.py, and their checks. answer.py does
the work. It and jax are imported once the flags are right.
"""

import dataclasses
import re
import sys
from collections.abc import Iterable
from typing import Any

from ..engine.engine_options import EngineOptions, option_texts
from ..errors import InputError, format_value
from ..plugins import names
from ..processes.launcher import distributed_args
from ..sampling.settings import SETTINGS
from .flag_parser import FlagParser
from .process import command_main
from .process_group import define_processes, supervise
from .terminal import status

PARSER = FlagParser(
    "xinfer-jax",
    "Text in, text out with a Hugging Face checkpoint.",
    "--prompt TEXT [flags]",
    '--prompt "What is the capital of France?" --temperature 0.7 --seed 1',
)
GRAMMAR_FLAGS = ("json_schema", "regex", "choice")
HEAD_OR_MODEL = "a draft head, or by a model with the same vocabulary"  # files that draft
_CACHE_DTYPES = (*names("cache dtype"), "float32", "bfloat16", "float16")
_MAX_PROMPT = 2**25  # characters of standard input, beyond any model's context

# The range of numbers within float32, and its words in an error.
_FINITE = (lambda x: abs(x) < 3.4e38, "that is finite")


def define_checkpoint(parser: FlagParser, default: str = "the bundled one") -> None:
    """Defines flags that name a checkpoint."""
    parser.add_text(
        "model",
        "Checkpoint: a directory, or a Hugging Face hub name owner/name or owner/name@revision."
        f" Default: {default}.",
        empty="give a directory or a hub name",
    )
    parser.add_text(
        "revision",
        "Branch, tag or commit of --model=owner/name. Default: the default branch.",
        empty="give a branch, a tag or a commit",
    )


def define_model(parser: FlagParser) -> None:
    """Defines flags of the model, which most commands have."""
    parser.group = "model"
    define_checkpoint(parser)
    parser.add_choice(
        "dtype",
        "float32, bfloat16 or float16. Default: float32 on CPU; bfloat16 on GPU and TPU, and of FP8 files.",
        "float32", "bfloat16", "float16",
    )  # fmt: skip
    parser.add_choice(
        "quantize",
        "int8 or int4: weights in fewer bytes; fp8: a file in FP8 stays so. Default: as --dtype says.",
        "int8", "int4", "fp8",
    )  # fmt: skip
    parser.add_switch(
        "dequantize", "Matrices of a quantized checkpoint become numbers of --dtype, or of --quantize."
    )
    parser.add_choice(
        "activations", "int8, with --quantize: faster prompts and batches on CPU, less exact.", "int8"
    )
    parser.add_text("mesh", "model=N: shards the model over N devices. Default: one.", empty="give model=N")
    parser.add_text(
        "compilation_cache",
        "Directory for compiled programs of earlier runs; empty: none. Default: the user's cache directory.",
    )


def define_adapter(parser: FlagParser) -> None:
    parser.add_text(
        "adapter", "LoRA adapter: a directory as PEFT saves it, or a hub name.", empty="give a directory"
    )


def define_cache_dtype(parser: FlagParser, dtypes: Iterable[str]) -> None:
    text = "Keys and values in fewer bytes, or a float type. Default: float32 on CPU."
    parser.add_choice("cache_dtype", text, *dtypes)


def define_engine(parser: FlagParser) -> None:
    """Defines flags of the size of an engine, for commands that have one."""
    parser.group = "engine"
    syntax = "numbers, as 0 or 0,1: an engine on each; 0+1: a mesh"
    parser.add_text("prefill_devices", f"Devices that prefill prompts: {syntax}.", "give numbers of devices")
    parser.add_text("decode_devices", "The same, of the devices that decode.", "give numbers of devices")
    texts = option_texts()
    for field in dataclasses.fields(EngineOptions):
        if field.metadata["flag"]:
            text = texts[field.name].replace("`", "")
            if field.name == "draft":
                define_draft(parser)
            else:
                parser.add_option(field, text[:1].upper() + text[1:])
    define_kernels(parser)
    define_cache_dtype(parser, (name for name in _CACHE_DTYPES if name != "gear"))
    parser.add_texts(
        "adapter",
        "NAME=PATH: a LoRA adapter that requests may name; a directory or a hub name; may be given several"
        " times.",
        "give NAME=PATH",
    )


def define_draft(parser: FlagParser, head: str = "a draft head", with_tokens: bool = False) -> None:
    """Defines the flag that names the source of draft tokens.

    Args:
        parser: the parser of a command.
        head: the kinds of files that the flag may name.
        with_tokens: True also defines the flag for the number of draft tokens.
    """
    parser.add_text(
        "draft",
        "Speculative decoding: lookup drafts tokens from the text, mtp by the head in the files of --model, a"
        f" directory or a hub name by {head}. Default: none.",
        empty="give lookup, mtp, a directory or a hub name",
    )
    if with_tokens:
        text = "Draft tokens for each pass of the model."
        parser.add_integer("draft_tokens", text, default=3, least=1, most=16)


def check_draft(parser: FlagParser) -> None:
    """Raises InputError if a number of draft tokens is given without their source."""
    values = parser.values
    if parser.is_set("draft_tokens") and values.draft in (None, "none"):
        raise InputError(f"--draft_tokens={values.draft_tokens} does nothing without --draft: give that too")


def define_kernels(parser: FlagParser, *more: str) -> None:
    """Defines the flag that names kernels. more: implementations in addition to the devices'
    implementations.
    """
    parser.add_choice(
        "impl",
        "Kernels of attention and argmax: mosaic, triton, tpu or xla. Default: the best for the device.",
        *("mosaic", "triton", "tpu", "xla", *more),
    )


def engine_options(flags: Any) -> EngineOptions:
    """Returns the options of an engine that its flags give."""
    names = [field.name for field in dataclasses.fields(EngineOptions) if field.name in flags]
    given = {name: flags[name].value for name in names}
    given |= {name: parse_devices(name, given[name]) for name in ("prefill_devices", "decode_devices")}
    draft: Any = None if flags.draft == "none" else flags.draft
    return EngineOptions(**given | dict(adapters=_adapters(flags.adapter), draft=draft))


def parse_devices(name: str, text: str | None) -> list[int | list[int]] | None:
    """Returns the devices that a flag of this name lists: 0,1 are two, 0+1 is a mesh of two. None: no
    flag.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,5}([,+]\d{1,5})*", text):
        raise InputError(f"--{name}={format_value(text)} is not like 0,1 or 0+1,2+3: give numbers of devices")
    groups = [[int(number) for number in part.split("+")] for part in text.split(",")]
    return [group if len(group) > 1 else group[0] for group in groups]


def _adapters(texts: list[str]) -> dict[str, str]:
    """Returns the paths of --adapter, by name."""
    found: dict[str, str] = {}
    for text in texts:
        (name, equals, path) = text.partition("=")
        if not (name.strip() and equals and path) or name in found:
            problem = "names an adapter twice" if name in found else "is not NAME=PATH"
            raise InputError(f"--adapter={text} {problem}: give each adapter a name of its own")
        found[name] = path
    return found


def define_escaping(parser: FlagParser) -> None:
    parser.add_switch("escape_control_tokens", "Text of messages never becomes a control token.", True)


def define_seed(parser: FlagParser) -> None:
    parser.group = "sampling"
    parser.add_integer("seed", "Seed of sampling.", default=0, most=2**32 - 1)


def define_sampling(parser: FlagParser) -> None:
    """Defines flags of the sampling settings."""
    parser.group = "sampling"
    for setting in SETTINGS.values():
        if setting.help:
            parser.add_setting(setting)
    parser.add_switch(
        "generation_config", "Use the defaults of the checkpoint's generation_config.json.", True
    )


def define_grammar(parser: FlagParser) -> None:
    """Defines the flags that constrain an answer. At most one of them is given."""
    parser.group = "structured output"
    parser.add_text(
        "json_schema", "Answers are JSON that is valid for the schema in this file.", empty="give a file"
    )
    parser.add_text("regex", "Answers match this regular expression as a whole.", empty="give an expression")
    parser.add_texts("choice", "Answers are this text; given several times: one of them.", "give some text")


def check_grammar(parser: FlagParser) -> None:
    """Raises InputError if several flags constrain an answer."""
    given = [f"--{name}" for name in GRAMMAR_FLAGS if parser.is_set(name)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both constrain the answer: leave out all but one")


def _define_decoding(parser: FlagParser) -> None:
    parser.group = "decoding"
    parser.add_texts(
        "stop", "The answer ends before this text; may be given several times.", "give some text"
    )
    parser.add_integer(
        "logprobs", "Print the probability of each token, and of this many of the most likely ones.", 0
    )
    define_draft(parser, HEAD_OR_MODEL, with_tokens=True)
    beams = "Beam search: number of beams; 1: none."
    parser.add_integer("num_beams", beams, default=1, least=1, most=256)
    exponent = "With beams: scores are divided by the length to this power."
    parser.add_number("length_penalty", exponent, *_FINITE, default=1.0)
    parser.add_choice(
        "early_stopping",
        "With beams, when to stop. true: at num_beams ended sequences; false: when the best beam is not"
        " better than they are; never: when it cannot become better.",
        "true", "false", "never", default="false",
    )  # fmt: skip


PARSER.group = "prompt and answer"
PARSER.add_text("prompt", "The prompt. Default: standard input.")
PARSER.add_text("system", "System message.")
PARSER.add_switch("raw", "Continue the prompt as it is, without the chat template.")
define_escaping(PARSER)
PARSER.add_integer("max_tokens", "Most tokens to generate.", default=128, least=1)
define_sampling(PARSER)
define_seed(PARSER)
_define_decoding(PARSER)
define_grammar(PARSER)
define_model(PARSER)
define_adapter(PARSER)
define_processes(PARSER)
PARSER.group = "cache, kernels and output"
define_cache_dtype(PARSER, _CACHE_DTYPES)
define_kernels(PARSER, "interpret", "interpret_tpu")
PARSER.add_switch("use_cache", "Use a KV cache; false: recompute all for every token, for comparison.", True)
PARSER.add_switch(
    "verbose", "Print on standard error the implementation of each kernel, and the reason for it."
)
PARSER.add_choice(
    "output", "text: stream the answer, statistics on standard error; json: one object with everything.",
    "text", "json", default="text",
)  # fmt: skip


def _run() -> int:
    _check_combinations(PARSER)
    if (code := supervise(PARSER)) is not None:
        return code
    prompt: str | None = PARSER.values.prompt
    if prompt is None and not distributed_args().get("process_id"):
        prompt = _standard_input()
    if prompt is not None and not prompt.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    with status("loading jax"):
        from ..layerwise.precompile import stop_compiling
        from .answer import answer_prompt
    try:
        return answer_prompt(PARSER.values, prompt)
    finally:
        stop_compiling()


main = command_main(PARSER, _run)


def _check_combinations(parser: FlagParser) -> None:
    """Raises InputError if flags contradict each other, or one has no effect."""
    values = parser.values
    beams = parser.values.num_beams
    for_beams = ("length_penalty", "early_stopping")
    for_one = ("stop", "logprobs", "draft", "use_cache", *GRAMMAR_FLAGS)
    check_grammar(parser)
    for flag in for_beams if beams == 1 else for_one:
        if parser.is_set(flag):
            raise InputError(f"--{flag} does not go with --num_beams={beams}: leave one of them out")
    for flag in ("draft", "cache_dtype", *GRAMMAR_FLAGS):
        if parser.is_set(flag) and not values.use_cache:
            raise InputError(f"--{flag} needs the cache: leave out --nouse_cache or --{flag}")
    check_draft(parser)
    if values.raw and values.system is not None:
        raise InputError(
            "--raw takes the prompt as it is, without the system message: leave out --raw or --system"
        )


def _standard_input() -> str:
    try:
        text = sys.stdin.read(_MAX_PROMPT + 1) if sys.stdin else ""
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise InputError(f"standard input is not {error.encoding} text: {where}") from error
    if len(text) > _MAX_PROMPT:
        raise InputError(f"standard input has more than {_MAX_PROMPT} characters: give a shorter prompt")
    return text.rstrip("\n")
