"""The flags of `xinfer-jax plan` and scripts/plan.py. plan.py does the work, and jax is imported with it."""

import dataclasses
import os
import re

from ..errors import InputError
from ..estimates.card_specs import CARDS, MOST_DEVICES, TPUS, Card, Tpu
from ..estimates.model_shapes import SHAPES, hf_config
from ..plugins import names
from .flag_parser import FlagParser
from .process import command_main
from .terminal import status

_KINDS: dict[str, Card | Tpu] = {**CARDS, **TPUS}

PARSER = FlagParser(
    "xinfer-jax plan",
    "Estimate what a model needs on GPUs or TPUs that this machine need not have: the bytes on each "
    "device, and whether it fits. The model runs in an engine over a mesh of the devices, with all rows "
    "full. Each mesh that divides the model has a line. Temporaries are at most the bound that an "
    "engine checks itself. Two devices of tpu7x are a chip.",
    "[flags]",
    "--model qwen2.5-72b --devices 8xh200 --context 32768 --rows 64 --weights int8",
)
PARSER.group = "model and devices"
PARSER.add_text(
    "model",
    f"A directory with config.json, or one of {', '.join(SHAPES)}.",
    empty="give a directory or a name",
    default="qwen2.5-0.5b",
)
PARSER.add_text(
    "devices",
    f"COUNTxKIND: the number of devices, and one of {', '.join(_KINDS)}.",
    empty="give COUNTxKIND",
    default="1xh200",
)
PARSER.add_integer("context", "Tokens of a row: prompt and answer.", default=4096, least=2)
PARSER.add_integer("rows", "Rows of the engine.", default=8, least=1)
PARSER.add_choice(
    "weights",
    "Format of the weights. mxfp4: of experts; fp8: of matrices of layers; other weights are bfloat16.",
    "float32", "bfloat16", "int8", "int4", "mxfp4", "fp8", default="bfloat16",
)  # fmt: skip
PARSER.add_choice(
    "cache_dtype",
    "Dtype of keys and values. Default: the dtype of activations.",
    *("float32", "bfloat16", *(name for name in names("cache dtype") if name != "gear")),
)
PARSER.add_integer("chunk", "Tokens of a prefill chunk.", default=256, least=1)
PARSER.add_choice(
    "draft", "mtp: weights and pages include a draft head in the files, which drafts tokens.", "mtp"
)
PARSER.add_number(
    "memory_gib",
    "GiB of a device. Default: as its data sheet says.",
    lambda x: 1e-3 <= x <= 1e6,
    "from 0.001 to 1e6",
)


def _run() -> int:
    flags = PARSER.values
    devices, card = _devices(flags.devices)
    settings = hf_config(flags.model)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on a device
    with status("loading jax"):
        from .plan import print_plan
    card = dataclasses.replace(card, memory_gib=flags.memory_gib or card.memory_gib)
    return print_plan(flags, settings, devices, card)


main = command_main(PARSER, _run)


def _devices(text: str) -> tuple[int, Card | Tpu]:
    """Returns the number of devices, and their data sheet."""
    match = re.fullmatch(r"(\d{1,9})x(\w+)", text)
    if not match or match[2] not in _KINDS or not 1 <= int(match[1]) <= MOST_DEVICES:
        known = f"1 to {MOST_DEVICES} of {', '.join(_KINDS)}"
        raise InputError(f"--devices takes {known}, as in 8xh200: got {text!r}")
    return int(match[1]), _KINDS[match[2]]
