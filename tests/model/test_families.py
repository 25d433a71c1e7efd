"""Families with other structures, beyond their logits: files with fused or stacked matrices, longrope's
switch, rejected features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from layer_changes import with_experts
from random_matrices import random_params, write_checkpoint

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.compress import awq
from xinfer_jax.config.model_config import with_fixed_rope
from xinfer_jax.families.naming import file_specs
from xinfer_jax.feed_forward import experts
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

SWITCHING = "phi3-longrope-both-partial"  # at 32 tokens

forward = jax.jit(xj.forward, static_argnames="config")


def build(name):
    config = cases.CASES[name].config
    return config, cases.params_from(config, cases.random_tensors(config, 0))


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("name", ["phi3-defaults", "moe-some-layers-dense"])
def test_separate_and_fused_matrices_load_alike(tmp_path, name, fused):
    opened = open_checkpoint(write_checkpoint(tmp_path, cases.CASES[name].hf, fused), dtype="float32")
    tiny.assert_same_shapes(opened)
    assert_equal(opened.read().params, build(name)[1])


@pytest.mark.unit
@pytest.mark.parametrize(
    "name, rows, fault",
    [
        ("self_attn.qkv_proj", 143, r"has shape \[143, 48\], the config asks for \[144, 48\]$"),
        (
            "mlp.gate_up_proj",
            0,
            r"missing \S*gate_proj.weight \[80, 48\], missing \S*up_proj.weight \[80, 48\]$",
        ),
    ],
)
def test_errors_name_a_damaged_fused_matrix(tmp_path, name, rows, fault):
    """rows: the number of rows that are left of it. 0: it is missing."""
    case = cases.CASES["phi3-defaults"]
    weights = cases.fuse_tensors(case.config, cases.random_tensors(case.config, 0))
    matrix = weights.pop(f"model.layers.1.{name}.weight")
    if rows:
        weights[f"model.layers.1.{name}.weight"] = matrix[:rows].copy()
    with pytest.raises(xj.InputError, match=fault):
        xj.load_model(tiny.write(tmp_path, case.hf, weights=weights, with_tokenizer=False))


@pytest.mark.full
def test_int8_logits_are_close_to_float32():
    """The model has norms around both parts of each layer."""
    name = "gemma2-no-caps-layer-types"
    config, params = build(name)
    prompt = np.array([cases.prompts(cases.CASES[name])[1]])
    exact, near = (
        np.asarray(forward(tree, config, prompt)[0])
        for tree in (params, awq.quantized_params(params, "int8"))
    )
    assert 0 < np.abs(near - exact).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.full
@pytest.mark.parametrize(
    "name, quantize",
    [("moe-some-layers-dense", "int8"), ("qwen3-next-sparse-step", "int4"), ("glm4-moe-groups", "int8")],
)
def test_quantized_experts(tmp_path, name, quantize):
    """The experts are loaded from stacked tensors and from one tensor for each expert. The stacked tensors
    have interleaved projections too.
    """
    config, params = build(name)
    paths = [write_checkpoint(tmp_path / str(fused), cases.CASES[name].hf, fused) for fused in (True, False)]
    models = [xj.load_model(path, dtype="float32", quantize=quantize) for path in paths]
    assert_equal(*(model.params for model in models))
    params = models[0].params

    def in_float(leaf):
        if not is_quantized(leaf):
            return leaf
        return jax.vmap(type(leaf).dequantize)(leaf) if len(leaf.shape) > 2 else leaf.dequantize()

    layer = next(layer for layer in params["layers"] if "experts" in layer)
    exact = jax.tree.map(in_float, layer, is_leaf=is_quantized)
    assert is_quantized(layer["experts"]["up"]["weight"]) and not is_quantized(layer["router"]["weight"])
    for tokens in (1, 20):  # a few experts, and all of them
        x_BTD = jax.random.normal(jax.random.key(tokens), (1, tokens, config.hidden_size))
        mix = jax.jit(experts.mixture_of_experts, static_argnums=2)
        np.testing.assert_allclose(mix(x_BTD, layer, config), mix(x_BTD, exact, config), atol=1e-4)


# --- rejected -----------------------------------------------------------------------------------------------


def test_quantized_experts_cannot_be_written(tmp_path):
    _, params = build("moe-defaults")
    with pytest.raises(xj.InputError, match="weights of experts, .* cannot be written"):
        awq.quantized_params(params, "int8")
    path = write_checkpoint(tmp_path / "float", cases.CASES["moe-defaults"].hf)
    quantized = xj.load_model(path, quantize="int8")
    with pytest.raises(xj.InputError, match="experts in int8 or int4 cannot be saved"):
        xj.save_model(quantized.params, quantized.config, tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["olmo3-two-ropes-new", "gemma2-no-caps-layer-types", "moe-defaults", "gpt-oss-published"]
)
def test_scales_need_a_norm_to_fold_into(name):
    config, params = build(name)
    with pytest.raises(xj.InputError, match=f"activation-aware.*{config.model_type}.*round to nearest"):
        awq.awq_params(params, config, [[1, 2, 3]])


# --- longrope -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_longrope_is_not_continued_across_its_switch():
    config, params = build(SWITCHING)
    prompts = cases.prompts(cases.CASES[SWITCHING])
    options = xj.GenerateOptions(max_tokens=24)
    for rows in ([prompts[1]], [prompts[0], prompts[2]]):  # across the switch; on both sides of it
        with pytest.raises(xj.InputError, match="longrope.*32 tokens"):
            xj.generate(params, config, rows, options)
    with pytest.raises(xj.InputError, match="longrope.*33"):
        xj.init_cache(config, 1, 33)


@pytest.mark.full
@pytest.mark.parametrize("row", [0, 2])
def test_longrope_below_and_above_its_switch(row):
    """The cache has keys rotated by the factors that a forward pass over the whole sequence uses."""
    config, params = build(SWITCHING)
    prompt = cases.prompts(cases.CASES[SWITCHING])[row]
    fixed = with_fixed_rope(config, len(prompt), len(prompt) + 3)
    tokens = np.array([prompt + [4, 5, 6]])
    want, _ = forward(params, config, tokens)
    cache = xj.init_cache(fixed, 1, 96)
    got = []
    for part in (tokens[:, :4], tokens[:, 4:-1], tokens[:, -1:]):
        logits, cache = forward(params, fixed, part, cache)
        got.append(logits)
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5 * np.abs(want).max())


# --- experts ------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_of_one_expert(dtype):
    """If there are many experts, many tokens are sorted by expert. Results and gradients are equal to the
    ones of each token alone. At one shape, the bits of a row depend neither on its place nor on other rows.
    """
    config = with_experts(cases.CASES["moe-defaults"].config, num_experts=8, num_experts_per_tok=2)
    layer = random_params(config, dtype=dtype)["layers"][0]
    x_TD, other_TD = jax.random.normal(jax.random.key(1), (2, 30, config.hidden_size), dtype)

    def together(x_TD, layer):
        return experts.mixture_of_experts(x_TD[None], layer, config)[0]

    def alone(x_TD, layer):
        return jax.vmap(lambda x_D: together(x_D[None], layer)[0])(x_TD)

    run = jax.jit(together)
    out_TD = run(x_TD, layer)
    near = dict(atol=1e-5 if dtype == "float32" else 0.02)
    np.testing.assert_allclose(*(np.asarray(x, "float32") for x in (out_TD, alone(x_TD, layer))), **near)
    order = np.random.RandomState(0).permutation(30)
    mixed_TD = x_TD[order].at[::2].set(other_TD[::2])
    np.testing.assert_array_equal(run(mixed_TD, layer)[1::2], out_TD[order][1::2])
    if dtype == "float32":
        gradients = [
            jax.jit(jax.grad(lambda layer, f=f: jnp.sum(f(x_TD, layer) ** 2)))(layer)
            for f in (together, alone)
        ]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), *gradients)


@pytest.mark.full
def test_an_expert_that_was_not_chosen_may_overflow():
    config, params = build("moe-defaults")
    layer = dict(params["layers"][0])
    x_BTD = jnp.ones((1, 20, config.hidden_size))
    logits_X = layer["router"]["weight"].sum(1)
    broken = {
        name: {"weight": leaf["weight"].at[jnp.argmin(logits_X)].set(jnp.inf)}
        for name, leaf in layer["experts"].items()
    }
    want = experts.mixture_of_experts(x_BTD, layer, config)
    np.testing.assert_array_equal(
        experts.mixture_of_experts(x_BTD, layer | {"experts": broken}, config), want
    )


@pytest.mark.unit
def test_every_sparse_layer_has_a_router():
    config = xj.ModelConfig.from_hf(cases.CASES["moe-defaults"].hf | dict(mlp_only_layers=[1]))
    assert ["router" in layer for layer in file_specs(config)["layers"]] == [True, False, True]
