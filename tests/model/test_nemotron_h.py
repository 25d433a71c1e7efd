"""Nemotron-H, whose layers are one mixer or one feed-forward, LFM2 MoE, LFM3 and Granite MoE: files, settings
that are rejected, and long prompts against transformers.
"""

import json
import math

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import AttentionSpec, MlpSpec
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.estimates.plan_estimates import num_weights
from xinfer_jax.families.reading import from_hf
from xinfer_jax.feed_forward.grouped_topk import GroupedTopkSpec
from xinfer_jax.mixers.mamba2 import Mamba2Spec
from xinfer_jax.weights.param_specs import param_specs

pytestmark = pytest.mark.oldest

NEMOTRON = cases.CASES["nemotron-h-published"]
OTHERS = (
    "lfm2-moe-published-tied",
    "lfm3-published-tied",
    "granitemoe-published-tied",
    "granitemoeshared-tied",
)
LENGTHS = (1, 3, 63, 64, 65, 200)  # around a block of Mamba-2, and several


@pytest.fixture(scope="module")
def model():
    return family_checks.small_model(NEMOTRON)


def published(name):
    """The parameters of a case, its config, and its tensors as files have them."""
    params, config, _ = family_checks.small_model(cases.CASES[name])
    tensors = xj.params.params_to_tensors(params, config)
    return params, config, {key: np.asarray(x) for key, x in tensors.items()}


# --- the model ----------------------------------------------------------------------------------------------


def test_a_layer_has_one_part_and_one_norm(model):
    params, config, _ = model
    mamba, experts, attention, *_, mlp = config.layers
    assert [layer.mixers[0].kind for layer in (mamba, attention)] == [Mamba2Spec.kind, AttentionSpec.kind]
    assert mlp.feed_forward == MlpSpec(gated=False) and not attention.attention.uses_rope
    assert experts.feed_forward.latent_size == 20 and mamba.feed_forward is None and not experts.mixers
    norms = [{name for name in layer if name in ("attn_norm", "mlp_norm")} for layer in params["layers"]]
    assert norms == [{"attn_norm" if layer.mixers else "mlp_norm"} for layer in config.layers]


@pytest.mark.soak
def test_chunks_tokens_and_draft_tokens(model):
    family_checks.check_chunks(model, (4, 20, 77))
    family_checks.check_tokens(model)


@pytest.mark.soak
def test_engine_bits_alone_and_next_to_others(model):
    family_checks.check_engine_bits(model)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nemotron-h-published", "nemotron-h-bias-no-latent", *OTHERS])
def test_long_prompts_and_answers_of_transformers(name):
    """64 greedy tokens after prompts around a block of tokens, up to the first near tie."""
    pytest.importorskip("transformers")
    params, config, _ = family_checks.small_model(cases.CASES[name])
    theirs = cases.hf_model(cases.CASES[name].hf, cases.random_tensors(config, 3))
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, cases.VOCAB, n).tolist() for n in LENGTHS]
    out = xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=64, eos_token_ids=()))
    forward = jax.jit(xj.forward, static_argnums=1)
    logits_BTV = forward(params, config, *_padded(prompts))[0]
    certain = 0
    for row, prompt, tokens in zip(np.asarray(logits_BTV), prompts, out.tokens, strict=True):
        want = cases.hf_logits(theirs, prompt)
        np.testing.assert_allclose(row[: len(prompt)], want, atol=1e-4)
        answer, gaps = cases.hf_greedy(theirs, prompt, 64)
        clear = int(np.argmax(np.append(gaps, 0) < 1e-3))
        assert tokens[:clear] == answer[:clear]
        certain += clear
    print(f"{name}: {certain} of {64 * len(LENGTHS)} tokens before a near tie")
    assert certain > 64 * 3


def _padded(prompts):
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    return tokens_BT, None, num_tokens_B


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nemotron-h-published", *OTHERS])
def test_saved_files_have_the_bytes_of_published_ones(tmp_path, name):
    """A draft head in the files is skipped, and copied with `like`."""
    params, config, tensors = published(name)
    drafting = {"mtp.layers.0.mixer.q_proj.weight": np.ones((3, 3), np.float32)}
    extra = drafting if name.startswith("nemotron") else {}
    hf = cases.CASES[name].hf
    path = tiny.write(tmp_path / "a", hf, weights=tensors | extra, with_tokenizer=False)
    model = xj.load_model(path, "float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    xj.save_model(model.params, model.config, tmp_path / "b")
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, again, tensors)
    assert from_hf(json.loads((tmp_path / "b" / "config.json").read_text())) == config
    xj.save_model(model.params, config, tmp_path / "c", like=path)
    assert load_file(tmp_path / "c" / "model.safetensors").keys() == (tensors | extra).keys()


