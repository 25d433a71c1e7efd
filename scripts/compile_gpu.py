"""Compiles every kernel for NVIDIA GPUs on a machine without a GPU, and prints registers, spills, memory and
instructions.

    pip install 'jax[cuda13-local]' nvidia-cuda-nvcc      # the CUDA plug-in and ptxas; no driver is needed
    python scripts/compile_gpu.py --gpus=h200,a100,rtx4090 --only=prefill

Prints one line per kernel, and one JSON object as the last line. Exit code 1: a kernel spills, or lacks the
instructions for which it was written; 2: the plug-in or ptxas is missing.
"""

from launcher import InputError, start

# isort: split
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

DUMP = tempfile.mkdtemp()
# jax and Mosaic read these when they are imported: where to write the PTX of compiled kernels.
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": DUMP}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import flags  # noqa: E402
from gpu_specs import CARDS  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import kernels_pallas  # noqa: E402

GPUS = flags.DEFINE_list("gpus", ["h200", "a100", "rtx4090"], f"Targets: {', '.join(CARDS)}.")
ONLY = flags.DEFINE_string("only", "", "Compile only the kernels whose names contain this text.")

_TENSOR_INSTRUCTIONS = {
    "mosaic": r"wgmma\.mma_async",
    "triton": r"wgmma\.mma_async|mma\.sync",
}  # in kernels with matmuls
SD = jax.ShapeDtypeStruct


def main(argv: list[str]) -> None:
    if unknown := set(GPUS.value) - set(CARDS):
        raise InputError(f"--gpus knows {', '.join(CARDS)}, got {unknown.pop()!r}")
    if not (ptxas := _ptxas()):
        raise InputError("no ptxas: pip install nvidia-cuda-nvcc, or put CUDA's bin on the PATH")
    version = (
        subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    )
    print(f"jax {jax.__version__}, {ptxas}: {version}")
    results = []
    for gpu in GPUS.value:
        try:
            sharding = NamedSharding(CARDS[gpu].mesh(), PartitionSpec())
        except Exception as error:  # a missing or foreign plug-in may raise anything
            raise InputError(
                f"no CUDA plug-in that compiles without a device ({error}): pip install 'jax[cuda13-local]'"
            ) from error
        for name, impl, function, shapes in _cases(gpu):
            if ONLY.value in name:
                results += _compile(gpu, name, impl, function, shapes, sharding)
    shutil.rmtree(DUMP)
    print(json.dumps({"jax": jax.__version__, "kernels": results}))
    sys.exit(int(any(result["spill_bytes"] or not result["as_written"] for result in results)))


def _cases(gpu):
    """(name, implementation, function, shapes) of each compilation: shapes of Qwen2.5 and similar ones."""
    for impl in ("mosaic", "triton") if gpu == "h200" else ("triton",):
        run = partial(kernels_pallas.run_kernel, impl)
        formats = [(64, "float16")] + [(width, "bfloat16") for width in (64, 80, 96, 128, 256)]
        formats += [(width, "float32") for width in (80, 128, 256)] * (impl == "triton")
        for width, dtype in formats:
            rows = SD((4,), jnp.int32)
            slots = {"": (4, 4096), " ring": (4, 1152), " pages": (300, 64)}
            for variant, keys in [("", ""), ("", " pages"), ("", " ring"), (" window+cap", "")]:
                if (variant or keys == " ring") and width not in (64, 128):
                    continue
                cache = SD((slots[keys][0], 2, slots[keys][1], width), dtype)
                options = dict(window=1024, soft_cap=30.0) if variant else {}
                options |= dict(ring=True, window=1024) if keys == " ring" else {}
                for T in (1, 5, 17, 512):
                    if T in (5, 17) and not keys:
                        continue
                    kernel = "prefill_attention" if T == 512 else "decode_attention"
                    shapes = [SD((4, T, 14, width), dtype), cache, cache, rows, rows]
                    if keys == " pages":
                        shapes += [SD((4, 64), jnp.int32), SD((14,), jnp.float32)]
                    attention = partial(_attention, partial(run, kernel, scale=width**-0.5, **options))
                    many = f" {T} queries" if T in (5, 17) else ""
                    yield f"{impl} {kernel} {width} {dtype}{variant}{keys}{many}", impl, attention, shapes
        for dtype in ("float32", "bfloat16"):
            yield f"{impl} argmax {dtype}", None, partial(run, "argmax"), (SD((4, 151936), dtype),)
        for rows, variant, extra in ((1, "", {}), (32, "", {}), (32, " cap", dict(soft_cap=30.0))):
            shapes = SD((rows, 896), "bfloat16"), SD((151936, 896), "bfloat16")
            name = f"{impl} lm_head_argmax {rows} rows{variant}"
            yield name, impl, partial(run, "lm_head_argmax", **extra), shapes
    experts = partial(kernels_pallas.run_kernel, "triton", "gated_experts", activation=jax.nn.silu)
    for tokens, dtype in (
        (1, "bfloat16"),
        (64, "float16"),
        (200, "bfloat16"),
        (512, "bfloat16"),
        (2048, "float16"),
    ):
        gate = SD((128, 768, 2048), dtype)
        choices = SD((tokens, 8), jnp.float32), SD((tokens, 8), jnp.int32)
        shapes = SD((tokens, 2048), dtype), *choices, gate, gate, SD((128, 2048, 768), dtype)
        yield f"triton gated_experts {tokens} tokens {dtype}", "triton", experts, shapes


def _attention(kernel, q, k, v, start, length, table=None, sinks=None):
    return kernel(q, k, v, start, length, table_BP=table, sink_N=sinks)


def _compile(gpu, name, impl, function, shapes, sharding):
    for old in Path(DUMP).iterdir():
        old.unlink()
    start = time.perf_counter()
    args = [SD(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    # Mosaic takes the target from the default device, Triton from the abstract mesh.
    with (
        jax.default_device(sharding.mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh),
    ):
        compiled = jax.jit(function).lower(*args).compile()
    resources = next(Path(DUMP).glob("*.resources.txt"), None)  # only Mosaic of the newest jax writes it
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())[1]) if resources else None
    temporaries = compiled.memory_analysis().temp_size_in_bytes // 1024
    seconds = time.perf_counter() - start
    for path in sorted(Path(DUMP).glob("*.ptx")):
        text = path.read_text(errors="ignore")
        if not re.search(r"prefill|decode|argmax|lm_head|experts_|mosaic", text):
            continue  # of XLA itself
        figures = _assemble(gpu, path)
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


def _assemble(gpu, path):
    """Registers and spilled bytes, as ptxas reports them."""
    major, minor = CARDS[gpu].capability
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    done = subprocess.run(
        [_ptxas(), "-v", f"-arch={arch}", "-o", os.devnull, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr)]
    return dict(registers=max(registers), spill_bytes=sum(spills))


def _ptxas() -> str | None:
    """The ptxas of the wheel, or else of the system: XLA may write PTX that only the newer one accepts."""
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/ptxas"))
    return str(next(wheels, "")) or shutil.which("ptxas")


if __name__ == "__main__":
    start(main)
