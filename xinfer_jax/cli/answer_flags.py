"""`xinfer-jax`, `python -m xinfer_jax` and scripts/generate.py: flags, and what is wrong with them. answer.py
does the work; jax is imported with it, once the flags are right.
"""

import sys
from collections.abc import Sequence

from ..errors import InputError
from .process import finish
from .program import Program
from .terminal import status, write

PROGRAM = Program(
    "xinfer-jax",
    "Text in, text out with a Hugging Face checkpoint.",
    "xinfer-jax --prompt TEXT [flags]",
    'xinfer-jax --prompt "What is the capital of France?" --temperature 0.7 --seed 1',
)
_MOST_TEXT = 2**25  # characters of standard input, beyond any model's context


def _finite(x: float) -> bool:
    """In float32."""
    return abs(x) < 3.4e38


def define_model(program: Program) -> None:
    """Which model: the flags that commands share."""
    program.text(
        "model", None,
        "Checkpoint: a directory, or a Hugging Face hub name owner/name. Default: the bundled one.",
        empty="give a directory or a hub name",
    )  # fmt: skip
    program.choice(
        "dtype", None, "float32, bfloat16 or float16. Default: float32 on CPU, bfloat16 on GPU and TPU.",
        "float32", "bfloat16", "float16",
    )  # fmt: skip
    program.choice(
        "quantize", None, "int8 or int4: weights in fewer bytes. Default: as --dtype says.", "int8", "int4"
    )
    program.text(
        "compilation_cache",
        None,
        "Directory that keeps compiled programs between runs; empty: none. Default: the user's cache"
        " directory.",
    )


def define_temperature(program: Program) -> None:
    program.number(
        "temperature", None, "0: always the most likely token. Default: the checkpoint's.",
        lambda x: x >= 0 and _finite(x), "of 0 or above",
    )  # fmt: skip
    program.integer("seed", 0, "Seed of the sampling.", most=2**32 - 1)


def _define_sampling(program: Program) -> None:
    program.integer(
        "top_k", None, "Sample among the k most likely tokens; 0: all. Default: the checkpoint's."
    )
    above_0_to_1 = (lambda x: 0 < x <= 1, "above 0 and at most 1")
    program.number(
        "top_p",
        None,
        "Sample among the most likely tokens that reach this probability; 1: all. Default: the checkpoint's.",
        *above_0_to_1,
    )
    program.number(
        "repetition_penalty", None, "Above 1: repeats become less likely; 1: off. Default: the checkpoint's.",
        lambda x: 1e-6 <= x <= 1e6, "from 1e-6 to 1e6",
    )  # fmt: skip
    program.number(
        "min_p", None, "Sample among tokens at least this many times as likely as the likeliest; 0: all.",
        lambda x: 0 <= x <= 1, "from 0 to 1",
    )  # fmt: skip
    program.number(
        "typical_p", None, "Sample among tokens of typical surprise that reach this probability; 1: all.",
        *above_0_to_1,
    )  # fmt: skip
    program.number(
        "presence_penalty", None, "Taken off the logits of tokens that the answer already holds; 0: off.",
        lambda x: abs(x) <= 1e30, "from -1e30 to 1e30",
    )  # fmt: skip
    program.number(
        "frequency_penalty", None, "The same, as often as the answer holds them; 0: off.",
        lambda x: abs(x) <= 1e30, "from -1e30 to 1e30",
    )  # fmt: skip
    program.integer("no_repeat_ngram_size", None, "No sequence of so many tokens occurs twice; 0: off.")
    program.integer("min_tokens", None, "The answer does not end before so many tokens.")
    program.switch("generation_config", True, "Take the checkpoint's defaults from generation_config.json.")


def _define_ways(program: Program) -> None:
    program.texts(
        "stop", "The answer ends before this text; may be given several times.", empty="give some text"
    )
    program.integer("logprobs", 0, "Say how probable each token was, and so many of the likeliest beside it.")
    program.text(
        "draft", None,
        "Guess tokens ahead: a checkpoint with the same vocabulary, or lookup (what followed before).",
        empty="give a checkpoint or lookup",
    )  # fmt: skip
    program.integer("draft_tokens", 3, "Guesses for each pass of the model.", least=1, most=16)
    program.integer(
        "num_beams", 1, "Beam search: continuations followed side by side; 1: none.", least=1, most=256
    )
    program.number(
        "length_penalty", 1.0, "With beams: the exponent of the length that scores are divided by.",
        _finite, "that is finite",
    )  # fmt: skip
    program.choice(
        "early_stopping", "false",
        "With beams, when to stop: at num_beams ended sequences; when the best beam is no better than they"
        " are; when it never can be.",
        "true", "false", "never",
    )  # fmt: skip


define_model(PROGRAM)
PROGRAM.text("prompt", None, "What to say to the model. Default: standard input.")
PROGRAM.text("system", None, "System message.")
PROGRAM.switch("raw", False, "Continue the prompt as it is, without the chat template.")
PROGRAM.integer("max_tokens", 128, "Most tokens to generate.", least=1)
define_temperature(PROGRAM)
_define_sampling(PROGRAM)
_define_ways(PROGRAM)
PROGRAM.choice(
    "cache_dtype", None, "Keys and values in int8, int4, gear or a float type. Default: float32 on CPU.",
    "int8", "int4", "gear", "float32", "bfloat16", "float16",
)  # fmt: skip
PROGRAM.choice(
    "impl", None, "Attention and argmax: mosaic, triton or xla. Default: what suits the device.",
    "mosaic", "triton", "xla", "interpret",
)  # fmt: skip
PROGRAM.switch("use_cache", True, "Keep keys and values; false: recompute all for every token, to compare.")
PROGRAM.switch("verbose", False, "Say on standard error which implementation serves which kernel, and why.")
PROGRAM.choice(
    "output", "text",
    "text: stream the answer, statistics on standard error; json: one object with everything.",
    "text", "json",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in this thread and exits: 0, or 2 with one line on standard error where the input is
    at fault. `__main__.main` is the process, which minds Ctrl-C too.
    """
    finish(PROGRAM.name, lambda: _run(sys.argv if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    if (said := PROGRAM.parse(argv)) is not None:
        write(f"{said}\n")
        return 0
    _check_together(PROGRAM)
    prompt = PROGRAM.values.prompt
    prompt = _standard_input() if prompt is None else prompt
    if not prompt.strip():
        raise InputError("the prompt is empty: give --prompt TEXT, or text on standard input")
    with status("loading jax"):
        from .answer import answer
    return answer(PROGRAM.values, prompt)


def _check_together(program: Program) -> None:
    """Refuses flags that are right alone and contradict each other, or do nothing."""
    values = program.values
    alone, with_beams = ("length_penalty", "early_stopping"), ("stop", "logprobs", "draft", "use_cache")
    for flag in alone if values.num_beams == 1 else with_beams:
        if program.given(flag):
            raise InputError(
                f"--{flag} does not go with --num_beams={values.num_beams}: leave one of them out"
            )
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
        raise InputError(
            f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}"
        ) from error
    if len(text) > _MOST_TEXT:
        raise InputError(f"standard input has more than {_MOST_TEXT} characters: give a shorter prompt")
    return text.rstrip("\n")
