"""`xinfer-jax`, `python -m xinfer_jax` and scripts/generate.py: flags, and what is wrong with them. answer.py
does the work; jax is imported with it, once the flags are right.
"""

import sys
from collections.abc import Sequence

from ..errors import InputError
from .group import define_processes
from .process import finish
from .program import Program
from .terminal import status
from .watch import child, watch

PROGRAM = Program(
    "xinfer-jax",
    "Text in, text out with a Hugging Face checkpoint.",
    "xinfer-jax --prompt TEXT [flags]",
    'xinfer-jax --prompt "What is the capital of France?" --temperature 0.7 --seed 1',
)
_MOST_TEXT = 2**25  # characters of standard input, beyond any model's context

# Ranges of numbers, as float32 holds them, and how a refusal says them.
_PART = (lambda x: 0 < x <= 1, "above 0 and at most 1")
_PENALTY = (lambda x: abs(x) <= 1e30, "from -1e30 to 1e30")
_FINITE = (lambda x: abs(x) < 3.4e38, "that is finite")
_POSITIVE = (lambda x: 0 <= x < 3.4e38, "of 0 or above")


def define_model(program: Program) -> None:
    """Which model: the flags that commands share."""
    program.text(
        "model", "Checkpoint: a directory, or a Hugging Face hub name owner/name. Default: the bundled one.",
        empty="give a directory or a hub name",
    )  # fmt: skip
    program.choice(
        "dtype", "float32, bfloat16 or float16. Default: float32 on CPU, bfloat16 on GPU and TPU.",
        "float32", "bfloat16", "float16",
    )  # fmt: skip
    program.choice(
        "quantize", "int8 or int4: weights in fewer bytes. Default: as --dtype says.", "int8", "int4"
    )
    program.choice(
        "activations",
        "int8, with --quantize=int8: prompts and batches are faster on CPU, and less exact.",
        "int8",
    )
    program.text("mesh", "model=N: the model lies over N devices. Default: one.", empty="give model=N")
    program.text(
        "compilation_cache",
        "Directory that keeps compiled programs between runs; empty: none. Default: the user's cache"
        " directory.",
    )


def define_engine(program: Program) -> None:
    """The shape of an engine, for commands that have one."""
    program.integer("data_parallel", "Engines, each on devices of its own.", default=1, least=1)
    program.integer("rows", "Answers that are decoded at a time, by each engine.", default=8, least=1)
    program.integer(
        "capacity", "Tokens of a prompt and its answer. Default: 4096, or the model's limit.", least=2
    )
    program.integer(
        "pages", "Of 64 tokens each, of an engine. Default: half of the memory beside the weights.", least=2
    )
    program.choice(
        "cache_dtype", "Keys and values in int8, int4 or a float type. Default: float32 on CPU.",
        "int8", "int4", "float32", "bfloat16", "float16",
    )  # fmt: skip


def define_escaping(program: Program) -> None:
    program.switch("escape_control_tokens", "What messages spell never becomes a control token.", True)


def define_temperature(program: Program) -> None:
    program.number("temperature", "0: always the most likely token. Default: the checkpoint's.", *_POSITIVE)
    program.integer("seed", "Seed of the sampling.", default=0, most=2**32 - 1)


def define_sampling(program: Program) -> None:
    """How a token is chosen, beside the temperature."""
    program.integer("top_k", "Sample among the k most likely tokens; 0: all. Default: the checkpoint's.")
    reaching = "tokens that reach this probability; 1: all."
    program.number("top_p", f"Sample among the most likely {reaching} Default: the checkpoint's.", *_PART)
    program.number(
        "repetition_penalty", "Above 1: repeats become less likely; 1: off. Default: the checkpoint's.",
        lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6",
    )  # fmt: skip
    program.number(
        "min_p", "Sample among tokens at least this many times as likely as the likeliest; 0: all.",
        lambda x: 0 <= x <= 1, "from 0 to 1",
    )  # fmt: skip
    program.number(
        "typical_p", "Sample among tokens of typical surprise that reach this probability; 1: all.", *_PART
    )
    program.number(
        "presence_penalty", "Taken off the logits of tokens that the answer already holds; 0: off.", *_PENALTY
    )
    program.number("frequency_penalty", "The same, as often as the answer holds them; 0: off.", *_PENALTY)
    program.integer("no_repeat_ngram_size", "No sequence of so many tokens occurs twice; 0: off.")
    program.integer("min_tokens", "The answer does not end before so many tokens.")
    program.switch("generation_config", "Take the checkpoint's defaults from generation_config.json.", True)


