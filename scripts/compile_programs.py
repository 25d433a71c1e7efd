"""Compiles the library's own programs for NVIDIA GPUs and TPUs that this machine need not have, and counts
their operations and bytes.

    pip install 'jax[cuda13-local]' nvidia-cuda-nvcc      # the CUDA plug-in and ptxas, no driver is needed
    python scripts/compile_programs.py --target=h200 --model=qwen2.5-7b --rows=8 --program=decode,sampled
    python scripts/compile_programs.py --target=a100 --program=kernels --only=prefill
    pip install 'jax[tpu]'                                # libtpu
    python scripts/compile_programs.py --target=v6e --model=qwen2.5-7b --rows=8 --program=decode,prefill

For one decode step, or one call of another program, it prints bytes in device memory, launched operations,
copies and gathers of whole weights or caches, and temporaries: per layer, next to the layers, and for the
model. Figures per layer are differences of two depths. Bytes of Pallas kernels are the bytes that they have
to move. `kernels` are all Pallas kernels, each compiled alone. Prints tables, and one JSON object as the last
line. Exit code 2: the plug-in, ptxas or libtpu is missing.
"""

from launcher import InputError, start

# isort: split
import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

import jax
from absl import flags
from gpu.kernel_calls import kernel_calls
from gpu.program_report import print_report, report
from gpu.programs import PROGRAMS, ProgramJob, target_card, to_shapes

from xinfer_jax.cache.stored_kv import resolve_cache_dtype
from xinfer_jax.checks import check_integer
from xinfer_jax.estimates import plan_estimates as estimates
from xinfer_jax.estimates.card_specs import CARDS, TPUS
from xinfer_jax.estimates.model_shapes import SHAPES, hf_config
from xinfer_jax.families.reading import from_hf

TARGET = flags.DEFINE_enum("target", "h200", [*CARDS, *TPUS], "GPU or TPU to compile for.")
MODEL = flags.DEFINE_string(
    "model", "qwen2.5-0.5b", f"A directory with config.json, or one of {', '.join(SHAPES)}."
)
WEIGHTS = flags.DEFINE_enum("weights", "bfloat16", estimates.WEIGHTS, "Format of the weights.")
CACHE = flags.DEFINE_enum(
    "cache", "bfloat16", ["bfloat16", "float32", "int8", "int4"], "Dtype of keys and values."
)
ROWS = flags.DEFINE_integer("rows", 1, "Rows; a power of two.")
CAPACITY = flags.DEFINE_integer("capacity", 4096, "Tokens that a row can hold.")
LENGTH = flags.DEFINE_integer("length", 1024, "Valid tokens of each row after the step; of a prompt: all.")
LAYERS = flags.DEFINE_list(
    "layers",
    None,
    "Depths, two or one. Default: 2 and 4 periods of the layers' kinds; for a TPU, or if there are fewer"
    " layers, all.",
)
DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 7, "Draft tokens of a step of verify and mtp.")
PROGRAM = flags.DEFINE_list("program", ["decode"], f"Any of {', '.join(PROGRAMS)}; or kernels.")
ONLY = flags.DEFINE_list("only", None, "Of kernels: compile those whose names contain one of these texts.")


def main(argv: list[str]) -> None:
    if unknown := set(PROGRAM.value) - {*PROGRAMS, "kernels"}:
        raise InputError(f"--program knows {', '.join(PROGRAMS)}, kernels, got {unknown.pop()!r}")
    if jax.__version_info__ < (0, 12):
        raise InputError(f"jax {jax.__version__} does not compile all programs without a device: needs 0.12")
    check_target()
    results = [figures(program) for program in PROGRAM.value]
    given = (TARGET, MODEL, WEIGHTS, CACHE, ROWS, CAPACITY, LENGTH, DRAFT_TOKENS)
    settings = {flag.name: flag.value for flag in given}
    print(json.dumps({"jax": jax.__version__, **settings, "programs": results}))


def check_target() -> None:
    """Raises an `InputError` if this machine cannot compile for --target."""
    if TARGET.value in TPUS and "kernels" in PROGRAM.value:
        raise InputError("--program=kernels compiles kernels for GPUs only: name a program")
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/ptxas"))
    if TARGET.value in CARDS and not (shutil.which("ptxas") or any(wheels)):
        raise InputError("no ptxas: pip install nvidia-cuda-nvcc, or put CUDA's bin on the PATH")
    plugin = "libtpu" if TARGET.value in TPUS else "CUDA plug-in"
    extra = "tpu" if TARGET.value in TPUS else "cuda13-local"
    try:
        (CARDS | TPUS)[TARGET.value].mesh()
    except Exception as error:  # a missing or foreign plug-in may raise anything
        raise InputError(
            f"no {plugin} that compiles without a device ({error}): pip install 'jax[{extra}]'"
        ) from error


def figures(program: str) -> dict:
    """Compiles, prints and returns the figures of a program."""
    if program == "kernels":
        return {"program": program, "compiled": compile_kernels(ONLY.value or [""])}
    job = full_job()
    print(
        f"\n{MODEL.value} for {TARGET.value}: weights {WEIGHTS.value}, cache {CACHE.value},"
        f" {job.rows} rows of {job.length:,} tokens, capacity {job.capacity:,}, jax {jax.__version__}"
    )
    card = (CARDS | TPUS)[TARGET.value]
    result = report(job, WEIGHTS.value, program, card, chosen_depths())
    print_report(result)
    return result


def compile_kernels(only: list[str]) -> list[str]:
    """Compiles the kernels whose names contain one of some texts, by XLA and ptxas, and prints a line for
    each. Returns their names.
    """
    card = CARDS[TARGET.value]
    mesh = card.mesh()
    impls = ("mosaic", "triton") if card.capability == (9, 0) else ("triton",)
    calls = [call for impl in impls for call in kernel_calls(impl)]
    names = []
    for call in (call for call in calls if any(text in call.name for text in only)):
        args, arrays = to_shapes(jax.eval_shape(call.arguments), mesh)
        began = time.perf_counter()
        with target_card(card, mesh):
            jax.jit(call.run).lower(*args, **arrays).compile()
        print(f"{call.name}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        names.append(call.name)
    return names


def chosen_depths() -> list[int] | None:
    """Returns --layers. None: it is not given."""
    if not LAYERS.value:
        return None
    depths = [int(text) for text in LAYERS.value if text.isdigit() and int(text)]
    if len(depths) != len(LAYERS.value) or len(depths) > 2 or depths != sorted({*depths}):
        given = ",".join(LAYERS.value)
        raise InputError(f"--layers takes a number, or two, the smaller one first, as in 1,2: got {given!r}")
    return depths


def full_job() -> ProgramJob:
    config = from_hf(hf_config(MODEL.value))
    rows = check_integer("rows", ROWS.value, 1)
    if rows & (rows - 1):
        raise InputError(f"rows must be a power of two, as generate pads them to one, got {rows}")
    capacity = check_integer("capacity", CAPACITY.value, 2, config.context_length)
    length = check_integer("length", LENGTH.value, 2, capacity - 1)
    kv = resolve_cache_dtype(CACHE.value)
    weights = estimates.device_weights(config, WEIGHTS.value, 1)
    drafts = check_integer("draft_tokens", DRAFT_TOKENS.value, 1, 16)
    sizes = rows, capacity, length
    return ProgramJob(config, weights, kv, *sizes, draft_tokens=drafts)


if __name__ == "__main__":
    start(main)
