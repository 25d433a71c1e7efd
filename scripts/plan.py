"""What a model needs on machines that need not be here: bytes on each device, whether they fit, times that
nothing is faster than.

    python scripts/plan.py --model=qwen2.5-72b --devices=8xh200 --context=32768 --rows=64 --weights=int8

The model is a built-in shape or a directory with config.json, in an engine over a mesh of the devices, whose
rows are full. Times are what bytes and arithmetic take at the rates of data sheets. Temporaries are those of
the engine's programs, compiled for such devices where jax's CUDA plug-in is: no GPU and no driver, but `pip
install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc`.
"""

from one_line import InputError, start

# isort: split
import dataclasses
import os
import re
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # GPUs are compiled for, not used

import plan_figures as figures  # noqa: E402
from absl import flags  # noqa: E402
from bench_shapes import SHAPES, hf_config  # noqa: E402
from cards import CARDS, Card  # noqa: E402

from xinfer_jax.checks import whole  # noqa: E402
from xinfer_jax.config.model_config import from_hf  # noqa: E402
from xinfer_jax.weights.params import tree_bytes  # noqa: E402

MODEL = flags.DEFINE_string("model", "qwen2.5-0.5b", f"A directory, or of {', '.join(SHAPES)}.")
DEVICES = flags.DEFINE_string("devices", "1xh200", f"How many of which: {', '.join(CARDS)}.")
MESH = flags.DEFINE_string("mesh", None, "model=N: devices of one engine; the default is all.")
CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens of a row: a prompt and its answer.")
ROWS = flags.DEFINE_integer("rows", 8, "Answers that an engine decodes at a time.")
WEIGHTS = flags.DEFINE_enum("weights", "bfloat16", figures.WEIGHTS, "Type of the weights.")
CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype", None, ["float32", "bfloat16", "int8", "int4"], "Of keys and values; as activations."
)
CHUNK = flags.DEFINE_integer("chunk", 256, "Tokens of a prompt that an engine reads at a time.")
TEMPORARIES = flags.DEFINE_bool("temporaries", True, "Compile the programs: half a minute.")
FRACTION = flags.DEFINE_float(
    "memory_fraction", 0.75, "Of the memory that jax takes: XLA_PYTHON_CLIENT_MEM_FRACTION.", 0, 1
)
OVERRIDES = {
    field: flags.DEFINE_float(field, None, f"In place of the device's: {what}.", 1e-3)
    for field, what in dict(
        memory_gib="GiB", memory_gbs="GB/s of its memory", link_gbs="GB/s to others, in each direction",
        tflops="TFLOP/s in bfloat16", float32_tflops="TFLOP/s in float32",
        round_us="microseconds of an all-reduce however small",
    ).items()
}  # fmt: skip
GIB = 2**30


def main(argv: list[str]) -> None:
    devices, card = machine()
    config = from_hf(hf_config(MODEL.value))
    name = Path(MODEL.value).name
    kv = CACHE_DTYPE.value or ("float32" if WEIGHTS.value == "float32" else "bfloat16")
    sizes = whole("rows", ROWS.value, 1), whole("context", CONTEXT.value, 2, config.context_length)
    job = figures.Job(config, WEIGHTS.value, kv, *sizes, whole("chunk", CHUNK.value, 1))
    n = mesh(job, devices, name)
    print(
        f"{name}: {figures.count(config) / 1e9:,.2f} billion weights in {job.weights}; {job.rows} rows of"
        f" {job.context:,} tokens, {job.pages:,} pages in {kv}"
    )
    print(
        f"{DEVICES.value}, each {room(card) / GIB:.0f} GiB ({FRACTION.value:.0%} of {card.memory_gib:g}),"
        f" {card.memory_gbs:,.0f} GB/s, {card.tflops:,.0f} TFLOP/s, links {card.link_gbs:,.0f} GB/s"
    )
    what_fits(job, n, devices, card)
    what_takes_time(job, n, card)


