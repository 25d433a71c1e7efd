"""Compiles every kernel for an NVIDIA GPU that is not here: registers, spills, memory, instructions."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gpu.card_specs import CARDS
from gpu.kernel_cases import KernelCase, kernel_cases
from gpu.machine_code import assemble, empty, pallas_ptx

_TENSOR_INSTRUCTIONS = {
    "mosaic": r"wgmma\.mma_async",
    "triton": r"wgmma\.mma_async|mma\.sync",
}  # in kernels with matmuls


def compile_kernels(gpu: str, only: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Compiles the kernels whose names contain one of some texts, and prints a line for each.
    `as_written` is false where a kernel lacks the instructions for which it was written.

    folder: where this process writes PTX (`machine_code.dump_settings`).
    """
    sharding = NamedSharding(CARDS[gpu].mesh(), PartitionSpec())
    results: list[dict[str, Any]] = []
    for case in kernel_cases(gpu):
        if any(text in case.name for text in only):
            results += _compile(gpu, case, sharding, folder)
    return results


def _compile(gpu: str, case: KernelCase, sharding: Any, folder: str) -> Iterator[dict[str, Any]]:
    name, impl, function, shapes = case
    empty(folder)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    # Mosaic takes the target from the default device, Triton from the abstract mesh.
    with (
        jax.default_device(sharding.mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh),
    ):
        jax.jit(function).lower(*args).compile()
    resources = next(Path(folder).glob("*.resources.txt"), None)  # only Mosaic of the newest jax writes it
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())[1]) if resources else None
    for entry, path in pallas_ptx(folder):
        text = path.read_text(errors="ignore")
        figures = assemble(CARDS[gpu].capability, path)
        tensor = len(re.findall(_TENSOR_INSTRUCTIONS.get(impl, "never"), text))
        # TMA's bulk copies of tiles, or those of single vectors that Ampere has too.
        bulk = r"cp\.async\.bulk\.tensor.*shared.*global"
        copies = len(re.findall(bulk if impl == "mosaic" else r"cp\.async\.c", text))
        exact = "float32" in name
        without_products = impl is None or entry.startswith("merge")
        as_written = without_products or (exact or tensor > 0) and copies > 0
        result = dict(gpu=gpu, kernel=name, **figures, shared_bytes=shared)
        result |= dict(tensor=tensor, async_copies=copies, as_written=as_written)
        problems = " SPILLS" if figures["spill_bytes"] else ""
        problems += "" if as_written else " LACKS INSTRUCTIONS"
        print(", ".join(f"{key} {value}" for key, value in result.items()) + problems, flush=True)
        yield result
