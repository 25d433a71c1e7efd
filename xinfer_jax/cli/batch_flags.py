"""`xinfer-jax-batch` and scripts/batch.py: flags. batch.py does the work; jax is imported with it."""

import re
import sys
from collections.abc import Sequence

from ..errors import InputError
from .answer_flags import define_engine, define_escaping, define_model, define_sampling, define_temperature
from .group import define_processes
from .process import finish
from .program import Program
from .terminal import status
from .watch import watch

PROGRAM = Program(
    "xinfer-jax-batch",
    "A file of prompts in, a file of answers out. Broken off and started again it goes on where it was.",
    "xinfer-jax-batch --input FILE --output FILE [flags]",
    "xinfer-jax-batch --input prompts.jsonl --output answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
)
PROGRAM.text(
    "input",
    'JSON lines: {"prompt": …}, {"messages": …} (options beside them overrule flags), or of the OpenAI batch'
    " API. A name that ends in .gz is unpacked; - is standard input.",
    empty="give a file",
)
PROGRAM.text("output", "Gets a line for each, as they are finished.", empty="give a file")
PROGRAM.switch("in_order", "Write answers in the order of the input.")
PROGRAM.switch(
    "score",
    'How likely given texts are: lines are {"prompt": …, "completions": […]} or {"text": …}.',
)
PROGRAM.text(
    "shard",
    "i/n: only every n-th line, from the one i lines behind the first (0/n … n-1/n), into OUTPUT.i-of-n.",
    empty="give i/n",
)
PROGRAM.integer(
    "merge", "Join the outputs of so many shards into --output, in order, and do no more.", least=1
)
PROGRAM.text("system", "System message of lines with a prompt.")
PROGRAM.switch("raw", "Continue prompts as they are, without the chat template.")
define_escaping(PROGRAM)
PROGRAM.integer("max_tokens", "Most tokens of an answer.", default=128, least=1)
PROGRAM.texts("stop", "Answers end before this text; may be given several times.", "give some text")
define_temperature(PROGRAM)
define_sampling(PROGRAM)
define_model(PROGRAM)
define_engine(PROGRAM)
define_processes(PROGRAM)
PROGRAM.choice("draft", "Guess tokens ahead: lookup (what followed before).", "lookup", "none")
PROGRAM.choice(
    "impl", "Attention and argmax: mosaic, triton or xla. Default: what suits the device.",
    "mosaic", "triton", "xla",
)  # fmt: skip
PROGRAM.integer("grace", "Seconds that answers under way have to end at SIGTERM and Ctrl-C.", default=30)
PROGRAM.text(
    "served_model_name",
    "What lines may give as their model. Default: --model, or its last part.",
    empty="give a name",
)
PROGRAM.text("report", "A file that gets the figures at the end as JSON.", empty="give a file")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in this thread and exits: 0; 1 where a line of the output is an error; 2 with one line
    on standard error where the input is at fault. `__main__.batch` is the process, which minds SIGTERM and
    Ctrl-C too.
    """
    finish(PROGRAM.name, lambda: _run(sys.argv if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    PROGRAM.parse(argv)
    values = PROGRAM.values
    for name in ("input", "output"):
        if values[name].value is None:
            raise InputError(f"--{name} is missing: give a file (see --help)")
    shard = re.fullmatch(r"(\d{1,9})/(\d{1,9})", values.shard or "0/1")
    if not shard or int(shard[1]) >= int(shard[2]):
        raise InputError(f"--shard={values.shard} must be i/n with i from 0 to n - 1")
    if values.merge is not None and values.report:
        raise InputError("--merge has no figures to report: leave out --report")
    if values.merge is not None and (values.shard or values.input == "-"):
        raise InputError("--merge joins all shards of a file: leave out --shard, and name the --input")
    if values.merge is None and (code := watch(PROGRAM)) is not None:
        return code
    with status("loading jax"):
        from .batch import batch, merge
    if values.merge is not None:
        return merge(values)
    return batch(values, (int(shard[1]), int(shard[2])) if values.shard else None)
