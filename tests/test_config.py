"""`from_hf`: what each family reads from config.json, under older and newer names, and what is refused by name."""

import dataclasses
import json
import math

import pytest

import xinfer_jax as xj
from xinfer_jax.config import RopeConfig, from_hf

SIZES = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
    max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip
_S, _F = "sliding_attention", "full_attention"
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def hf(model_type="qwen2", **changes):
    return SIZES | dict(model_type=model_type) | changes


def without(name, model_type="qwen2"):
    return {k: v for k, v in hf(model_type).items() if k != name}


# --- families ---------------------------------------------------------------------------------------------------------

FAMILIES = {
    # name: (config.json, fields that differ from `PLAIN`)
    "qwen2": (hf("qwen2"), dict(qkv_bias=True)),
    "qwen2-windows-unused": (hf("qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=1), dict(qkv_bias=True)),
    "qwen2-late-windows": (
        hf("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        dict(qkv_bias=True, layer_windows=(None, 8, 8, 8)),
    ),
    "qwen2-all-windows": (
        hf("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        dict(qkv_bias=True, layer_windows=(8, 8, 8, 8)),
    ),
    "qwen2-layer-types": (
        hf("qwen2", use_sliding_window=True, sliding_window=8, layer_types=[_S, _F, _S, _F]),
        dict(qkv_bias=True, layer_windows=(8, None, 8, None)),
    ),
    "qwen2-all-full-types": (hf("qwen2", sliding_window=None, layer_types=[_F] * 4), dict(qkv_bias=True)),
    "qwen3": (hf("qwen3"), dict(qk_norm=True, head_dim=128)),
    "qwen3-head-dim-bias": (hf("qwen3", head_dim=16, attention_bias=True), dict(qk_norm=True, head_dim=16, qkv_bias=True, o_bias=True)),
    "qwen3-late-windows": (
        hf("qwen3", head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=3),
        dict(qk_norm=True, layer_windows=(None, None, None, 8)),
    ),
    "llama": (hf("llama"), {}),
    "llama-attention-bias": (hf("llama", attention_bias=True), dict(qkv_bias=True, o_bias=True)),
    "llama-mlp-bias": (hf("llama", mlp_bias=True), dict(mlp_bias=True)),
    "llama-mha": (without("num_key_value_heads", "llama"), dict(num_key_value_heads=6)),
    "llama-mqa-tied": (hf("llama", num_key_value_heads=1, tie_word_embeddings=True), dict(num_key_value_heads=1, tie_word_embeddings=True)),
    "llama-head-dim": (hf("llama", head_dim=20), dict(head_dim=20)),
    "llama-null-head-dim": (hf("llama", head_dim=None), {}),
    "mistral-no-window": (hf("mistral", sliding_window=None), {}),
    "mistral-window": (hf("mistral", sliding_window=16), dict(layer_windows=(16,) * 4)),
    "mistral-default-window": (hf("mistral"), dict(layer_windows=(4096,) * 4)),
    "smollm3": (
        hf("smollm3"),
        dict(tie_word_embeddings=True, layer_rope=(True, True, True, False), rope=RopeConfig(rope_theta=2e6)),
    ),
    "smollm3-interval": (
        hf("smollm3", no_rope_layer_interval=2, tie_word_embeddings=False, rope_theta=1e4),
        dict(layer_rope=(True, False, True, False)),
    ),
    "smollm3-explicit": (
        hf("smollm3", no_rope_layers=[0, 1, 1, 0], attention_bias=True, mlp_bias=True, tie_word_embeddings=False, rope_theta=1e4),
        dict(layer_rope=(False, True, True, False), qkv_bias=True, o_bias=True, mlp_bias=True),
    ),
    "smollm3-window-on-nope-layers": (
        hf("smollm3", no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=8, tie_word_embeddings=False, rope_theta=1e4),
        dict(layer_rope=(True, False, True, False), layer_windows=(None, 8, None, 8)),
    ),
}
PLAIN = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, rope=RopeConfig(), layer_windows=(None,) * 4,
    layer_rope=(True,) * 4, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    settings, differences = FAMILIES[name]
    assert dataclasses.asdict(from_hf(settings)) == dataclasses.asdict(
        xj.ModelConfig(**PLAIN | dict(model_type=settings["model_type"]) | differences)
    )


def test_defaults_where_config_json_is_silent():
    assert from_hf(without("max_position_embeddings", "llama")).max_position_embeddings == 2048
    assert from_hf(without("num_key_value_heads", "mistral") | dict(num_attention_heads=8, hidden_size=64)).num_key_value_heads == 8
    assert from_hf(without("rms_norm_eps")).rms_norm_eps == 1e-6


# --- rotary embedding -------------------------------------------------------------------------------------------------

ROPES = {
    # name: (config.json, expected)
    "theta-old": (hf(rope_theta=1e6), RopeConfig(rope_theta=1e6)),
    "theta-new": (hf(rope_parameters=dict(rope_type="default", rope_theta=1e6)), RopeConfig(rope_theta=1e6)),
    "null-scaling": (hf(rope_theta=1e5, rope_scaling=None), RopeConfig(rope_theta=1e5)),
    "linear": (hf(rope_scaling=dict(type="linear", factor=2.5)), RopeConfig("linear", factor=2.5)),
    "dynamic": (hf(rope_scaling=dict(type="dynamic", factor=2.0)), RopeConfig("dynamic", factor=2.0)),
    "llama3": (
        hf("llama", rope_theta=5e5, rope_scaling=_LLAMA3),
        RopeConfig(rope_theta=5e5, **_LLAMA3),
    ),
    "yarn": (
        hf(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16, truncate=False)),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16, truncate=False),
    ),
    "yarn-factor-from-lengths": (
        hf(rope_scaling=dict(rope_type="yarn", original_max_position_embeddings=128)),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "yarn-own-length": (
        hf(rope_scaling=dict(rope_type="yarn", factor=4.0)),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=512),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope(name):
    settings, expected = ROPES[name]
    assert from_hf(settings).rope == expected


SAME = {
    # name: (older names, newer names)
    "default": (
        dict(rope_theta=1e6, torch_dtype="bfloat16"),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e6), dtype="bfloat16"),
    ),
    "linear": (
        dict(rope_theta=3e4, rope_scaling=dict(type="linear", factor=2.0)),
        dict(rope_parameters=dict(rope_type="linear", rope_theta=3e4, factor=2.0)),
    ),
    "llama3": (dict(rope_theta=5e5, rope_scaling=_LLAMA3), dict(rope_parameters=_LLAMA3 | dict(rope_theta=5e5))),
    "yarn": (
        dict(rope_theta=1e6, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=128)),
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128)),
    ),
}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", "smollm3"])
@pytest.mark.parametrize("name", SAME)
def test_older_and_newer_names_are_equal(model_type, name):
    older, newer = SAME[name]
    assert from_hf(hf(model_type, **older)) == from_hf(hf(model_type, **newer)) != from_hf(hf(model_type))


