"""RMS norms of 16-bit numbers: when a family multiplies by the weight, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest

from xinfer_jax.mixers.linear_attention import _gated_norm
from xinfer_jax.weights.layers import norm, rms_norm

BF16 = jnp.bfloat16
WIDTH = 64
CASES = {case.config.model_type: case for case in cases.CASES.values()}  # one of each family
OFFSETS = dict.fromkeys(CASES) | dict(
    gemma=1.0, gemma2=1.0, gemma3_text=1.0, qwen3_next=1.0, qwen3_5_text=1.0, qwen3_5_moe_text=1.0,
    gemma4_text=0.0, gemma4_unified_text=0.0, gpt_oss=0.0, olmo2=0.0, olmo3=0.0, cohere2=0.0, nemotron_h=0.0,
)  # fmt: skip


def numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of whole numbers, whose mean of squares is exact; a weight, and a gate. In bfloat16."""
    random = np.random.RandomState(0)
    x = random.randint(-99, 99, (64, WIDTH))
    weight = 1 + 0.3 * random.standard_normal(WIDTH)
    return x.astype(BF16), weight.astype(BF16), random.standard_normal(x.shape).astype(BF16)


def test_each_family_rounds_as_it_does_in_transformers():
    """Llama rounds and then multiplies, Gemma and others multiply in float32 and round last."""
    x, weight, _ = numbers()
    x32 = x.astype(np.float32)
    y32 = x32 / np.sqrt(np.square(x32).mean(-1, keepdims=True) + np.float32(1e-6))
    rounded = (weight.astype(np.float32) * y32.astype(BF16).astype(np.float32)).astype(BF16)
    ours = jax.jit(rms_norm, static_argnums=(2, 3))
    assert {name: case.config.norm_offset for name, case in CASES.items()} == OFFSETS
    for offset in {*OFFSETS.values()}:
        expected = rounded if offset is None else (y32 * (offset + weight.astype(np.float32))).astype(BF16)
        np.testing.assert_array_equal(np.asarray(ours(x, weight, 1e-6, offset)), expected, str(offset))


@pytest.mark.full
@pytest.mark.oldest
@pytest.mark.parametrize("family", CASES)
def test_norms_equal_those_of_transformers_in_bfloat16(family):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[parity]'")
    config = CASES[family].config
    tensors = cases.random_tensors(config, 1)
    model = cases.hf_model(CASES[family].hf, tensors).to(torch.bfloat16)
    kind = "LayerNorm" if config.layers[0].centered_norms else "RMSNorm"
    norms = {name: module for name, module in model.named_modules() if kind in type(module).__name__}
    if any(layer.mixer_of("mamba2") for layer in config.layers):  # its gated norm is of float32 in both
        norms = {name: module for name, module in norms.items() if "Gated" not in type(module).__name__}
    assert len(norms) > config.num_hidden_layers
    ours = jax.jit(lambda x, weight: norm(x, {"norm": weight}, "norm", config))
    for name, module in norms.items():
        given = getattr(module, "weight", None)
        x, weight, gate = numbers()
        of_torch = [torch.from_numpy(a.astype(np.float32)).to(torch.bfloat16) for a in (x, weight, gate)]
        if given is not None:
            given.data = of_torch[1]
        if "Gated" in type(module).__name__:
            theirs = module(of_torch[0], of_torch[2])
            heads = x[:, None, None]
            found = _gated_norm(heads, gate[:, None], {"gated_norm": weight}, config)[:, 0]
        else:
            theirs = module(of_torch[0])
            weight = np.ones_like(weight) if given is None else weight
            found = ours(x, weight)
        expected = theirs.detach().float().numpy()
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), expected, name)
