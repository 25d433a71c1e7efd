"""Compiles every kernel for an NVIDIA GPU that is not here, by XLA and ptxas."""

import time
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gpu.card_specs import CARDS
from gpu.kernel_cases import kernel_cases


def compile_kernels(gpu: str, only: Sequence[str]) -> list[str]:
    """Compiles the kernels whose names contain one of some texts, and prints a line for each. Returns their
    names.
    """
    mesh = CARDS[gpu].mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    names = []
    for case in kernel_cases(gpu):
        if not any(text in case.name for text in only):
            continue
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), case.shapes)
        began = time.perf_counter()
        # Mosaic takes the target from the default device, Triton from the abstract mesh.
        with jax.default_device(mesh.devices.flat[0]), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(case.function).lower(*args).compile()
        print(f"{case.name}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        names.append(case.name)
    return names
