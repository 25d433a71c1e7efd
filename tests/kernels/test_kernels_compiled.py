"""Every kernel compiled to machine code for GPUs that are not present: no register spills; tensor cores and
bulk copies are used.
"""

import importlib.util

import compiled_programs
import pytest

pytestmark = [pytest.mark.full, pytest.mark.newest]


@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
@pytest.mark.parametrize("gpu, only", [("h200", "mosaic"), ("rtx4090", "triton")])  # the rest by the script
def test_kernels_compile_without_spills(gpu, only):
    kernels = compiled_programs.run("--program=kernels", f"--target={gpu}", f"--only={only}")["kernels"]
    assert len(kernels) >= 14
    # Two programs share the 228 KiB of a multiprocessor, each with a KiB of the system's.
    for kernel in kernels:
        if kernel["shared_bytes"] and "prefill" not in kernel["kernel"] and "256" not in kernel["kernel"]:
            assert kernel["shared_bytes"] < 115_000, kernel
