"""`from_hf`: the config of each family, from older and newer names; unsupported settings raise by name."""

import dataclasses
import json
import math

import pytest

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, SoftmaxRouterSpec
from xinfer_jax.config.model_config import RopeConfig, with_fixed_rope
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

SIZES = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip
_S = "sliding_attention"
_F = "full_attention"
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


_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)
_FACTORS = dict(short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(2.0, 3.0, 4.0, 5.0))
_LONG = dict(type="longrope", **{name: list(values) for name, values in _FACTORS.items()})
_MOE = dict(
    qk_norm=True, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=768, layer_experts=(True,) * 4
)
_OLMO3 = dict(
    pre_norm=False,
    post_norm=True,
    norm_offset=0.0,
    qk_norm=True,
    qk_norm_joint=True,
    rope=RopeConfig(rope_theta=5e5),
)
_GEMMA = dict(
    post_norm=True,
    norm_offset=1.0,
    embed_scale=math.sqrt(48),
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=8,
)


# --- families -----------------------------------------------------------------------------------------------

FAMILIES = {
    # name: (config.json, fields that differ from `PLAIN`)
    "qwen2": (hf("qwen2"), dict(qkv_bias=True)),
    "qwen2-late-windows": (
        hf("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        dict(qkv_bias=True, layer_windows=(None, 8, 8, 8)),
    ),
    "qwen2-layer-types": (
        hf("qwen2", use_sliding_window=True, sliding_window=8, layer_types=[_S, _F, _S, _F]),
        dict(qkv_bias=True, layer_windows=(8, None, 8, None)),
    ),
    "qwen3": (hf("qwen3"), dict(qk_norm=True, head_dim=128)),
    "llama": (hf("llama"), {}),
    "llama-mlp-bias": (hf("llama", mlp_bias=True), dict(mlp_bias=True)),
    "llama-mqa-tied": (
        hf("llama", num_key_value_heads=1, tie_word_embeddings=True),
        dict(num_key_value_heads=1, tie_word_embeddings=True),
    ),
    "llama-head-dim": (hf("llama", head_dim=20), dict(head_dim=20)),
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
    "smollm3-window-on-nope-layers": (
        hf(
            "smollm3",
            no_rope_layers=[1, 0, 1, 0],
            use_sliding_window=True,
            sliding_window=8,
            tie_word_embeddings=False,
            rope_theta=1e4,
        ),
        dict(layer_rope=(True, False, True, False), layer_windows=(None, 8, None, 8)),
    ),
    "qwen3-moe": (
        hf("qwen3_moe", head_dim=16, num_experts=8, num_experts_per_tok=2),
        dict(_MOE, head_dim=16),
    ),
    "qwen3-moe-some-dense": (
        hf(
            "qwen3_moe",
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            moe_intermediate_size=16,
        ),
        dict(_MOE, layer_experts=(False, False, False, True), moe_intermediate_size=16),
    ),
    "olmo2": (
        hf("olmo2"),
        dict(pre_norm=False, post_norm=True, norm_offset=0.0, qk_norm=True, qk_norm_joint=True),
    ),
    "olmo3": (hf("olmo3", sliding_window=8), dict(_OLMO3, layer_windows=(8, 8, 8, None))),
    "olmo3-yarn-on-full-layers": (
        hf(
            "olmo3",
            rope_theta=5e5,
            rope_scaling=dict(_YARN, attention_factor=1.2),
            layer_types=[_S, _F, _S, _F],
            sliding_window=8,
        ),
        dict(
            _OLMO3,
            layer_windows=(8, None) * 2,
            rope=RopeConfig(rope_theta=5e5, attention_factor=1.2, **_YARN),
        )
        | dict(sliding_rope=RopeConfig(rope_theta=5e5)),
    ),
    "gemma2": (
        without("num_key_value_heads", "gemma2")
        | dict(num_attention_heads=8, sliding_window=8, hidden_act="gelu_pytorch_tanh"),
        dict(_GEMMA, num_attention_heads=8, num_key_value_heads=4, head_dim=256, layer_windows=(8, None) * 2)
        | dict(query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    ),
    "gemma3": (
        hf("gemma3_text", head_dim=8, sliding_window=8, sliding_window_pattern=3, query_pre_attn_scalar=8),
        dict(
            _GEMMA,
            qk_norm=True,
            layer_windows=(8, 8, None, 8),
            query_pre_attn_scalar=8,
            rope=RopeConfig(rope_theta=1e6),
        )
        | dict(sliding_rope=RopeConfig()),
    ),
    "bitnet": (
        without("hidden_act", "bitnet") | dict(attention_bias=True),
        dict(sub_norm=True, hidden_act="relu2", qkv_bias=True, o_bias=True, rope=RopeConfig(rope_theta=5e5)),
    ),
    "phi3": (without("num_key_value_heads", "phi3"), dict(num_key_value_heads=6)),
    "phi3-longrope": (
        hf("phi3", rope_scaling=_LONG, original_max_position_embeddings=128),
        dict(
            rope=RopeConfig("longrope", factor=4.0, original_max_position_embeddings=128, **_FACTORS),
        ),
    ),
}
PLAIN = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, rope=RopeConfig(),
)  # fmt: skip


def expected(model_type, **fields):
    """The config whose fields, or those of the specs of all layers, differ from `PLAIN`."""
    joint = "joint" if fields.pop("qk_norm_joint", False) else "head"
    attention = dict(
        qk_norm=joint if fields.pop("qk_norm", False) else None,
        o_norm=fields.get("sub_norm", False),
        logit_softcapping=fields.pop("attn_logit_softcapping", None),
    )
    for name in ("qkv_bias", "o_bias", "query_pre_attn_scalar"):
        attention[name] = fields.pop(name, getattr(AttentionSpec, name))
    mlp = MlpSpec(bias=fields.pop("mlp_bias", False), down_norm=fields.pop("sub_norm", False))
    sparse = fields.pop("layer_experts", (False,) * 4)
    sizes = [fields.pop(name, 0) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")]
    experts = ExpertsSpec(*sizes, SoftmaxRouterSpec(fields.pop("norm_topk_prob", False)))
    norms = {name: fields.pop(name) for name in ("pre_norm", "post_norm") if name in fields}
    windows = fields.pop("layer_windows", (None,) * 4)
    uses_rope = fields.pop("layer_rope", (True,) * 4)
    sliding_rope = fields.pop("sliding_rope", None)

    def layer(window, is_rotated, is_sparse):
        rope = sliding_rope if window else None
        mixer = AttentionSpec(window=window, uses_rope=is_rotated, rope=rope, **attention)
        return LayerSpec((mixer,), experts if is_sparse else mlp, **norms)

    layers = tuple(map(layer, windows, uses_rope, sparse))
    return xj.ModelConfig(**PLAIN | dict(model_type=model_type, layers=layers) | fields)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_gives_the_expected_config(name):
    settings, differences = FAMILIES[name]
    want = expected(settings["model_type"], **differences)
    assert dataclasses.asdict(from_hf(settings)) == dataclasses.asdict(want)


def test_fewer_layers():
    """The first ones; more than there are is an error."""
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
        hf(
            rope_scaling=dict(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=16,
                truncate=False,
            )
        ),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=16, truncate=False),
    ),
    "yarn-no-mscale": (
        hf(rope_scaling=dict(rope_type="yarn", factor=4.0, mscale=0.5, mscale_all_dim=0)),
        RopeConfig("yarn", factor=4.0, original_max_position_embeddings=512, mscale=0.5),
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
def test_each_rope_type_is_parsed(name):
    settings, expected = ROPES[name]
    assert from_hf(settings).rope == expected


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
    "llama3": (
        dict(rope_theta=5e5, rope_scaling=_LLAMA3),
        dict(rope_parameters=_LLAMA3 | dict(rope_theta=5e5)),
    ),
    "yarn": (
        dict(
            rope_theta=1e6, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=128)
        ),
        dict(
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128
            )
        ),
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


