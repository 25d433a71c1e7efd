"""Compiles every kernel for an NVIDIA GPU that is not here: registers, spills, memory, instructions."""

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gpu_specs import CARDS
from jax.sharding import NamedSharding, PartitionSpec
from machine_code import assemble, empty, pallas_ptx

import kernels_pallas

_TENSOR_INSTRUCTIONS = {
    "mosaic": r"wgmma\.mma_async",
    "triton": r"wgmma\.mma_async|mma\.sync",
}  # in kernels with matmuls
SD = jax.ShapeDtypeStruct


def compile_kernels(gpu: str, only: str, folder: str) -> list[dict[str, Any]]:
    """Compiles the kernels whose names contain a text, and prints a line for each.

    Args:
        gpu: one of `CARDS`.
        only: the text.
        folder: where this process writes PTX (`machine_code.dump_settings`).

    Returns:
        Figures of each; `as_written` is false where a kernel lacks the instructions for which it was written.
    """
    sharding = NamedSharding(CARDS[gpu].mesh(), PartitionSpec())
    results: list[dict[str, Any]] = []
    for name, impl, function, shapes in _cases(gpu):
        if only in name:
            results += _compile(gpu, name, impl, function, shapes, sharding, folder)
    return results


def _cases(gpu):
    """(name, implementation, function, shapes) of each compilation: shapes of Qwen2.5 and similar ones."""
    for impl in ("mosaic", "triton") if gpu == "h200" else ("triton",):
        run = partial(kernels_pallas.run_kernel, impl)
        formats = [(64, "float16")] + [(width, "bfloat16") for width in (64, 80, 96, 128, 256)]
        formats += [(width, "float32") for width in (80, 128, 256)] * (impl == "triton")
        for width, dtype in formats:
            rows = SD((4,), jnp.int32)
            cache = SD((4, 2, 4096, width), dtype)
            for variant, extra in (("", {}), (" window+cap", dict(window=1024, soft_cap=30.0))):
                if extra and width != 128:
                    continue
                attention = dict(scale=width**-0.5, **extra)
                label = f"{impl} {{}} {width} {dtype}{variant}"
                decode = partial(run, "decode_attention", **attention)
                yield (
                    label.format("decode_attention"),
                    impl,
                    decode,
                    (SD((4, 14, width), dtype), cache, cache, rows),
                )
                prefill = partial(run, "prefill_attention", **attention)
                yield (
                    label.format("prefill_attention"),
                    impl,
                    prefill,
                    (SD((4, 512, 14, width), dtype), cache, cache, rows, rows),
                )
        for dtype in ("float32", "bfloat16"):
            yield f"{impl} argmax {dtype}", None, partial(run, "argmax"), (SD((4, 151936), dtype),)
        for rows, variant, extra in ((1, "", {}), (32, "", {}), (32, " cap", dict(soft_cap=30.0))):
            shapes = SD((rows, 896), "bfloat16"), SD((151936, 896), "bfloat16")
            name = f"{impl} lm_head_argmax {rows} rows{variant}"
            yield name, impl, partial(run, "lm_head_argmax", **extra), shapes


def _compile(gpu, name, impl, function, shapes, sharding, folder) -> Iterator[dict[str, Any]]:  # noqa: PLR0913
    empty(folder)
    start = time.perf_counter()
    args = [SD(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    # Mosaic takes the target from the default device, Triton from the abstract mesh.
    with (
        jax.default_device(sharding.mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh),
    ):
        compiled = jax.jit(function).lower(*args).compile()
    resources = next(Path(folder).glob("*.resources.txt"), None)  # only Mosaic of the newest jax writes it
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())[1]) if resources else None
    temporaries = compiled.memory_analysis().temp_size_in_bytes // 1024
    seconds = time.perf_counter() - start
    for _, path in pallas_ptx(folder):
        text = path.read_text(errors="ignore")
        figures = assemble(CARDS[gpu].capability, path)
        tensor = len(re.findall(_TENSOR_INSTRUCTIONS.get(impl, "never"), text))
        # TMA's bulk copies of tiles, or those of single vectors that Ampere has too.
        copies = len(
            re.findall(
                r"cp\.async\.bulk\.tensor.*shared.*global" if impl == "mosaic" else r"cp\.async\.c", text
            )
        )
        exact = "float32" in name
        as_written = impl is None or (exact or tensor > 0) and copies > 0
        result = dict(
            gpu=gpu,
            kernel=name,
            **figures,
            shared_bytes=shared,
            temporaries_kib=temporaries,
            tensor=tensor,
            async_copies=copies,
            as_written=as_written,
            seconds=round(seconds, 1),
        )
        problems = " SPILLS" if figures["spill_bytes"] else ""
        if not as_written:
            problems += " LACKS INSTRUCTIONS"
        print(
            f"{gpu:8s} {name:52s} {figures['registers']:3d} registers {figures['spill_bytes']:4d} B spilled"
            f" {shared or '-':>6} B shared {temporaries:6d} KiB temporaries {tensor:3d} tensor {copies:3d}"
            f" async copies {seconds:5.1f} s{problems}",
            flush=True,
        )
        yield result
