"""Kernels compiled to machine code for GPUs that are not present."""

import importlib.util

import compiled_programs
import pytest
from quick import full_except

pytestmark = [pytest.mark.full, pytest.mark.newest]


# Of some 280 and 220 calls, which the script compiles in 15 minutes.
KERNELS = {
    "h200": [
        "mosaic prefill_attention 256 bfloat16 window",
        "mosaic prefill_attention 128 bfloat16 ring",
        "mosaic decode_attention 64 bfloat16 pages",
        "mosaic decode_attention 128 bfloat16 ring",
        "mosaic lm_head_argmax 32 rows",
        "triton mamba_step 64 rows",
        "triton mamba_prefill 4 rows",
    ],
    "rtx4090": [
        "triton prefill_attention 256 float32 window",
        "triton decode_attention 128 bfloat16 ring",
        "triton prefill_attention 512 bfloat16 pages",
        "triton decode_attention 64 int4",
        "triton decode_attention 128 int8",
        "triton product int4 64",
        "triton product int8 8 ",
        "triton gated_experts 200",
        "triton gated_experts 512 tokens int",
        "triton gated_experts 64 tokens fp8",
        "triton gated_experts 64 tokens bfloat16 without gates",
        "triton product fp8 8 ",
        "triton int8_head_argmax 32",
        "triton summarize_logits bias",
        "triton rope_append 128 bfloat16 64 rows int4",
        "triton mamba_step 1 rows",
        "triton mamba_prefill 2 rows",
    ],
}


@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
@pytest.mark.parametrize("gpu", full_except((), KERNELS, soak=["rtx4090"]))
def test_kernels_compile(gpu):
    only = ",".join(KERNELS[gpu])
    (found,) = compiled_programs.run("--program=kernels", f"--target={gpu}", f"--only={only}")["programs"]
    for name in KERNELS[gpu]:
        assert any(name in kernel for kernel in found["compiled"]), name