# --- rejected settings --------------------------------------------------------------------------------------

REJECTED = {
    # name: (config.json, what the message must name)
    "no-model-type": (SIZES, "model_type None"),
    "unknown-model-type": (hf("gpt2"), "model_type 'gpt2'.*qwen2"),
    "model-type-is-a-list": (hf(["qwen2"]), "model_type"),
    "hidden-act": (hf(hidden_act="gelu"), "hidden_act 'gelu'"),
    "hidden-act-null": (hf(hidden_act=None), "hidden_act None"),
    "not-causal": (hf(architectures=["Qwen2ForSequenceClassification"]), "Qwen2ForSequenceClassification"),
    "bare-model": (hf("llama", architectures=["LlamaModel"]), "LlamaModel"),
    "rope-longrope": (hf(rope_scaling=dict(rope_type="longrope", short_factor=[1], long_factor=[2])),
        "rope type 'longrope'"),
    "rope-unknown-old-name": (hf(rope_scaling=dict(type="su", factor=2.0)), "rope type 'su'"),
    "rope-unknown-new-name": (hf(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)),
        "rope type 'proportional'"),
    "rope-null-type": (hf(rope_scaling=dict(type=None, factor=2.0)), "rope type None"),
    "rope-per-layer-type": (hf(rope_parameters={_F: dict(rope_type="default", rope_theta=1e4)}),
        "rope parameters"),
    "rope-not-an-object": (hf(rope_scaling="linear"), "rope_scaling must be an object, got 'linear'"),
    "rope-linear-without-factor": (hf(rope_scaling=dict(type="linear")), "linear.*'factor'"),
    "rope-dynamic-without-factor": (hf(rope_scaling=dict(type="dynamic")), "dynamic.*'factor'"),
    "rope-llama3-without-low": (
        hf(rope_scaling={k: v for k, v in _LLAMA3.items() if k != "low_freq_factor"}),
        "llama3.*'low_freq_factor'",
    ),
    "rope-factor-string": (hf(rope_scaling=dict(type="linear", factor="2")), "factor.*'2'"),
    "rope-theta-zero": (hf(rope_theta=0), "rope_theta.*0"),
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
    "moe-more-chosen-than-there-are": (hf("qwen3_moe", num_experts=4, num_experts_per_tok=5),
        "num_experts_per_tok 5 is above 4"),
    "moe-norm-string": (hf("qwen3_moe", norm_topk_prob="true"), "norm_topk_prob must be true or false"),
    "moe-dense-layers-number": (hf("qwen3_moe", mlp_only_layers=3), "mlp_only_layers.*3"),
    "olmo3-other-theta": (hf("olmo3", rope_theta=1e4), "rope_theta 10000.0.*olmo3.*rope_parameters"),
    "olmo3-flat-rope": (hf("olmo3", rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        "must name full_attention"),
    "olmo3-dynamic": (hf("olmo3", rope_scaling=dict(type="dynamic", factor=2.0)), "rope type 'dynamic'"),
    "olmo3-no-window": (hf("olmo3", sliding_window=None), "sliding_window.*None"),
    "gemma2-bidirectional": (hf("gemma2", use_bidirectional_attention=True),
        "use_bidirectional_attention.*gemma2"),
    "gemma2-activation": (hf("gemma2", hidden_activation="gelu"), "hidden_act 'gelu'"),
    "gemma2-cap-zero": (hf("gemma2", attn_logit_softcapping=0), "attn_logit_softcapping.*0"),
    "gemma3-attention-cap": (hf("gemma3_text", attn_logit_softcapping=50.0),
        "attn_logit_softcapping 50.0.*gemma3_text"),
    "gemma3-with-images": (hf("gemma3"), "text_config of model_type 'gemma3'"),
    "type-of-text-is-a-list": (hf("gemma3", text_config=dict(model_type=["a"])), "model_type .'a'. is not"),
    "layer-types-unknown": (hf(layer_types=[_F, "chunked_attention", _F, _F]), "chunked_attention"),
    "layer-types-linear": (hf("qwen3", layer_types=["linear_attention"] * 4), "linear_attention"),
    "layer-types-too-few": (hf(layer_types=[_F, _F]), "layer_types.*4 layers"),
    "layer-types-slide-without-window": (hf(layer_types=[_F, _S, _F, _S], sliding_window=8),
        "sliding_attention.*use_sliding_window"),
    "layer-types-slide-null-window": (hf(layer_types=[_S] * 4, use_sliding_window=True, sliding_window=None),
        "sliding_attention"),
    "mistral-layer-types": (hf("mistral", sliding_window=8, layer_types=[_F, _S, _F, _S]), "layer_types"),
    "window-zero": (hf("mistral", sliding_window=0), "sliding_window.*0"),
    "max-window-layers-null": (hf(use_sliding_window=True, sliding_window=8, max_window_layers=None),
        "max_window_layers.*None"),
    "no-rope-too-few": (hf("smollm3", no_rope_layers=[1, 0]), "no_rope_layers"),
    "hidden-size-string": (hf(hidden_size="64"), "hidden_size must be a number above 0, got '64'"),
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
    """As transformers 5.24 reads them: it goes by the outer object, in Qwen2-VL's also by the text's."""
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


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_are_hashable_and_equal_for_equal_files(name):
    settings = FAMILIES[name][0]
    first = from_hf(settings)
    second = from_hf(json.loads(json.dumps(settings)))
    assert first == second and hash(first) == hash(second)
    assert hash(dataclasses.replace(first, vocab_size=97)) != hash(first)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_hf(hf()).vocab_size = 1
