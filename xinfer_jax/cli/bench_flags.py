"""The flags of `xinfer-jax bench` and scripts/bench.py. bench.py does the work, and jax is imported with
it.
"""

from typing import Any

from ..errors import InputError
from ..estimates.model_shapes import hf_config
from .answer_flags import define_checkpoint, define_draft, define_kernels
from .flag_parser import FlagParser
from .process import command_main
from .terminal import status

PARSER = FlagParser(
    "xinfer-jax bench",
    "Time a model on this machine: time to first token, time per token, tokens per second and peak "
    "memory of each batch, as fractions of this machine's limits, and requests to an engine.\n"
    "The weights are random unless --model names a checkpoint. Prompts are always random, and no answer "
    "stops early.\n"
    "The limits are probed before and after every repetition, which is reported as a fraction of the "
    "mean of both. The limit of decode is max(bytes / bandwidth, FLOP / matmul rate), where bytes are "
    "the stored weights and the keys and values. The limit of prefill is the same with (2 x non-"
    "embedding weights x tokens + attention + one vocabulary row) FLOP.\n"
    "The last line of the output is one JSON object.",
    "[flags]",
    "--model Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 --quantize int8 --batch_sizes 1,8,32",
)
PARSER.group = "model"
define_checkpoint(PARSER, "--config")
PARSER.add_text(
    "config",
    "A built-in shape (`xinfer-jax plan --help` lists them), or a directory with config.json. The weights are"
    " random.",
    empty="give a name or a directory",
    default="qwen2.5-0.5b",
)
PARSER.add_choice("dtype", "Dtype of activations.", "float32", "bfloat16", "float16", default="float32")
PARSER.add_choice("quantize", "Format of the weights. Default: as --dtype says.", "int8", "int4", "ternary")
define_kernels(PARSER, "interpret", "interpret_tpu")
PARSER.group = "batches"
PARSER.add_integers("prompt_lengths", "Lengths of the prompts, in tokens.", default="26,300,512")
PARSER.add_integers("batch_sizes", "Prompts in a batch.", default="1,8")
PARSER.add_integer("new_tokens", "Tokens to generate.", default=64, least=2)
PARSER.add_switch("sampled", "Sample by temperature, top-k and top-p instead of greedily.")
define_draft(PARSER)
PARSER.add_integer("repeats", "Timed runs of each case, after one that compiles.", default=3, least=1)
PARSER.add_integer("probe_mib", "MiB that are read to measure the bandwidth.", default=1024, least=1)
PARSER.group = "engine"
PARSER.add_integer(
    "requests",
    "Requests to an engine, all at once, with prompts of these lengths in turn; 0: no engine.",
    default=16,
)
PARSER.add_integer("rows", "Slots of the engine.", default=8, least=1)


def _run() -> int:
    flags = PARSER.values
    if flags.model and PARSER.is_set("config"):
        raise InputError(
            f"--config={flags.config} does not go with --model, which brings its own: leave out one of them"
        )
    if flags.draft == "mtp" and not flags.model:
        raise InputError("--draft=mtp needs --model: random weights have no draft head")
    settings: dict[str, Any] | None = None if flags.model else hf_config(flags.config)
    with status("loading jax"):
        from .bench import bench_model
    return bench_model(PARSER.name, flags, settings)


main = command_main(PARSER, _run)
