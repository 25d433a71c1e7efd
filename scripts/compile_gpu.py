"""Compiles every kernel for NVIDIA GPUs on a machine that has none, and prints registers, spills, memory and
instructions.

    pip install 'jax[cuda13-local]' nvidia-cuda-nvcc      # the CUDA plug-in and ptxas; no driver is needed
    python scripts/compile_gpu.py --gpus=h200,a100,rtx4090 --only=prefill

One line per kernel, one JSON object as the last line. Exit code 1: something spills, or lacks the
instructions it is written for; 2: the plug-in or ptxas is missing.
"""

from one_line import InputError, start

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
# Read when jax and Mosaic are imported: where both leave the PTX of what they compile.
os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": DUMP}
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={DUMP} --xla_dump_emitter_re=ptx"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import flags  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import kernels_pallas  # noqa: E402

GPUS = flags.DEFINE_list("gpus", ["h200", "a100", "rtx4090"], "Targets: h200, a100, rtx4090.")
ONLY = flags.DEFINE_string("only", "", "Compile only the kernels with this in their name.")

# name, capability, multiprocessors, shared memory of a block in bytes, memory GB/s, L2 MB, GHz, memory GB
_CARDS = {
    "h200": ("NVIDIA H200", (9, 0), 132, 232448, 4800, 50, 1.98, 141),
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 2039, 40, 1.41, 80),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 1008, 72, 2.52, 24),
}
_WANTED = {"mosaic": r"wgmma\.mma_async", "triton": r"wgmma\.mma_async|mma\.sync"}  # in kernels that multiply
SD = jax.ShapeDtypeStruct


def main(argv: list[str]) -> None:
    if unknown := set(GPUS.value) - set(_CARDS):
        raise InputError(f"--gpus knows {', '.join(_CARDS)}, got {unknown.pop()!r}")
    if not (ptxas := _ptxas()):
        raise InputError("no ptxas: pip install nvidia-cuda-nvcc, or put CUDA's bin on the PATH")
    version = (
        subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    )
    print(f"jax {jax.__version__}, {ptxas}: {version}")
    results = []
    for gpu in GPUS.value:
        try:
            sharding = _sharding(gpu)
        except Exception as error:  # whatever a missing or foreign plug-in raises
            raise InputError(
                f"no CUDA plug-in that compiles without a device ({error}): pip install 'jax[cuda13-local]'"
            ) from error
        for name, impl, function, shapes in _cases(gpu):
            if ONLY.value in name:
                results += _compiled(gpu, name, impl, function, shapes, sharding)
    shutil.rmtree(DUMP)
    print(json.dumps({"jax": jax.__version__, "kernels": results}))
    sys.exit(int(any(result["spill_bytes"] or not result["as_written"] for result in results)))


def _cases(gpu):
    """(name, implementation, function, shapes) of what is compiled: shapes of Qwen2.5 and their
    neighbours.
    """
    for impl in ("mosaic", "triton") if gpu == "h200" else ("triton",):
        run = partial(kernels_pallas.run, impl)
        formats = [(64, "float16")] + [(width, "bfloat16") for width in (64, 80, 96, 128, 256)]
        formats += [(width, "float32") for width in (80, 128, 256)] * (impl == "triton")
        for width, dtype in formats:
            rows, cache = SD((4,), jnp.int32), SD((4, 2, 4096, width), dtype)
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


def _compiled(gpu, name, impl, function, shapes, sharding):
    for left in Path(DUMP).iterdir():
        left.unlink()
    start = time.perf_counter()
    args = [SD(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    # Mosaic takes the target from the default device, Triton from the abstract mesh.
    with (
        jax.default_device(sharding.mesh.devices.flat[0]),
        jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh),
    ):
        compiled = jax.jit(function).lower(*args).compile()
    resources = next(Path(DUMP).glob("*.resources.txt"), None)  # only Mosaic of the newest jax tells
    shared = int(re.search(r"smem_scratch_bytes=(\d+)", resources.read_text())[1]) if resources else None
    temporaries = compiled.memory_analysis().temp_size_in_bytes // 1024
    seconds = time.perf_counter() - start
    for path in sorted(Path(DUMP).glob("*.ptx")):
        text = path.read_text(errors="ignore")
        if not re.search(r"prefill|decode|argmax|lm_head|mosaic", text):
            continue  # XLA's own
        figures = _assembled(gpu, path)
        tensor = len(re.findall(_WANTED.get(impl, "never"), text))
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
        flag = " SPILLS" * bool(figures["spill_bytes"]) + " LACKS INSTRUCTIONS" * (not as_written)
        print(
            f"{gpu:8s} {name:52s} {figures['registers']:3d} registers {figures['spill_bytes']:4d} B spilled"
            f" {shared or '-':>6} B shared {temporaries:6d} KiB temporaries {tensor:3d} tensor {copies:3d}"
            f" async copies {seconds:5.1f} s{flag}",
            flush=True,
        )
        yield result


def _assembled(gpu, path):
    major, minor = _CARDS[gpu][1]
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


def _sharding(gpu):
    """A replicated sharding over one imaginary card."""
    name, (major, minor), multiprocessors, shared, bandwidth, l2, clock, memory = _CARDS[gpu]
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    config = f"""
      gpu_device_info {{
        name: "{name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
        cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared}
        shared_memory_per_core: {shared + 1024}
        core_count: {multiprocessors} fpus_per_core: 128 clock_rate_ghz: {clock}
        memory_bandwidth: {bandwidth * 10**9} l2_cache_size: {l2 * 2**20} device_memory_size: {memory * 10**9}
        runtime_version: "12.8.0" driver_version: "13.0.0" compile_time_toolkit_version: "12.8.0"
        dnn_version: "9.10.0"
      }}
      platform_name: "CUDA" device_description_str: "{name}" dnn_version_info {{ major: 9 minor: 10 }}"""
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    return jax.sharding.NamedSharding(
        topologies.make_mesh(topology, (1,), ("one",)), jax.sharding.PartitionSpec()
    )


def _ptxas() -> str | None:
    """That of the wheel before that of the system: XLA may write PTX that only the newer one reads."""
    wheels = (path for folder in sys.path for path in Path(folder).glob("nvidia/cu*/bin/ptxas"))
    return str(next(wheels, "")) or shutil.which("ptxas")


if __name__ == "__main__":
    start(main)