OWN_NAMES = {
    "nemotron-h-published": {"backbone.": "model.", "embed_tokens": "embeddings"},
    "granitemoe-published-tied": {
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "router.layer": "router",
    },
    "lfm3-published-tied": {"gate_proj": "g_proj"},
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_names_of_transformers_are_read_too(name):
    params, config, tensors = published(name)
    for old, new in OWN_NAMES[name].items():
        tensors = {key.replace(old, new): x for key, x in tensors.items()}
    found = xj.params.params_from_tensors(config, tensors)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_published_names():
    _, _, tensors = published("nemotron-h-published")
    assert {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        "backbone.layers.0.norm.weight",
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.0.mixer.conv1d.weight",
        "backbone.layers.0.mixer.norm.weight",
        "backbone.layers.1.norm.weight",
        "backbone.layers.1.mixer.experts.7.up_proj.weight",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.shared_experts.down_proj.weight",
        "backbone.layers.1.mixer.fc1_latent_proj.weight",
        "backbone.layers.2.mixer.o_proj.weight",
        "backbone.layers.5.mixer.up_proj.weight",
    } <= tensors.keys()
    assert tensors["backbone.layers.0.mixer.conv1d.weight"].shape == (96 + 2 * 48, 1, 4)


def test_numbers_of_published_models():
    """All weights, and the weights of a token. Rounded, they are the published ones: 31.6 and 3.6, 8.1, 8.3
    and 1.6, 1.3 and 0.4 billion.
    """
    numbers = {
        "nemotron-3-nano-30b-a3b": (31_577_940_288, 3_580_076_352),
        "nemotron-h-8b": (8_100_852_736, 8_100_852_736),
        "lfm2-8b-a1b": (8_339_930_560, 1_557_740_992),
        "granite3-1b-a400m": (1_334_628_352, 428_658_688),
    }
    for name, (total, used) in numbers.items():
        config = from_hf(SHAPES[name])
        experts = [spec for spec in jax.tree.leaves(param_specs(config)) if ".experts." in spec.name]
        idle = config.num_experts - config.num_experts_per_tok
        unused = sum(math.prod(spec.shape[1:]) * idle for spec in experts)
        assert (num_weights(config), num_weights(config) - unused) == (total, used)


# --- settings -----------------------------------------------------------------------------------------------


def test_types_of_layers_have_three_names():
    """Names of today, older names, and letters. The number of layers follows from them."""
    names = ["linear_attention", "moe", "full_attention", "moe", "mlp"]
    older = ["mamba", "moe", "attention", "moe", "mlp"]
    base = {key: x for key, x in NEMOTRON.hf.items() if key not in ("hybrid_override_pattern",)}
    base["num_hidden_layers"] = 5
    found = [
        from_hf(base | more)
        for more in (
            dict(hybrid_override_pattern="ME*E-"),
            dict(layers_block_type=older),
            dict(layer_types=names),
            dict(layers_block_type=names, hybrid_override_pattern="M"),
        )
    ]
    assert all(config == found[0] for config in found)
    del base["num_hidden_layers"]
    assert from_hf(base | dict(hybrid_override_pattern="ME*E-")) == found[0]
    assert from_hf(base).num_hidden_layers == 4


def test_attention_has_no_biases():
    """As in transformers, whatever `attention_bias` says. Heads may have an odd width, without RoPE."""
    assert from_hf(NEMOTRON.hf | dict(attention_bias=True)) == NEMOTRON.config
    assert from_hf(NEMOTRON.hf | dict(head_dim=7)).head_dim == 7


BAD = {
    "nemotron-h-published": [
        (dict(hybrid_override_pattern="ME*MEX"), "hybrid_override_pattern has the letter 'X': use M"),
        (dict(hybrid_override_pattern=7), "hybrid_override_pattern must be a text with a letter .*, got 7"),
        (dict(hybrid_override_pattern=""), "must be a text with a letter for each layer, got ''"),
        (dict(hybrid_override_pattern="ME"), "num_hidden_layers is 6, .* has 2 layers: make them equal"),
        (dict(layers_block_type=["mamba", "conv"]), "layer type 'conv' is not supported: use one of linear"),
        (dict(layers_block_type=[None]), "layer type None is not supported"),
        (dict(layers_block_type="mamba"), "layers_block_type must list the types of layers, got 'mamba'"),
        (dict(n_groups=4), "mamba_num_heads 6 is not a multiple of n_groups 4"),
        (dict(mamba_num_heads=0), "mamba_num_heads must be a number above 0, got 0"),
        (dict(mamba_head_dim=None), "mamba_head_dim must be a number above 0, got None"),
        (dict(ssm_state_size=1.5), "ssm_state_size must be an integer, got 1.5"),
        (dict(conv_kernel=1), "conv_kernel must be at least 2, got 1"),
        (dict(use_bias=None), "use_bias must be true or false, got None"),
        (dict(use_conv_bias=1), "use_conv_bias must be true or false, got 1"),
        (dict(mlp_bias="no"), "mlp_bias must be true or false, got 'no'"),
        (dict(mamba_hidden_act="relu"), "mamba_hidden_act 'relu' is not supported: Mamba-2's is 'silu'"),
        (dict(mlp_hidden_act="gelu"), "mlp_hidden_act 'gelu' is not supported: use one of relu2, silu"),
        (dict(mlp_hidden_act=[]), r"mlp_hidden_act \[\] is not supported"),
        (dict(n_group=3), "n_routed_experts 8 is not a multiple of n_group 3"),
        (dict(topk_group=5), "topk_group 5 is above n_group 4"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9 is above 8"),
        (dict(moe_latent_size=0), "moe_latent_size must be a number above 0, got 0"),
        (dict(n_shared_experts=2), "n_shared_experts 2 is not supported: only 1 is"),
        (dict(moe_shared_expert_intermediate_size=0), "moe_shared_expert_intermediate_size must be"),
        (dict(layer_norm_epsilon=0), "layer_norm_epsilon must be a number above 0, got 0"),
        (dict(sliding_window=64), "sliding_window 64 is not supported for model_type 'nemotron_h'"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings True is not supported"),
        (dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
    "lfm2-moe-published-tied": [
        (dict(num_dense_layers=-1), "num_dense_layers must be an integer from 0"),
        (dict(num_dense_layers=None), "num_dense_layers must be an integer from 0"),
        (dict(num_experts=0), "num_experts must be a number above 0, got 0"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9 is above 8"),
        (dict(moe_intermediate_size=None), "moe_intermediate_size must be a number above 0, got None"),
        (dict(use_expert_bias=1), "use_expert_bias must be true or false, got 1"),
        (dict(routed_scaling_factor=0), "routed_scaling_factor must be a number above 0, got 0"),
        (dict(layer_types=["conv", "mamba", "conv", "conv"]), "layer type 'mamba' is not supported"),
        (dict(conv_L_cache=1), "conv_L_cache must be at least 2, got 1"),
    ],
    "lfm3-published-tied": [
        (
            dict(layer_types=["conv", "mamba", "conv", "conv", "conv"]),
            "'mamba' is not supported: only conv, ",
        ),
        (dict(layer_types=["conv"]), "layer_types must list one type for each of the 5 layers"),
        (dict(sliding_window=None), "sliding_window must be a number above 0, got None"),
        (dict(use_attention_gate=1), "use_attention_gate must be true or false, got 1"),
        (dict(use_sandwich_norm=None), "use_sandwich_norm must be true or false, got None"),
        (dict(norm_eps=0), "norm_eps must be a number above 0, got 0"),
        (dict(hidden_act="relu2"), "hidden_act 'relu2' is not supported: LFM3's is 'silu'"),
        (dict(rope_parameters=dict(rope_theta=1e4)), "rope_parameters of model_type 'lfm3' must name"),
    ],
    "granitemoeshared-tied": [
        (dict(shared_intermediate_size=-1), "shared_intermediate_size must be an integer from 0"),
        (dict(num_local_experts=0), "num_local_experts must be a number above 0, got 0"),
        (dict(num_experts_per_tok=7), "num_experts_per_tok 7 is above 6"),
        (dict(attention_multiplier=None), "attention_multiplier must be a number above 0, got None"),
    ],
}


@pytest.mark.parametrize(
    "name, change, message", [(name, *rest) for name, cases_ in BAD.items() for rest in cases_]
)
def test_rejected_settings(name, change, message):
    with pytest.raises(xj.InputError, match=message):
        from_hf(cases.CASES[name].hf | change)


def test_defaults_are_those_of_transformers():
    """An LFM2 MoE with no expert layer reads no sizes of experts."""
    sizes = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=8)
    config = from_hf(dict(model_type="lfm2_moe", num_dense_layers=2, num_experts=None, **sizes))
    assert config.experts is None and config.intermediate_size == 7168
    config = from_hf(dict(model_type="lfm2_moe", num_dense_layers=1, **sizes))
    assert config.experts.router == GroupedTopkSpec(norm_epsilon=1e-6)
    assert (config.num_experts, config.num_experts_per_tok) == (32, 4)


def test_settings_without_effect():
    """transformers reads them for other families alone: attention of Nemotron-H never has biases, and MLPs of
    LFM2 MoE are as wide as `intermediate_size`.
    """
    assert from_hf(NEMOTRON.hf | dict(attention_bias=True)) == from_hf(NEMOTRON.hf)
    lfm2_moe = cases.CASES["lfm2-moe-published-tied"].hf
    assert from_hf(lfm2_moe | dict(block_auto_adjust_ff_dim=True)) == from_hf(lfm2_moe)
