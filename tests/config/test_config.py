"""`from_hf`: the config of each family, from older and newer names. Unsupported settings raise by name."""

import dataclasses
import json

import parity_cases
import pytest

import xinfer_jax as xj
from xinfer_jax.config.model_config import with_fixed_rope
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

SIZES = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip
_S = "sliding_attention"
_F = "full_attention"
_GELU = "gelu_pytorch_tanh"
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def hf(model_type="qwen2", **changes):
    return SIZES | dict(model_type=model_type) | changes


def without(name, model_type="qwen2"):
    return {k: v for k, v in hf(model_type).items() if k != name}


_FACTORS = dict(short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(2.0, 3.0, 4.0, 5.0))
_LONG = dict(type="longrope", **{name: list(values) for name, values in _FACTORS.items()})
CASES = {name: case.hf for name, case in parity_cases.CASES.items()}


# --- families -----------------------------------------------------------------------------------------------


def test_defaults_of_families():
    """The settings are in every case of `parity_cases`, so those cases do not test their defaults. The logits
    of those cases are transformers'.
    """
    (window,) = {layer.attention.window for layer in from_hf(hf("mistral")).layers}
    assert window == 4096
    assert from_hf(hf("qwen3")).head_dim == 128
    assert from_hf(hf("smollm3")).rope.rope_theta == 2e6
    assert from_hf(without("hidden_act", "bitnet")).rope.rope_theta == 5e5
    gemma2 = from_hf(without("num_key_value_heads", "gemma2") | dict(num_attention_heads=8, hidden_act=_GELU))
    assert (gemma2.num_key_value_heads, gemma2.head_dim, gemma2.final_logit_softcapping) == (4, 256, 30.0)
    mixer = gemma2.layers[0].attention
    assert (mixer.query_pre_attn_scalar, mixer.logit_softcapping, mixer.window) == (256, 50.0, 4096)


def test_fewer_layers():
    """The first ones. More than there are is an error."""
    config = from_hf(hf("smollm3"))
    fewer = dataclasses.replace(config, num_hidden_layers=2)
    assert fewer.layers == config.layers[:2] and fewer != config
    with pytest.raises(xj.InputError, match="num_hidden_layers is 4, and layers has only 2"):
        dataclasses.replace(fewer, num_hidden_layers=4)


def test_defaults_of_missing_keys():
    assert from_hf(without("max_position_embeddings", "llama")).max_position_embeddings == 2048
    assert (
        from_hf(
            without("num_key_value_heads", "mistral") | dict(num_attention_heads=8, hidden_size=64)
        ).num_key_value_heads
        == 8
    )
    assert from_hf(without("rms_norm_eps")).rms_norm_eps == 1e-6


# --- rotary embedding ---------------------------------------------------------------------------------------


def test_older_names_of_longrope():
    for name in ("su", "yarn"):
        old = hf("phi3", rope_scaling=dict(_LONG, type=name), original_max_position_embeddings=128)
        assert from_hf(old) == from_hf(old | dict(rope_scaling=_LONG))


def test_longrope_fixed_for_a_batch():
    config = from_hf(hf("phi3", rope_scaling=_LONG, original_max_position_embeddings=128))
    assert config.rope.switches_at == 128
    short = with_fixed_rope(config, 3, 128)
    long = with_fixed_rope(config, 129, 500)
    assert short.rope.short_factor == short.rope.long_factor == _FACTORS["short_factor"]
    assert long.rope.short_factor == long.rope.long_factor == _FACTORS["long_factor"]
    assert short.rope.switches_at is None and with_fixed_rope(short, 3, 500) == short
    with pytest.raises(xj.InputError, match="longrope.*128.*between 128 and 129"):
        with_fixed_rope(config, 128, 129)


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


# --- rejected settings --------------------------------------------------------------------------------------