def _define_ways(program: Program) -> None:
    program.texts("stop", "The answer ends before this text; may be given several times.", "give some text")
    program.integer("logprobs", "Say how probable each token was, and so many of the likeliest beside it.", 0)
    program.text(
        "draft",
        "Guess tokens ahead: a checkpoint with the same vocabulary, or lookup (what followed before).",
        empty="give a checkpoint or lookup",
    )
    program.integer("draft_tokens", "Guesses for each pass of the model.", default=3, least=1, most=16)
    beams = "Beam search: continuations followed side by side; 1: none."
    program.integer("num_beams", beams, default=1, least=1, most=256)
    exponent = "With beams: the exponent of the length that scores are divided by."
    program.number("length_penalty", exponent, *_FINITE, default=1.0)
    program.choice(
        "early_stopping",
        "With beams, when to stop: at num_beams ended sequences; when the best beam is no better than they"
        " are; when it never can be.",
        "true", "false", "never", default="false",
    )  # fmt: skip


define_model(PROGRAM)
define_processes(PROGRAM)
PROGRAM.text("prompt", "What to say to the model. Default: standard input.")
PROGRAM.text("system", "System message.")
PROGRAM.switch("raw", "Continue the prompt as it is, without the chat template.")
define_escaping(PROGRAM)
PROGRAM.integer("max_tokens", "Most tokens to generate.", default=128, least=1)
define_temperature(PROGRAM)
define_sampling(PROGRAM)
_define_ways(PROGRAM)
PROGRAM.choice(
    "cache_dtype", "Keys and values in int8, int4, gear or a float type. Default: float32 on CPU.",
    "int8", "int4", "gear", "float32", "bfloat16", "float16",
)  # fmt: skip
PROGRAM.choice(
    "impl", "Attention and argmax: mosaic, triton or xla. Default: what suits the device.",
    "mosaic", "triton", "xla", "interpret",
)  # fmt: skip
PROGRAM.switch("use_cache", "Keep keys and values; false: recompute all for every token, to compare.", True)
PROGRAM.switch("verbose", "Say on standard error which implementation serves which kernel, and why.")
PROGRAM.choice(
    "output", "text: stream the answer, statistics on standard error; json: one object with everything.",
    "text", "json", default="text",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in this thread and exits: 0, or 2 with one line on standard error where the input is
    at fault. `__main__.main` is the process, which minds Ctrl-C too.
    """
    finish(PROGRAM.name, lambda: _run(sys.argv if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    PROGRAM.parse(argv)
    _check_together(PROGRAM)
    if (code := watch(PROGRAM)) is not None:
        return code
    prompt: str | None = PROGRAM.values.prompt
    if prompt is None and not child().get("process_id"):
        prompt = _standard_input()
    if prompt is not None and not prompt.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    with status("loading jax"):
        from ..generation.programs import settle
        from .answer import answer
    try:
        return answer(PROGRAM.values, prompt)
    finally:
        settle()


def _check_together(program: Program) -> None:
    """Refuses flags that are right alone and contradict each other, or do nothing."""
    values = program.values
    beams = program.values.num_beams
    for_beams = ("length_penalty", "early_stopping")
    for_one = ("stop", "logprobs", "draft", "use_cache")
    for flag in for_beams if beams == 1 else for_one:
        if program.given(flag):
            raise InputError(f"--{flag} does not go with --num_beams={beams}: leave one of them out")
    for flag in ("draft", "cache_dtype"):
        if program.given(flag) and not values.use_cache:
            raise InputError(f"--{flag} needs the cache: leave out --nouse_cache or --{flag}")
    if program.given("draft_tokens") and values.draft is None:
        raise InputError(f"--draft_tokens={values.draft_tokens} does nothing without --draft: give that too")
    if values.raw and values.system is not None:
        raise InputError(
            "--raw takes the prompt as it is, without the system message: leave out --raw or --system"
        )


def _standard_input() -> str:
    try:
        text = sys.stdin.read(_MOST_TEXT + 1) if sys.stdin else ""
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise InputError(f"standard input is not {error.encoding} text: {where}") from error
    if len(text) > _MOST_TEXT:
        raise InputError(f"standard input has more than {_MOST_TEXT} characters: give a shorter prompt")
    return text.rstrip("\n")