def machine() -> tuple[int, Card]:
    """How many devices, and which."""
    found = re.fullmatch(r"(\d+)x(\w+)", DEVICES.value)
    if not found or found[2] not in CARDS or not 1 <= int(found[1]) <= figures.MOST_DEVICES:
        known = f"1 to {figures.MOST_DEVICES} of {', '.join(CARDS)}"
        raise InputError(f"--devices takes {known}, as in 8xh200: got {DEVICES.value!r}")
    given = {field: flag.value for field, flag in OVERRIDES.items() if flag.value is not None}
    return int(found[1]), dataclasses.replace(CARDS[found[2]], **given)


def mesh(job: figures.Job, devices: int, name: str) -> int:
    """The number of devices of an engine."""
    found = re.fullmatch(r"model=(\d+)", MESH.value or f"model={devices}")
    if not found or not 1 <= int(found[1]) <= devices:
        raise InputError(f"--mesh takes model=N, N from 1 to the {devices} of --devices, got {MESH.value!r}")
    n = int(found[1])
    if undivided := figures.undivided(job, n):
        able = figures.meshes(job)
        near = " or ".join(
            f"model={m}" for m in [m for m in able if m < n][-1:] + [m for m in able if m > n][:1]
        )
        raise InputError(f"model={n} does not divide {undivided} of {name}: choose --mesh={near}")
    return n


def room(card: Card) -> float:
    """Bytes of a device."""
    return card.memory_gib * GIB * FRACTION.value


# --- what it prints -----------------------------------------------------------------------------------------


def what_fits(job: figures.Job, n: int, devices: int, card: Card) -> None:
    """A line for each mesh, and for the smallest that holds it."""
    able = figures.meshes(job)
    compiled_for = card if TEMPORARIES.value else None
    unknown = ""
    try:
        figures.held(job, n, compiled_for)
    except RuntimeError as error:
        compiled_for = None
        why = str(error).splitlines()[0]
        unknown = f"Temporaries are not known ({why}): scripts/plan.py says what to install"
    smallest = figures.smallest(job, room(card), compiled_for)
    print("\nGiB a device   weights    pages  temporary     free   rows that fit")
    for m in (m for m in able if m <= devices or m == smallest):
        held = figures.held(job, m, compiled_for if m in (n, smallest) else None)
        free = room(card) - held.together
        sizes = f"{held.weights / GIB:10.1f}{held.pages / GIB:9.1f}"
        temporary = "" if held.temporaries is None else f"{held.temporaries / GIB:.1f}"
        rows = max(0, job.rows + int(free // held.row))
        print(f"model={m:<6}{sizes}{temporary:>11}{free / GIB:9.1f}{rows:16,}")
    print(unknown, end="\n" * bool(unknown))
    if smallest is None:
        most = figures.MOST_DEVICES
        print(f"No mesh of up to {most} devices holds it: ask for fewer rows or a smaller context")
    else:
        more = f", {devices // smallest} such engines on {devices} devices" * (smallest < devices)
        print(f"The smallest mesh that holds it: model={smallest}{more}")


def what_takes_time(job: figures.Job, n: int, card: Card) -> None:
    """Limits of the devices, by the bytes and the arithmetic of what is asked."""
    print(f"\nmodel={n}, ms at least          memory  compute    links together      tok/s")
    for what, limit, tokens in (
        (f"a token of {job.rows} rows", figures.decoding, job.rows),
        (f"a prompt of {job.context:,} tokens", figures.reading, job.context),
    ):
        least = limit(job, n, card)
        times = least.memory, least.compute, least.links, least.together
        print(f"{what:28}{''.join(f'{1e3 * t:9,.1f}' for t in times)}{tokens / least.together:11,.0f}")
    if widened := figures.widened(job, n):
        ms = 1e3 * widened / card.memory_gbs / 1e9
        print(f"of memory {ms:.1f} ms a pass: {job.weights} is widened to bfloat16 there before each product")
    if figures.experts_asked(job.config, job.chunk) == 1 and job.config.num_experts:
        times = job.config.num_experts // job.config.num_experts_per_tok
        print(f"of compute: a prompt asks every expert for every token, {times} times what the chosen take")
    for count, x in figures.all_reduces(job, 1) if n > 1 else ():
        total = f"{count * tree_bytes(x) / 2**20:.2f} MiB a token"
        print(f"all-reduces: {count} a pass of [tokens, {x.shape[1]}] {x.dtype.name}, {total}")


if __name__ == "__main__":
    start(main)