REJECTED = {
    # name: (config.json, what the message must name)
    "no-model-type": (SIZES, "model_type None"),
    "unknown-model-type": (hf("gpt2"), "model_type 'gpt2'.*qwen2"),
    "model-type-is-a-list": (hf(["qwen2"]), "model_type"),
    "hidden-act-null": (hf(hidden_act=None), "hidden_act None"),
    "hidden-act": (hf(hidden_act="gelu"), "hidden_act 'gelu'"),
    "not-causal": (hf(architectures=["Qwen2ForSequenceClassification"]), "Qwen2ForSequenceClassification"),
    "bare-model": (hf("llama", architectures=["LlamaModel"]), "LlamaModel"),
    "rope-longrope": (hf(rope_scaling=dict(rope_type="longrope", short_factor=[1], long_factor=[2])),
        "rope type 'longrope'"),
    "rope-unknown-old-name": (hf(rope_scaling=dict(type="su", factor=2.0)), "rope type 'su'"),
    "rope-unknown-new-name": (hf(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)),
        "rope type 'proportional'"),
    "rope-per-layer-type": (hf(rope_parameters={_F: dict(rope_type="default", rope_theta=1e4)}),
        "rope parameters"),
    "rope-linear-without-factor": (hf(rope_scaling=dict(type="linear")), "linear.*'factor'"),
    "rope-dynamic-without-factor": (hf(rope_scaling=dict(type="dynamic")), "dynamic.*'factor'"),
    "rope-llama3-without-low": (
        hf(rope_scaling={k: v for k, v in _LLAMA3.items() if k != "low_freq_factor"}),
        "llama3.*'low_freq_factor'",
    ),
    "partial-rotary": (hf(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial-rotary-new-place": (hf(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.25)),
        "partial_rotary_factor"),
    "rope-longrope-short-list": (hf("phi3", rope_scaling=dict(_LONG, long_factor=[1, 2])),
        "long_factor has 2 entries.*4"),
    "rope-longrope-no-list": (hf("phi3", rope_scaling=dict(_LONG, short_factor=None)),
        "short_factor must be a list"),
    "phi3-linear": (hf("phi3", rope_scaling=dict(type="linear", factor=2.0)), "rope type 'linear'"),
    "phi3-odd-part": (hf("phi3", partial_rotary_factor=0.4), "partial_rotary_factor 0.4 rotates 3 of 8"),
    "phi3-more-than-all": (hf("phi3", partial_rotary_factor=1.5), "partial_rotary_factor 1.5"),
    "phi3-layer-types": (hf("phi3", sliding_window=8, layer_types=[_F, _S, _F, _S]), "layer_types"),
    "moe-layer-types": (hf("qwen3_moe", layer_types=[_F, _S, _F, _S]), "layer_types"),
    "moe-norm-string": (hf("qwen3_moe", norm_topk_prob="true"), "norm_topk_prob must be true or false"),
    "olmo3-other-theta": (hf("olmo3", rope_theta=1e4), "rope_theta 10000.0.*olmo3.*rope_parameters"),
    "olmo3-flat-rope": (hf("olmo3", rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        "must name full_attention"),
    "olmo3-dynamic": (hf("olmo3", rope_scaling=dict(type="dynamic", factor=2.0)), "rope type 'dynamic'"),
    "olmo3-no-window": (hf("olmo3", sliding_window=None), "sliding_window.*None"),
    "gemma2-bidirectional": (hf("gemma2", use_bidirectional_attention=True),
        "use_bidirectional_attention.*gemma2"),
    "gemma2-activation": (hf("gemma2", hidden_activation="gelu"), "hidden_act 'gelu'"),
    "gemma3-attention-cap": (hf("gemma3_text", attn_logit_softcapping=50.0),
        "attn_logit_softcapping 50.0.*gemma3_text"),
    "gemma3-with-images": (hf("gemma3"), "text_config of model_type 'gemma3'"),
    "type-of-text-is-a-list": (hf("gemma3", text_config=dict(model_type=["a"])), "model_type .'a'. is not"),
    "layer-types-unknown": (hf(layer_types=[_F, "chunked_attention", _F, _F]), "chunked_attention"),
    "layer-types-linear": (hf("qwen3", layer_types=["linear_attention"] * 4), "linear_attention"),
    "layer-types-too-few": (hf(layer_types=[_F, _F]), "layer_types.*4 layers"),
    "layer-types-slide-without-window": (hf(layer_types=[_F, _S, _F, _S], sliding_window=8),
        "sliding_attention.*use_sliding_window"),
    "mistral-layer-types": (hf("mistral", sliding_window=8, layer_types=[_F, _S, _F, _S]), "layer_types"),
    "no-rope-too-few": (hf("smollm3", no_rope_layers=[1, 0]), "no_rope_layers"),
    "tie-string": (hf(tie_word_embeddings="true"), "tie_word_embeddings must be true or false, got 'true'"),
    "bias-number": (hf("llama", attention_bias=1), "attention_bias must be true or false, got 1"),
    "odd-head-dim": (hf(head_dim=15), "head_dim 15 is odd"),
    "odd-head-dim-derived": (hf(hidden_size=42), "head_dim 7 is odd"),
    "kv-heads-do-not-divide": (hf(num_key_value_heads=4), "num_attention_heads 6.*num_key_value_heads 4"),
    "hidden-size-not-divisible": (hf("llama", hidden_size=50), "hidden_size 50.*num_attention_heads 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_bad_settings_raise_by_name(name):
    settings, message = REJECTED[name]
    with pytest.raises(xj.InputError, match=message) as caught:
        from_hf(settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_key_is_named(name):
    with pytest.raises(xj.InputError, match=f"{name}.*None"):
        from_hf(without(name))


# --- ModelConfig --------------------------------------------------------------------------------------------


def test_harmless_keys_change_nothing():
    harmless = dict(
        _name_or_path="/x", architectures=["Qwen2ForCausalLM"], transformers_version="4.43.1",
        use_cache=False, attention_dropout=0.0,
        initializer_range=0.02, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None,
        torch_dtype="bfloat16", quantization_config=None,
        my_own_note={"a": [1]}, partial_rotary_factor=1.0,
    )  # fmt: skip
    assert from_hf(hf() | harmless) == from_hf(hf())


@pytest.mark.parametrize(
    "model_type, text_type, is_tied, follows_text",
    [
        ("gemma3", "gemma3_text", True, False),
        ("mistral3", "mistral", True, False),
        ("qwen2_5_vl", "qwen2_5_vl_text", False, True),
        ("qwen3_vl", "qwen3_vl_text", False, False),
    ],
)
def test_wrappers_that_do_not_say_whether_they_are_tied(model_type, text_type, is_tied, follows_text):
    """transformers 5.24 decides by the outer object and, for Qwen2-VL, also by the text's settings."""
    text = hf(text_type, head_dim=8)
    for own in ({}, dict(tie_word_embeddings=False), dict(tie_word_embeddings=True)):
        wants = is_tied or follows_text and own.get("tie_word_embeddings", False)
        outer = dict(model_type=model_type, text_config=text | own)
        assert from_hf(outer).tie_word_embeddings is wants
        assert from_hf(outer | dict(tie_word_embeddings=True)).tie_word_embeddings is True
        wants = follows_text and own.get("tie_word_embeddings", False)
        assert from_hf(outer | dict(tie_word_embeddings=False)).tie_word_embeddings is wants


def test_from_hf_does_not_change_its_argument():
    settings = hf("llama", rope_scaling=dict(type="yarn", factor=2.0))
    before = json.dumps(settings)
    from_hf(settings)
    assert json.dumps(settings) == before


@pytest.mark.parametrize("name", CASES)
def test_configs_are_hashable_and_equal_for_equal_files(name):
    settings = CASES[name]
    first = from_hf(settings)
    second = from_hf(json.loads(json.dumps(settings)))
    assert first == second and hash(first) == hash(second)
    assert hash(dataclasses.replace(first, vocab_size=97)) != hash(first)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_hf(hf()).vocab_size = 1
