"""gpt-oss: sinks in the softmax of attention, experts with biases and clamped values."""

import dataclasses

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from layer_changes import with_experts
from random_matrices import write_checkpoint

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.config.layer_spec import ClampedSwiglu
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

CASE = cases.CASES["gpt-oss-published"]
SMALL = cases.Case(CASE.hf | dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]))


@pytest.fixture(scope="module")
def model():
    return family_checks.small_model(SMALL)


@pytest.mark.full
def test_generated_tokens_by_cache_and_drafts(model):
    family_checks.check_tokens(model)


@pytest.mark.full
def test_engine_bits_alone_and_beside_others(model):
    """The engine has pages in int8, and the bias of keys is kept separately."""
    family_checks.check_engine_bits(model)


@pytest.mark.full
def test_sinks_in_kernels(queries=3):
    """The kernels, emulated, and plain jnp. A sink far above all scores leaves nothing of the values."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, queries, 6, 16), (2, 2, 64, 16), (2, 2, 64, 16)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    kv = dataclasses.replace(uncached_kv(k, v), window=20)
    length_B = jnp.array([queries + 11, queries + 3])
    sink_N = jnp.array([-3.0, 0, 1, 2, 5, 1e4])
    visible = VisibleKeys(length_B - queries, length_B)
    out, emulated = (
        attention(q, kv, visible, Scoring(0.3), sink_N, run_config=RunConfig(impl))
        for impl in ("xla", "interpret")
    )
    np.testing.assert_allclose(out, emulated, atol=1e-5)
    plain = attention(q, kv, visible, Scoring(0.3), run_config=RunConfig("xla"))
    share = np.asarray(out / plain)  # of the keys in the softmax: the same for all numbers of a value
    np.testing.assert_allclose(share, share[..., :1] * np.ones(16), rtol=1e-3)
    assert share.max() < 1 and not share[:, :, -1].any()
    none = visible._replace(length_B=jnp.zeros(2, jnp.int32))  # queries that see no key
    assert not attention(q, kv, none, Scoring(0.3), sink_N, run_config=RunConfig("xla")).any()


def test_experts_by_number_of_tokens(model):
    """A token, tiles of tokens, and some that XLA gives all experts: the same outputs."""
    params, config, _ = model
    layer = params["layers"][0]
    x_BTD = 3 * jax.random.normal(jax.random.key(1), (1, 9, config.hidden_size))
    run = jax.jit(lambda x, config: mixture_of_experts(x, layer, config), static_argnums=1)
    each = np.concatenate([run(x_BTD[:, i : i + 1], config) for i in range(9)], 1)
    every = with_experts(config, num_experts_per_tok=3)  # no tiles
    np.testing.assert_allclose(run(x_BTD, config), each, atol=2e-5)
    assert not np.allclose(run(x_BTD, every), each, atol=1e-2)
    limited = with_experts(config, swiglu=dataclasses.replace(config.experts.swiglu, limit=100.0))
    assert not np.allclose(run(x_BTD, limited), each, atol=1e-2)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_stored_experts(tmp_path, quantize, model):
    """Inputs first, gate and up by turns; quantized while loading, without their biases."""
    params, config, _ = model
    path = write_checkpoint(tmp_path, SMALL.hf, fused=True, seed=3)
    loaded = xj.load_model(path, dtype="float32", quantize=quantize)
    assert loaded.config == config
    if quantize is None:
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
        return
    for name, leaf in loaded.params["layers"][1]["experts"].items():
        exact = params["layers"][1]["experts"][name]
        assert is_quantized(leaf["weight"])
        np.testing.assert_array_equal(leaf["bias"], exact["bias"])
        off = jax.vmap(lambda x: x.dequantize())(leaf["weight"]) - exact["weight"]
        assert jnp.abs(off).max() < jnp.abs(exact["weight"]).max() / (100 if quantize == "int8" else 6)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9 is above 8"),
        (dict(swiglu_limit=None), "swiglu_limit must be"),
        (dict(sliding_window=None), "layer_types names sliding_attention"),
        (dict(sliding_window=None, layer_types=None), "sliding_window must be a number"),
        (dict(layer_types=["chunked_attention"] * 3), "layer type 'chunked_attention' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


def test_defaults():
    """An almost empty config.json has the defaults of transformers."""
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    config = xj.ModelConfig.from_hf(dict(model_type="gpt_oss", num_attention_heads=8, **sizes))
    assert config.layer_windows == (128, None, 128, None)
    assert (config.head_dim, config.num_experts, config.num_experts_per_tok) == (64, 128, 4)
    assert (config.experts.swiglu, config.rms_norm_eps) == (ClampedSwiglu(1.702, 7.0), 1e-5)
    assert not config.rope.truncate and config.rope.factor == 32 and config.rope.rope_theta == 150000
    assert config.context_length == 131072


def test_a_missing_stacked_tensor_is_named(tmp_path, model):
    _, config, _ = model
    tensors = cases.fuse_tensors(config, cases.random_tensors(config, 3))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    del tensors["model.layers.1.mlp.experts.gate_up_proj"]
    path = tiny.write(tmp_path, SMALL.hf, weights=tensors, with_tokenizer=False)
    with pytest.raises(xj.InputError, match=r"missing model.layers.1.mlp.experts.gate_up_proj \[8, 48, 40\]"):
        xj.load_model(path)
