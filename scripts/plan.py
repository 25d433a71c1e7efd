"""Estimates what a model needs on GPUs or TPUs that this machine need not have: bytes on each device, and
whether it fits.

    python scripts/plan.py --model=qwen2.5-72b --devices=8xh200 --context=32768 --rows=64 --weights=int8

The model is a built-in shape or a directory with config.json. It runs in an engine over a mesh of the
devices, with all rows full; each mesh that divides the model has a line. Temporaries are at most the bound
that an engine checks itself. Two devices of tpu7x are a chip.
"""

from launcher import InputError, start

# isort: split
import dataclasses
import os
import re
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # compiles for devices but does not use them

from absl import flags
from bench.model_shapes import SHAPES, hf_config
from gpu import plan_estimates as estimates
from gpu.card_specs import CARDS, TPUS, Card, Tpu

from xinfer_jax.checks import check_integer
from xinfer_jax.families.reading import from_hf
from xinfer_jax.plugins import names

KINDS: dict[str, Card | Tpu] = {**CARDS, **TPUS}
MODEL = flags.DEFINE_string(
    "model", "qwen2.5-0.5b", f"A directory with config.json, or one of {', '.join(SHAPES)}."
)
DEVICES = flags.DEFINE_string(
    "devices", "1xh200", f"COUNTxKIND: the number of devices, and one of {', '.join(KINDS)}."
)
CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens of a row: prompt and answer.")
ROWS = flags.DEFINE_integer("rows", 8, "Rows of the engine.")
WEIGHTS = flags.DEFINE_enum("weights", "bfloat16", estimates.WEIGHTS, "Format of the weights.")
CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype",
    None,
    ["float32", "bfloat16", *(name for name in names("cache dtype") if name != "gear")],
    "Dtype of keys and values; default: that of activations.",
)
CHUNK = flags.DEFINE_integer("chunk", 256, "Tokens of a prefill chunk.")
MEMORY = flags.DEFINE_float("memory_gib", None, "GiB of a device; default: the data sheet's.", 1e-3)
GIB = 2**30


def main(argv: list[str]) -> None:
    devices, card = machine()
    config = from_hf(hf_config(MODEL.value))
    name = Path(MODEL.value).name
    kv = CACHE_DTYPE.value or ("float32" if WEIGHTS.value == "float32" else "bfloat16")
    rows = check_integer("rows", ROWS.value, 1)
    context = check_integer("context", CONTEXT.value, 2, config.context_length)
    job = estimates.Job(config, WEIGHTS.value, kv, rows, context, check_integer("chunk", CHUNK.value, 1))
    print(
        f"{name}: {estimates.num_weights(config) / 1e9:,.2f} billion weights in {job.weights};"
        f" {job.rows} rows of {job.context:,} tokens, {job.pages:,} pages in {kv}"
    )
    usable = f"{usable_memory(card) / GIB:.0f} GiB ({card.memory_fraction:.0%} of {card.memory_gib:g})"
    print(f"{DEVICES.value}, each {usable}")
    print_memory(job, devices, card)


def machine() -> tuple[int, Card | Tpu]:
    """The number of devices, and their data sheet."""
    match = re.fullmatch(r"(\d+)x(\w+)", DEVICES.value)
    if not match or match[2] not in KINDS or not 1 <= int(match[1]) <= estimates.MOST_DEVICES:
        known = f"1 to {estimates.MOST_DEVICES} of {', '.join(KINDS)}"
        raise InputError(f"--devices takes {known}, as in 8xh200: got {DEVICES.value!r}")
    card = KINDS[match[2]]
    return int(match[1]), dataclasses.replace(card, memory_gib=MEMORY.value or card.memory_gib)


def usable_memory(card: Card | Tpu) -> float:
    """Bytes of a device that the program can use."""
    return card.memory_gib * GIB * card.memory_fraction


def print_memory(job: estimates.Job, devices: int, card: Card | Tpu) -> None:
    """Prints a line for each mesh, and for the smallest one on which the job fits."""
    valid = estimates.valid_mesh_sizes(job)
    smallest = estimates.smallest_mesh(job, usable_memory(card))
    print("\nGiB a device   weights    pages  temporary     free   rows that fit")
    for m in (m for m in valid if m <= devices or m == smallest):
        need = estimates.memory_plan(job, m)
        free = usable_memory(card) - need.total
        parts = {name: size / GIB for name, size in need.parts.items()}
        sizes = f"{parts['weights']:10.1f}{parts['pages'] + parts['states']:9.1f}"
        temporary = parts["temporaries"] + parts["logits"]
        rows = max(0, job.rows + int(free // estimates.row_bytes(job, m)))
        print(f"model={m:<6}{sizes}{temporary:11.1f}{free / GIB:9.1f}{rows:16,}")
    if smallest is None:
        print(
            f"It fits on no mesh of up to {estimates.MOST_DEVICES} devices: choose fewer rows or a smaller"
            " context"
        )
    else:
        more = f", {devices // smallest} such engines on {devices} devices" if smallest < devices else ""
        print(f"The smallest mesh on which it fits: model={smallest}{more}")


if __name__ == "__main__":
    start(main)
