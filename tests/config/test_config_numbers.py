"""config.json: a bad value instead of a number raises no other error, does not hang and makes no wrong
config.
"""

import copy
import math

import parity_cases
import pytest
import test_config

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

BAD = (
    math.nan, math.inf, -math.inf, 0, -0.0, -1, -1e-9, 1e-300, 1e300, True, False, "", "4", "abc", [], [4],
    {}, {"a": 1}, 2**31, 2**41, 2**63, 10**30, 10**400, -(10**400), 10**5000,
)  # fmt: skip
INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
    "sliding_window", "max_window_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step", "no_rope_layer_interval", "sliding_window_pattern",
    "block_ff_dim", "block_multiple_of", "conv_L_cache", "moe_num_experts", "moe_k", "moe_topk",
    "moe_layer_interval", "rotary_dim", "num_local_experts", "shared_intermediate_size", "mamba_d_ssm",
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand",
)  # fmt: skip
# Accepted values: true and false mean 1 and 0; an index beyond the layers has no effect.
ACCEPTED = dict(
    num_experts=lambda value: type(value) is int and value == 0,  # of Qwen3-Next: all layers are dense
    num_local_experts=lambda value: type(value) is int and value == 0,  # of Granite 4: an MLP alone
    num_dense_layers=lambda value: type(value) is int and value == 0,  # of LFM2 MoE
    shared_intermediate_size=lambda value: type(value) is int and value == 0,  # there is none
    attn_layer_indices=lambda value: type(value) is int and value == 0,  # a layer
    shared_expert_intermediate_size=lambda value: type(value) is int and value == 0,  # there is none
    n_shared_experts=lambda value: type(value) is int and value == 0,
    moe_num_shared_experts=lambda value: type(value) is int and value == 0,
    first_k_dense_replace=lambda value: type(value) is int and value == 0,
    moe_layer_start_index=lambda value: type(value) is int and value == 0,
    moe_layer_end_index=lambda value: type(value) is int and value >= -1,
    hidden_size_per_layer_input=lambda value: type(value) is int and value == 0,  # layers have none
    num_kv_shared_layers=lambda value: type(value) is int and value == 0,
    no_rope_layers=lambda value: value in (0, 1),
    max_window_layers=lambda value: type(value) is int and value >= 0,
    full_attn_idxs=lambda value: type(value) is int and value == 0,  # a layer
    mlp_only_layers=lambda value: type(value) is int and value >= 0,
    llama_4_scaling_beta=lambda value: type(value) in (int, float) and value == 0,
    mscale=lambda value: type(value) in (int, float) and value == 0,  # none
    mscale_all_dim=lambda value: type(value) in (int, float) and value == 0,
    rope_theta=lambda value: value == 2**31,
    rope_local_base_freq=lambda value: value == 2**31,
)
CASES = {name: case.hf for name, case in parity_cases.CASES.items()}


def number_paths(value, at=()):
    """Yields the keys and indices that lead to each number."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from number_paths(inner, (*at, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield at


def with_value(hf, at, value):
    hf = copy.deepcopy(hf)
    *outer, last = at
    inner = hf
    for key in outer:
        inner[key] = list(inner[key]) if isinstance(inner[key], tuple) else inner[key]
        inner = inner[key]
    inner[last] = value
    return hf


@pytest.mark.parametrize("name", CASES)
def test_a_bad_number_raises_or_has_no_effect(name):
    hf = CASES[name]
    expected = from_hf(hf)
    for at in number_paths(hf):
        field = next(key for key in reversed(at) if isinstance(key, str))
        others = (4.5, 4.0) if field in INTEGERS else ()
        for value in (*BAD, *others):
            try:
                got = from_hf(with_value(hf, at, value))
            except xj.InputError as error:
                assert len(str(error)) <= 300 and "\n" not in str(error)
            else:
                accepted = field in ACCEPTED and ACCEPTED[field](value)
                same = got == expected  # not in the assertion, which would print both
                assert same or accepted, f"{at} accepts {value!r}"


@pytest.mark.parametrize("value", [None, *BAD], ids=lambda value: f"{type(value).__name__}")
@pytest.mark.parametrize(
    "name", ["layer_types", "no_rope_layers", "mlp_only_layers", "rope_scaling", "rope_parameters"]
)
@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3_moe", "smollm3", "gemma3_text", "phi3", "olmo3", "bitnet"]
)
def test_wrong_types_instead_of_lists_and_objects(model_type, name, value):
    hf = test_config.hf(model_type)
    try:
        assert from_hf(hf | {name: value}) == from_hf(hf)  # None, or a setting of another family
    except xj.InputError as error:
        assert value is not None and name.split("_")[0] in str(error)


HUGE = dict(
    eps=(dict(rms_norm_eps=10**18), "rms_norm_eps must lie between 1e-30 and 1, got 1000000000000000000"),
    layers=(dict(num_hidden_layers=2**63), "num_hidden_layers must lie between 1 and 10000"),
    context=(
        dict(max_position_embeddings=2**30 + 1),
        "max_position_embeddings must lie between 1 and 1073741824",
    ),
    stretched=(
        dict(rope_scaling=dict(type="linear", factor=1e6), max_position_embeddings=10**6),
        "1000000000000 tokens",
    ),
    width=(dict(head_dim=2**40), "head_dim must lie between 1 and 65536"),
    equal_freq=(
        dict(model_type="llama", rope_scaling=test_config._LLAMA3 | dict(high_freq_factor=1)),
        "less than high_freq",
    ),
    truncate=(
        dict(rope_scaling=dict(type="yarn", factor=2.0, truncate="false")),
        "truncate must be true or false",
    ),
)


@pytest.mark.parametrize("name", HUGE)
def test_values_out_of_range(name):
    changes, message = HUGE[name]
    with pytest.raises(xj.InputError, match=message):
        from_hf(test_config.hf() | changes)


def test_the_largest_models_are_in_range():
    shape = dict(
        model_type="llama", vocab_size=300_000, hidden_size=16384, intermediate_size=53248,
        num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=10**7,
        rope_theta=5e9,
    )  # fmt: skip
    assert from_hf(shape).context_length == 10**7