@pytest.mark.parametrize(
    "rope_scaling, expected",
    [
        (None, 512),
        (dict(type="dynamic", factor=2.0), 512),
        (dict(type="linear", factor=2.0), 1024),
        (dict(type="yarn", factor=8.0, original_max_position_embeddings=512), 4096),
        (dict(type="yarn", factor=4.0, original_max_position_embeddings=128), 512),
        (dict(_LLAMA3, original_max_position_embeddings=64), 512),
    ],
    ids=["default", "dynamic", "linear", "yarn-beyond", "yarn-within", "llama3"],
)
def test_context_length(rope_scaling, expected):
    assert from_hf(hf(rope_scaling=rope_scaling)).context_length == expected


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    # name: (config.json, what the message must name)
    "no-model-type": (SIZES, "model_type None"),
    "unknown-model-type": (hf("gpt2"), "model_type 'gpt2'.*qwen2"),
    "model-type-is-a-list": (hf(["qwen2"]), "model_type"),
    "hidden-act": (hf(hidden_act="gelu"), "hidden_act 'gelu'"),
    "hidden-act-null": (hf(hidden_act=None), "hidden_act None"),
    "not-causal": (hf(architectures=["Qwen2ForSequenceClassification"]), "Qwen2ForSequenceClassification"),
    "bare-model": (hf("llama", architectures=["LlamaModel"]), "LlamaModel"),
    "rope-longrope": (hf(rope_scaling=dict(rope_type="longrope", short_factor=[1], long_factor=[2])), "rope type 'longrope'"),
    "rope-unknown-old-name": (hf(rope_scaling=dict(type="su", factor=2.0)), "rope type 'su'"),
    "rope-unknown-new-name": (hf(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)), "rope type 'proportional'"),
    "rope-null-type": (hf(rope_scaling=dict(type=None, factor=2.0)), "rope type None"),
    "rope-per-layer-type": (hf(rope_parameters={_F: dict(rope_type="default", rope_theta=1e4)}), "rope parameters"),
    "rope-not-an-object": (hf(rope_scaling="linear"), "rope parameters.*'linear'"),
    "rope-linear-without-factor": (hf(rope_scaling=dict(type="linear")), "linear.*'factor'"),
    "rope-dynamic-without-factor": (hf(rope_scaling=dict(type="dynamic")), "dynamic.*'factor'"),
    "rope-llama3-without-low": (hf(rope_scaling={k: v for k, v in _LLAMA3.items() if k != "low_freq_factor"}), "llama3.*'low_freq_factor'"),
    "rope-factor-string": (hf(rope_scaling=dict(type="linear", factor="2")), "factor.*'2'"),
    "rope-length-string": (hf(rope_scaling=dict(type="yarn", original_max_position_embeddings="64")), "original_max_position.*'64'"),
    "rope-theta-string": (hf(rope_theta="1e6"), "rope_theta.*'1e6'"),
    "rope-theta-zero": (hf(rope_theta=0), "rope_theta.*0"),
    "partial-rotary": (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial-rotary-new-place": (hf(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.25)), "partial_rotary_factor"),
    "layer-types-unknown": (hf(layer_types=[_F, "chunked_attention", _F, _F]), "chunked_attention"),
    "layer-types-linear": (hf("qwen3", layer_types=["linear_attention"] * 4), "linear_attention"),
    "layer-types-too-few": (hf(layer_types=[_F, _F]), "layer_types.*4 layers"),
    "layer-types-a-string": (hf(layer_types=_F), "layer_types"),
    "layer-types-slide-without-window": (hf(layer_types=[_F, _S, _F, _S], sliding_window=8), "sliding_attention.*use_sliding_window"),
    "layer-types-slide-null-window": (hf(layer_types=[_S] * 4, use_sliding_window=True, sliding_window=None), "sliding_attention"),
    "mistral-layer-types": (hf("mistral", sliding_window=8, layer_types=[_F, _S, _F, _S]), "layer_types"),
    "window-string": (hf("mistral", sliding_window="8"), "sliding_window.*'8'"),
    "window-zero": (hf("mistral", sliding_window=0), "sliding_window.*0"),
    "window-negative": (hf(use_sliding_window=True, sliding_window=-1), "sliding_window.*-1"),
    "max-window-layers-null": (hf(use_sliding_window=True, sliding_window=8, max_window_layers=None), "max_window_layers.*None"),
    "max-window-layers-string": (hf(use_sliding_window=True, sliding_window=8, max_window_layers="2"), "max_window_layers.*'2'"),
    "no-rope-too-few": (hf("smollm3", no_rope_layers=[1, 0]), "no_rope_layers"),
    "no-rope-interval-zero": (hf("smollm3", no_rope_layer_interval=0), "no_rope_layer_interval"),
    "hidden-size-string": (hf(hidden_size="64"), "hidden_size must be a number above 0, got '64'"),
    "hidden-size-fraction": (hf(hidden_size=48.5), "hidden_size must be an integer, got 48.5"),
    "hidden-size-bool": (hf(hidden_size=True), "hidden_size.*True"),
    "layers-negative": (hf(num_hidden_layers=-4), "num_hidden_layers.*-4"),
    "heads-zero": (hf(num_attention_heads=0), "num_attention_heads.*0"),
    "eps-string": (hf(rms_norm_eps="1e-6"), "rms_norm_eps.*'1e-6'"),
    "eps-nan": (hf(rms_norm_eps=math.nan), "rms_norm_eps.*nan"),
    "tie-string": (hf(tie_word_embeddings="true"), "tie_word_embeddings must be true or false, got 'true'"),
    "bias-number": (hf("llama", attention_bias=1), "attention_bias must be true or false, got 1"),
    "use-window-string": (hf(use_sliding_window="false"), "use_sliding_window must be true or false"),
    "odd-head-dim": (hf(head_dim=15), "head_dim 15 is odd"),
    "odd-head-dim-derived": (hf(hidden_size=42), "head_dim 7 is odd"),
    "kv-heads-do-not-divide": (hf(num_key_value_heads=4), "num_attention_heads 6.*num_key_value_heads 4"),
    "kv-heads-above-heads": (hf(num_key_value_heads=12), "num_attention_heads 6.*num_key_value_heads 12"),
    "hidden-size-not-divisible": (hf("llama", hidden_size=50), "hidden_size 50.*num_attention_heads 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    settings, message = REFUSED[name]
    with pytest.raises(xj.InputError, match=message) as caught:
        from_hf(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_key_is_named(name):
    with pytest.raises(xj.InputError, match=f"{name}.*None"):
        from_hf(without(name))


# --- the object -------------------------------------------------------------------------------------------------------


def test_harmless_keys_change_nothing():
    harmless = dict(
        _name_or_path="/x", architectures=["Qwen2ForCausalLM"], transformers_version="4.43.1", use_cache=False, attention_dropout=0.0,
        initializer_range=0.02, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None, torch_dtype="bfloat16", quantization_config=None,
        my_own_note={"a": [1]}, partial_rotary_factor=1.0,
    )  # fmt: skip
    assert from_hf(hf() | harmless) == from_hf(hf())


def test_the_dictionary_is_left_as_it_was():
    settings = hf("llama", rope_scaling=dict(type="yarn", factor=2.0))
    before = json.dumps(settings)
    from_hf(settings)
    assert json.dumps(settings) == before


@pytest.mark.parametrize("name", FAMILIES)
def test_hashable_and_equal_when_read_twice(name):
    settings = FAMILIES[name][0]
    first, second = from_hf(settings), from_hf(json.loads(json.dumps(settings)))
    assert first == second and hash(first) == hash(second)
    assert hash(dataclasses.replace(first, vocab_size=97)) != hash(first)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_hf(hf()).vocab_size = 1
