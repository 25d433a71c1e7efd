"""The TPU kernels without a TPU: emulated on a CPU with race detection, against their references."""

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas
from kernels_pallas import SideBySide

SD = jax.ShapeDtypeStruct
Q = SD((2, 1, 4, 64), jnp.bfloat16)
KV = SideBySide(SD((2, 2, 64, 128), jnp.bfloat16))


def test_a_tpu_selects_its_kernels_and_xla_for_the_rest():
    with kernels_pallas.assume_device(None, "TPU v5 lite", "tpu"):
        assert kernels_pallas.select("decode_attention", None, Q, KV, None) == ("tpu", "TPU v5 lite")
        assert kernels_pallas.select("argmax", None, SD((1, 10), jnp.float32)).impl == "xla"
        assert kernels_pallas.select("product", "tpu", Q).reason == "TPUs have no kernel product"
        assert kernels_pallas.unavailable_reason("tpu") is None
        assert "9.0 (TPU v5 lite)" in kernels_pallas.unavailable_reason("mosaic")
        apart = SD((2, 2, 64, 64), jnp.bfloat16)
        assert kernels_pallas.select("decode_attention", None, Q, apart, apart).impl == "xla"
    assert "needs a TPU (no NVIDIA GPU or TPU here)" in kernels_pallas.unavailable_reason("tpu")
    with pytest.raises(ValueError, match="side by side are for TPUs"):
        kernels_pallas.select("decode_attention", "triton", Q, KV, None)
