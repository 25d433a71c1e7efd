"""The work of `xinfer-jax plan` after its flags: prints the bytes that a model needs on each device."""

import dataclasses
from pathlib import Path
from typing import Any

from ..checks import check_integer
from ..estimates import plan_estimates as estimates
from ..estimates.card_specs import MOST_DEVICES, Card, Tpu
from ..families.draft_heads import mtp_spec
from ..families.reading import from_hf
from .terminal import write

_GIB = 2**30


def print_plan(flags: Any, settings: dict[str, Any], devices: int, card: Card | Tpu) -> int:
    """Prints the plan of a model. Returns the exit code. settings: the content of config.json. card: the data
    sheet of a device.
    """
    config = from_hf(settings)
    if flags.draft == "mtp":
        config = dataclasses.replace(config, draft_head=mtp_spec(config))
    kv = flags.cache_dtype or ("float32" if flags.weights == "float32" else "bfloat16")
    context = check_integer("context", flags.context, 2, config.context_length)
    job = estimates.EngineLoad(config, flags.weights, kv, flags.rows, context, flags.chunk)
    billions = f"{estimates.num_weights(config) / 1e9:,.2f} billion"
    token = estimates.page_and_state_bytes(job, 1)[0] // estimates.PAGE_SIZE
    write(
        f"{Path(flags.model).name}: {billions} weights in {job.weights};"
        f" {job.rows} rows of {job.context:,} tokens, {job.pages:,} pages in {kv}"
        f" ({token:,} bytes a token)\n"
    )
    usable = f"{_usable_memory(card) / _GIB:.0f} GiB ({card.memory_fraction:.0%} of {card.memory_gib:g})"
    write(f"{devices} x {card.name}, each {usable}\n")
    _print_memory(job, devices, card)
    return 0


def _usable_memory(card: Card | Tpu) -> float:
    """Returns the bytes of a device that the program can use."""
    return card.memory_gib * _GIB * card.memory_fraction


def _print_memory(job: estimates.EngineLoad, devices: int, card: Card | Tpu) -> None:
    """Prints a line for each mesh, and for the smallest one on which the job fits."""
    valid = estimates.valid_mesh_sizes(job)
    smallest = estimates.smallest_mesh(job, _usable_memory(card))
    write("\nGiB a device   weights    pages  temporary     free   rows that fit\n")
    for m in (m for m in valid if m <= devices or m == smallest):
        need = estimates.mesh_plan(job, m)
        free = _usable_memory(card) - need.total
        parts = {name: size / _GIB for name, size in need.parts.items()}
        sizes = f"{parts['weights']:10.1f}{parts['pages'] + parts['states']:9.1f}"
        temporary = parts["temporaries"] + parts["logits"]
        rows = max(0, job.rows + int(free // estimates.row_bytes(job, m)))
        write(f"model={m:<6}{sizes}{temporary:11.1f}{free / _GIB:9.1f}{rows:16,}\n")
    if smallest is None:
        write(f"It fits on no mesh of up to {MOST_DEVICES} devices: choose fewer rows or a smaller context\n")
    else:
        more = f", {devices // smallest} such engines on {devices} devices" if smallest < devices else ""
        write(f"The smallest mesh on which it fits: model={smallest}{more}\n")
