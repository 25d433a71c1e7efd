"""The flags of `xinfer-jax-batch` and scripts/batch.py. batch.py does the work, and jax is imported with
it.
"""

import re

from ..errors import InputError
from .answer_flags import (
    check_grammar,
    define_engine,
    define_escaping,
    define_grammar,
    define_model,
    define_sampling,
    define_seed,
)
from .flag_parser import FlagParser
from .process import command_main
from .process_group import define_processes, supervise
from .terminal import status

PARSER = FlagParser(
    "xinfer-jax-batch",
    "Answer a file of prompts. A run that was interrupted continues when it is started again.",
    "--input FILE --output FILE [flags]",
    "--input prompts.jsonl --output answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
)
PARSER.group = "files"
PARSER.add_text(
    "input",
    'JSON lines: {"prompt": …}, {"messages": …} (with options that override flags), or lines of the OpenAI'
    " batch API. A name that ends in .gz is decompressed; - is standard input.",
    empty="give a file",
)
PARSER.add_text("output", "File for the answers, a line for each as it is finished.", empty="give a file")
PARSER.add_switch("in_order", "Write answers in the order of the input.")
PARSER.add_switch("score", 'Score given texts: lines are {"prompt": …, "completions": […]} or {"text": …}.')
PARSER.add_text(
    "shard", "i/n: only the lines i, i + n, i + 2n …, counted from 0, into OUTPUT.i-of-n.", empty="give i/n"
)
PARSER.add_integer("merge", "Only merge the outputs of this many shards into --output, in order.", least=1)
PARSER.group = "prompts and answers"
PARSER.add_text("system", "System message of lines with a prompt.")
PARSER.add_switch("raw", "Continue prompts as they are, without the chat template.")
define_escaping(PARSER)
PARSER.add_integer("max_tokens", "Most tokens of an answer.", default=128, least=1)
PARSER.add_texts("stop", "Answers end before this text; may be given several times.", "give some text")
define_sampling(PARSER)
define_seed(PARSER)
define_grammar(PARSER)
define_model(PARSER)
define_engine(PARSER)
define_processes(PARSER)
PARSER.group = "files"
PARSER.add_integer("grace", "Seconds for running answers to end at SIGTERM and Ctrl-C.", default=30)
PARSER.add_text(
    "served_model_name",
    "The name that lines may give as model. Default: --model, or its last part.",
    empty="give a name",
)
PARSER.add_text("report", "File for the statistics at the end, as JSON.", empty="give a file")


def _run() -> int:
    values = PARSER.values
    for name in ("input", "output"):
        if values[name].value is None:
            raise InputError(f"--{name} is missing: give a file (see --help)")
    check_grammar(PARSER)
    shard = re.fullmatch(r"(\d{1,9})/(\d{1,9})", values.shard or "0/1")
    if not shard or int(shard[1]) >= int(shard[2]):
        raise InputError(f"--shard={values.shard} must be i/n with i from 0 to n - 1")
    if values.merge is not None:
        if values.report:
            raise InputError("--merge has no statistics to report: leave out --report")
        if values.shard or values.input == "-":
            raise InputError("--merge merges all shards of a file: leave out --shard, and name the --input")
    elif (code := supervise(PARSER)) is not None:
        return code
    with status("loading jax"):
        from .batch import answer_file, merge_outputs
    if values.merge is not None:
        return merge_outputs(values)
    return answer_file(PARSER.name, values, (int(shard[1]), int(shard[2])) if values.shard else None)


main = command_main(PARSER, _run)
