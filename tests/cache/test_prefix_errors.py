"""Prefixes that a call cannot reuse: of another model, with other RoPE factors, from damaged files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import safetensors
import tiny
from layer_changes import with_windows
from safetensors.numpy import save_file

import xinfer_jax as xj
from xinfer_jax.config.model_config import RopeConfig, with_fixed_rope
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.params import param_specs

pytestmark = pytest.mark.oldest

CONFIG = with_windows(from_hf(tiny.CONFIG), (8, None))  # a ring and a full layer
CAPACITY = 1024
TOKENS = [[1, 2, 3, 4], [5, 6]]


def random_params(config):
    specs, tree = jax.tree.flatten(param_specs(config))
    shapes = enumerate(spec.shape for spec in specs)
    return jax.tree.unflatten(
        tree, [jnp.asarray(np.random.RandomState(i).randn(*s), jnp.float32) for i, s in shapes]
    )


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(CONFIG, max_position_embeddings=CAPACITY)
    return random_params(config), config


def by_hand(config, dtype=None, **given) -> xj.types.Prefix:
    """A prefix of zeros that no model computed, for tests of files."""
    cache = xj.init_cache(config, len(TOKENS), CAPACITY, dtype)
    length_B = jnp.array([len(row) for row in TOKENS], jnp.int32)
    return xj.types.Prefix(
        TOKENS, dataclasses.replace(cache, length_B=length_B, reached_B=length_B + 1), **given
    )


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "prefix"
    xj.save_prefix(*model, by_hand(model[1]), path)
    return path


# --- another model ------------------------------------------------------------------------------------------


def test_a_changed_model_is_rejected_in_memory_and_in_files(model, saved):
    params, config = model
    loaded = xj.load_prefix(params, config, saved)
    assert loaded.tokens == TOKENS and loaded.cache.reached_B.tolist() == [5, 3]
    layer = params["layers"][0]
    scaled = layer | {"q": layer["q"] | {"weight": layer["q"]["weight"] * 1.5}}
    other = params | {"layers": (scaled, *params["layers"][1:])}
    with pytest.raises(xj.InputError, match="was saved with another model"):
        xj.load_prefix(other, config, saved)
    prompts = [row + [9] for row in TOKENS]
    for prefix, named in (
        (loaded, "computed by another model, or before these parameters changed"),
        (by_hand(dataclasses.replace(config, head_dim=16)), "computed by another model"),
        (
            dataclasses.replace(loaded, model=None, tokens=[[1, 2, 3, 4, 5], [5, 6]]),
            "has 5, 2 tokens .* 4, 2",
        ),
        ("prefix", "prefix must be the out.prefix of an earlier call"),
    ):
        with pytest.raises(xj.InputError, match=named):
            xj.generate(other, config, prompts, xj.GenerateOptions(max_tokens=4, prefix=prefix))
    with pytest.raises(xj.InputError, match="computed by another model"):
        xj.save_prefix(other, config, loaded, saved.with_name("other"))


def test_olmo3_has_no_norm_before_attention_and_is_saved(tmp_path):
    config = cases.CASES["olmo3-yarn-old"].config
    params = random_params(config)
    xj.save_prefix(params, config, by_hand(config), tmp_path / "prefix")
    assert xj.load_prefix(params, config, tmp_path / "prefix").tokens == TOKENS


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", "gear", "float8_e4m3fn"])
def test_every_cache_dtype_is_saved_exactly(model, dtype, tmp_path):
    prefix = by_hand(model[1], dtype)
    layers = jax.tree.map(lambda x: (x + 3).astype(x.dtype), prefix.cache.layers)
    prefix = dataclasses.replace(prefix, cache=dataclasses.replace(prefix.cache, layers=layers))
    xj.save_prefix(*model, prefix, tmp_path / "prefix")
    loaded = xj.load_prefix(*model, tmp_path / "prefix", capacity=512).cache
    assert loaded.dtype == dtype and loaded.reached_B is None and loaded.capacity == 512
    for row, tokens in enumerate(TOKENS):
        for saved, got in zip(jax.tree.leaves(layers), jax.tree.leaves(loaded.layers), strict=True):
            used = np.s_[row, :, : len(tokens)]
            np.testing.assert_array_equal(got[used].astype(np.float32), saved[used].astype(np.float32))


def test_cache_dtype_may_name_the_dtype_of_the_prefix_in_any_form(model, saved):
    loaded = xj.load_prefix(*model, saved)
    for dtype in (jnp.float32, np.dtype("float32"), "float32"):
        options = xj.GenerateOptions(max_tokens=4, prefix=loaded, cache_dtype=dtype)
        xj.stream(*model, TOKENS, options)  # checks the arguments


# --- longrope -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def switching():
    """A model whose factors change beyond 32 tokens."""
    config = from_hf(cases.CASES["phi3-longrope-both-partial"].hf | dict(num_hidden_layers=1))
    return cases.params_from(config, cases.random_tensors(config, 0)), config


@pytest.mark.full
def test_a_prefix_with_other_longrope_factors_is_prefilled_again(switching, tmp_path):
    """27 tokens with the short factors, before a prompt that needs the long ones."""
    prompt = np.random.RandomState(0).randint(3, cases.VOCAB, 58).tolist()
    options = xj.GenerateOptions(max_tokens=1, capacity=64, keep_prefix=True)
    short = xj.generate(*switching, [prompt[:27]], options).prefix
    fresh = xj.generate(*switching, [prompt], options)
    xj.save_prefix(*switching, short, tmp_path / "prefix")
    loaded = xj.load_prefix(*switching, tmp_path / "prefix")
    assert short.factors == loaded.factors == switching[1].rope.short_factor
    for prefix, reused in ((short, 0), (loaded, 0), (fresh.prefix, 57)):
        again = xj.generate(*switching, [prompt], xj.GenerateOptions(max_tokens=1, prefix=prefix))
        assert (again.tokens, again.stats.reused_tokens) == (fresh.tokens, reused)
        np.testing.assert_allclose(again.logprobs, fresh.logprobs, atol=1e-5)
    with pytest.raises(xj.InputError, match="which longrope factors"):
        xj.save_prefix(*switching, by_hand(with_fixed_rope(switching[1], 3, 5)), tmp_path / "prefix")


@pytest.mark.full
def test_a_draft_model_uses_the_factors_of_the_longest_sequence(switching):
    """The sequence crosses the switch of the draft model, which has the same factors as the model throughout;
    so every draft token is accepted.
    """
    params, config = switching
    prompt = [np.random.RandomState(1).randint(3, cases.VOCAB, 30).tolist()]
    options = xj.GenerateOptions(max_tokens=5, draft=xj.Model(params, config), draft_tokens=1)
    out = xj.generate(params, with_fixed_rope(config, 33, 33), prompt, options)
    assert out.stats.passes == [2] and out.stats.acceptance == [1.0]


@pytest.mark.full
def test_the_draft_cache_ends_where_its_frequencies_would_change(switching):
    """The model's cache is longer than the draft model's frequencies allow."""
    params, config = switching
    config = dataclasses.replace(config, rope=RopeConfig(partial_rotary_factor=0.75))
    rope = dataclasses.replace(config.rope, rope_type="dynamic", factor=2.0)
    draft = xj.Model(params, dataclasses.replace(config, rope=rope, max_position_embeddings=46))
    prompt = [np.random.RandomState(1).randint(3, cases.VOCAB, 30).tolist()]
    assert next(xj.stream(params, config, prompt, xj.GenerateOptions(max_tokens=16, draft=draft)))


# --- files --------------------------------------------------------------------------------------------------


def rewrite(saved, path, change):
    """The saved file with its parsed metadata and its tensors changed by a function."""
    with safetensors.safe_open(saved, "np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    kept = json.loads(metadata["xinfer_jax"])
    text = change(kept, tensors)
    save_file(tensors, path, metadata=metadata | {"xinfer_jax": text or json.dumps(kept)})
    return path


def setting(name, value):
    return lambda kept, tensors: kept.update({name: value})


def tensor(function):
    return lambda kept, tensors: tensors.update({"0": function(tensors["0"])})


HOSTILE = {
    "garbage": (lambda kept, tensors: "{", "metadata is not JSON"),
    "nested": (lambda kept, tensors: "[" * 100_000, "metadata is not JSON|another version"),
    "list": (lambda kept, tensors: "[1]", "another version"),
    "newer": (setting("format", 7), "another version"),
    "older": (setting("format", 5), "an older version"),
    "before-formats": (lambda kept, _: kept.pop("format") and None, "an older version"),
    "no-tokens": (lambda kept, tensors: kept.pop("tokens") and None, "its tokens cannot be None"),
    "tokens-empty": (setting("tokens", []), "its tokens"),
    "tokens-of-no-row": (setting("tokens", [[], []]), "its tokens"),
    "tokens-text": (setting("tokens", "ab"), "its tokens"),
    "tokens-float": (setting("tokens", [[1.0, 2, 3, 4], [5, 6]]), "its tokens"),
    "tokens-bool": (setting("tokens", [[True, 2, 3, 4], [5, 6]]), "its tokens"),
    "tokens-beyond": (setting("tokens", [[288, 2, 3, 4], [5, 6]]), "its tokens"),
    "tokens-negative": (setting("tokens", [[-1, 2, 3, 4], [5, 6]]), "its tokens"),
    "more-rows": (setting("tokens", [*TOKENS, [7]]), "its reached"),
    "a-row-more": (lambda kept, _: kept.update(tokens=[*TOKENS, [7]], reached=[5, 3, 3]), "its tensor 0"),
    "longer": (lambda kept, _: kept.update(tokens=[list(range(9)), [5]], reached=[9, 3]), "its tensor 0"),
    "capacity-negative": (setting("capacity", -5), "its capacity cannot be -5"),
    "capacity-small": (setting("capacity", 3), "its capacity cannot be 3"),
    "capacity-float": (setting("capacity", 64.0), "its capacity"),
    "capacity-nan": (setting("capacity", float("nan")), "its capacity"),
    "dtype": (setting("dtype", ["int8"]), "its dtype"),
    "dtype-other": (setting("dtype", "int8"), "other tensors than the 8|its tensor"),
    "reached-missing": (lambda kept, tensors: kept.pop("reached") and None, "its reached cannot be None"),
    "reached-short": (setting("reached", [5]), "its reached"),
    "reached-less": (setting("reached", [2, 3]), "its reached"),
    "reached-huge": (setting("reached", [10**12, 3]), "its reached"),
    "reached-text": (setting("reached", "5,3"), "its reached"),
    "factors": (setting("factors", [1.0]), "another model"),
    "factors-number": (setting("factors", 1), "its factors"),
    "missing": (lambda kept, tensors: tensors.pop("1") is None or None, "other tensors than the 4"),
    "surplus": (lambda kept, tensors: tensors.update(x=tensors["0"]), "other tensors than the 4"),
    "shape": (tensor(lambda x: x[:, :, :1].copy()), "its tensor 0"),
    "scalar": (tensor(lambda x: np.zeros((), np.float32)), "its tensor 0"),
    "float64": (tensor(lambda x: x.astype(np.float64)), "its tensor 0"),
    "bits": (tensor(lambda x: x.view(np.int32)), "its tensor 0"),
    "nan": (tensor(lambda x: x * np.nan), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_file_raises_one_line(model, saved, tmp_path, name):
    change, named = HOSTILE[name]
    with pytest.raises(xj.InputError, match=named):
        xj.load_prefix(*model, rewrite(saved, tmp_path / "prefix", change))


def test_the_capacity_of_a_file_is_limited_to_the_context(model, saved, tmp_path):
    path = rewrite(saved, tmp_path / "prefix", setting("capacity", 10**15))
    assert xj.load_prefix(*model, path).cache.capacity == CAPACITY


def test_a_truncated_file_raises(model, saved, tmp_path):
    whole = saved.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        (tmp_path / "prefix").write_bytes(whole[:length])
        with pytest.raises(xj.InputError, match="cannot be read"):
            xj.load_prefix(*model, tmp_path / "prefix")
    with pytest.raises(xj.InputError, match="cannot be read"):
        xj.load_prefix(*model, tmp_path)
    with pytest.raises(xj.InputError, match="cannot be written"):
        xj.save_prefix(*model, by_hand(model[1]), tmp_path)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, "64", True, CAPACITY + 1, 10**12])
def test_an_invalid_capacity_raises(model, saved, capacity):
    with pytest.raises(xj.InputError, match="capacity must be a whole number from 1 to .* 1024, got"):
        xj.load_prefix(*model, saved, capacity=capacity)
