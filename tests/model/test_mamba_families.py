"""Bamba, Falcon-H1 and Granite 4: layers of Mamba-2 and attention. Factors of Falcon-H1 equal factors of its
matrices, also through a cache. Their config.json in old and new forms, and settings that are rejected.
"""

import dataclasses

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.estimates.plan_estimates import num_weights
from xinfer_jax.families.writing import to_hf
from xinfer_jax.mixers.mamba2 import Mamba2Spec

pytestmark = pytest.mark.oldest

FALCON = cases.CASES["falcon-h1-published"]
FALCON_BIAS = cases.CASES["falcon-h1-norm-after-gate-bias"]
GRANITE = cases.CASES["granite-hybrid-published"]
BAMBA = cases.CASES["bamba-published"]
OF_FAMILY = {case.hf["model_type"]: case for case in (FALCON, GRANITE, BAMBA)}


@pytest.fixture(scope="module")
def model():
    """One layer of Falcon-H1, whose matrices have biases."""
    return family_checks.small_model(FALCON_BIAS, num_hidden_layers=1)


# --- factors ------------------------------------------------------------------------------------------------


def without_factors(params, config):
    """The model whose matrices and biases have the factors of its attention and MLP."""
    (layer,) = config.layers
    (mamba, attention) = layer.mixers
    plain = LayerSpec((mamba, AttentionSpec(qkv_bias=True, o_bias=True)), MlpSpec(bias=True))
    (leaves,) = params["layers"]
    factors = dict(
        k=attention.key_multiplier,
        o=attention.out_multiplier,
        gate=layer.mlp.gate_multiplier,
        down=layer.mlp.down_multiplier,
    )
    changed = {name: {k: f * x for k, x in leaves[name].items()} for name, f in factors.items()}
    for name in "qkv":
        leaf = changed.get(name, leaves[name])
        changed[name] = leaf | {"weight": attention.in_multiplier * leaf["weight"]}
    return params | {"layers": (leaves | changed,)}, dataclasses.replace(config, layers=(plain,))


def test_factors_are_those_of_matrices(model):
    """Logits, and the weights of attention."""
    params, config, prompts = model
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts[:2])
    pairs = [(params, config), without_factors(params, config)]
    found, wanted = (
        np.asarray(jax.jit(xj.forward, static_argnums=1)(p, c, tokens_BT, None, num_tokens_B)[0])
        for p, c in pairs
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    weights = jax.jit(
        lambda p, c: xj.attention_weights(p, c, tokens_BT[:1, :5], layers=[0])[0], static_argnums=1
    )
    found, wanted = (weights(*pair) for pair in pairs)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.full
def test_cached_equals_uncached_however_it_is_split(model):
    cache = family_checks.check_chunks(model, (3, 77))
    assert [type(layer).__name__ for layer in cache.layers] == ["Recurrent", "Contiguous"]


@pytest.mark.soak
@pytest.mark.parametrize("case", OF_FAMILY.values(), ids=OF_FAMILY)
def test_long_answers_of_transformers(case):
    """Prompts whose lengths are around those of blocks, and greedy answers of 64 tokens."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    transformers.logging.set_verbosity_error()
    config = case.config
    tensors = cases.random_tensors(config, 5)
    theirs = cases.hf_model(case.hf, tensors)
    random = np.random.RandomState(3)
    prompts = [random.randint(0, cases.VOCAB, n).tolist() for n in (1, 3, 63, 64, 65, 200)]
    params = cases.params_from(config, tensors)
    options = xj.GenerateOptions(max_tokens=64, eos_token_ids=())
    out = xj.generate(params, config, prompts, options)
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        wanted, gaps = cases.hf_greedy(theirs, prompt, 64)
        clear = next((i for i, gap in enumerate(gaps) if gap < 1e-3), 64)
        assert tokens[:clear] == wanted[:clear]


def test_numbers_of_published_models():
    """Rounded, they are the published ones: 9.78, 6.9 and 0.5 billion."""
    numbers = {"bamba-9b": 9_780_235_392, "granite4-h-tiny": 6_939_037_248, "falcon-h1-0.5b": 521_411_104}
    configs = {name: xj.ModelConfig.from_hf(SHAPES[name]) for name in numbers}
    assert {name: num_weights(config) for name, config in configs.items()} == numbers


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [x for x in cases.CASES if cases.CASES[x].hf["model_type"] in OF_FAMILY])
def test_configs_are_written_and_read(name):
    config = cases.CASES[name].config
    assert xj.ModelConfig.from_hf(to_hf(config)) == config


def test_types_of_layers_in_old_and_new_names():
    """Bamba lists its layers with attention. Without a list, all are Mamba-2."""
    of_type = ("mamba", "full_attention", "linear_attention")
    for case in (GRANITE, BAMBA):
        hf = {key: x for key, x in case.hf.items() if key not in ("layer_types", "attn_layer_indices")}
        for name in ("layer_types", "layers_block_type"):
            assert xj.ModelConfig.from_hf(hf | {name: of_type}) == case.config
        layers = xj.ModelConfig.from_hf(hf).layers
        assert [layer.mixer_of(Mamba2Spec.kind) is not None for layer in layers] == [True] * 3
    assert to_hf(GRANITE.config)["layer_types"] == ["mamba", "attention", "mamba"]
    assert to_hf(BAMBA.config)["attn_layer_indices"] == [1]


def test_a_model_without_mamba_needs_no_numbers_of_it():
    hf = cases.CASES["granite-hybrid-attention-alone"].hf | dict(mamba_n_heads=None)
    assert xj.ModelConfig.from_hf(hf) == cases.CASES["granite-hybrid-attention-alone"].config


def test_rotated_parts_of_heads():
    assert BAMBA.config.rope.partial_rotary_factor == 0.5
    assert xj.ModelConfig.from_hf(BAMBA.hf | dict(partial_rotary_factor=1.0)).rope.rotated_width(12) == 12
    assert GRANITE.config.ropes == ()


@pytest.mark.parametrize(
    "model_type, change, message",
    [
        (
            "bamba",
            dict(attn_layer_indices=[3]),
            r"attn_layer_indices must list layers from 0 to 2, got \[3\]",
        ),
        ("bamba", dict(attn_layer_indices=1), "attn_layer_indices must list layers from 0 to 2, got 1"),
        ("bamba", dict(attn_layer_indices=0), "attn_layer_indices must list layers from 0 to 2, got 0"),
        (
            "bamba",
            dict(layer_types=["mamba", "moe", "mamba"]),
            "layer type 'moe' is not supported: only mamba",
        ),
        ("bamba", dict(layer_types=["mamba"]), "one type for each of the 3 layers"),
        ("bamba", dict(layer_types=[1, 2, 3]), "layer type 1 is not supported: only mamba and attention are"),
        ("bamba", dict(mamba_n_heads=7), "7 heads of mamba_d_head 13 have 91 features, and mamba_expand"),
        ("bamba", dict(mamba_n_heads=200), "200 heads of mamba_d_head 1 have 200 features"),
        (
            "bamba",
            dict(mamba_d_head=20),
            r"6 heads of mamba_d_head 20 have 120 .* hidden_size is 96: the num",
        ),
        ("bamba", dict(mamba_d_head=None), "mamba_d_head must be a number above 0, got None"),
        ("bamba", dict(mamba_d_head="wide"), "mamba_d_head must be a number above 0, got 'wide'"),
        ("bamba", dict(mamba_n_groups=4), "mamba_n_heads 6 is not a multiple of mamba_n_groups 4"),
        ("bamba", dict(mamba_d_conv=1), "mamba_d_conv must be at least 2, got 1"),
        ("bamba", dict(mamba_d_state=0), "mamba_d_state must be a number above 0, got 0"),
        ("bamba", dict(mamba_expand=1.5), "mamba_expand must be an integer, got 1.5"),
        ("bamba", dict(mamba_conv_bias=1), "mamba_conv_bias must be true or false, got 1"),
        ("bamba", dict(mamba_proj_bias=None), "mamba_proj_bias must be true or false, got None"),
        ("bamba", dict(hidden_act="relu2"), "hidden_act 'relu2' is not supported: Mamba-2's is 'silu'"),
        ("bamba", dict(partial_rotary_factor=0.3), "partial_rotary_factor 0.3 rotates 3 of 12"),
        ("falcon_h1", dict(mamba_d_ssm=70), "6 heads of mamba_d_head 12 have 72 .* mamba_d_ssm is 70"),
        (
            "falcon_h1",
            dict(projectors_bias=True),
            "projectors_bias True is not supported with mamba_proj_bias F",
        ),
        ("falcon_h1", dict(ssm_multipliers=[1, 2]), r"ssm_multipliers must have 5 numbers, got \[1, 2\]"),
        ("falcon_h1", dict(ssm_multipliers=1.0), "ssm_multipliers must be a list of numbers, got 1.0"),
        ("falcon_h1", dict(mlp_multipliers=[1, 0]), "mlp_multipliers must be a number above 0, got 0"),
        ("falcon_h1", dict(mlp_multipliers=[1.0]), "mlp_multipliers must have 2 numbers"),
        ("falcon_h1", dict(key_multiplier=0), "key_multiplier must be a number above 0, got 0"),
        ("falcon_h1", dict(lm_head_multiplier=None), "lm_head_multiplier must be a number above 0, got None"),
        ("falcon_h1", dict(mamba_rms_norm="yes"), "mamba_rms_norm must be true or false, got 'yes'"),
        ("granitemoehybrid", dict(position_embedding_type="alibi"), "'alibi' is not supported: only 'rope'"),
        ("granitemoehybrid", dict(num_local_experts=-1), "num_local_experts must be an integer from 0"),
        ("granitemoehybrid", dict(num_experts_per_tok=7), "num_experts_per_tok 7 is above 6"),
        (
            "granitemoehybrid",
            dict(shared_intermediate_size=0),
            "shared_intermediate_size must be a number abo",
        ),
        (
            "granitemoehybrid",
            dict(attention_multiplier=None),
            "attention_multiplier must be a number above 0",
        ),
        ("granitemoehybrid", dict(num_attention_heads=5), "hidden_size 48 is not a multiple of"),
    ],
)
def test_rejected_settings(model_type, change, message):
    with pytest.raises(xj.InputError, match=message) as error:
        xj.ModelConfig.from_hf(OF_FAMILY[model_type].hf | change)
    assert "\n" not in str(error.value)


def test_factors_of_inputs_of_matrices_are_not_supported(model):
    _, config, _ = model
    with pytest.raises(xj.InputError, match="which has an MLP with factors: remedy"):
        check_supported(config, "scales", "it is", "remedy")
