"""Leaves of new weights, from tensors that come one by one and from directories."""

import random

import jax
import numpy as np
import parity_cases
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.checkpoint.config_difference import find_config_difference
from xinfer_jax.checkpoint.new_leaves import new_leaves
from xinfer_jax.families.leaf_assembly import LeafAssembler
from xinfer_jax.weights.params import param_specs
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


def numpy_params(config, seed: int = 0):
    numbers = np.random.default_rng(seed)
    return jax.tree.map(lambda spec: numbers.normal(size=spec.shape).astype(np.float32), param_specs(config))


def leaves_by_name(config, pairs) -> dict[str, np.ndarray]:
    assembler = LeafAssembler(config)
    found = [leaf for pair in pairs for leaf in assembler.add(*pair)]
    return dict(found + [*assembler.finish()])


def wanted_leaves(config, params) -> dict[str, np.ndarray]:
    specs, tree = jax.tree.flatten(param_specs(config))
    return {spec.name: leaf for spec, leaf in zip(specs, tree.flatten_up_to(params), strict=True)}


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, leaf in found.items():
        np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)


@pytest.mark.parametrize("name", parity_cases.FIRST.values())
def test_leaves_of_tensors_in_any_order(name):
    """The test converts, for each family, published files and files with a tensor for each leaf."""
    config = xj.ModelConfig.from_hf(parity_cases.CASES[name].hf)
    params = numpy_params(config)
    wanted = wanted_leaves(config, params)
    pairs = list(xj.params.params_to_tensors(params, config).items())
    assert_same(leaves_by_name(config, pairs), wanted)
    random.Random(3).shuffle(pairs)
    assert_same(leaves_by_name(config, pairs), wanted)


def test_tensors_are_forgotten_with_their_leaves():
    config = xj.ModelConfig.from_hf(tiny.CONFIG)
    assembler = LeafAssembler(config)
    for name, tensor in xj.params.params_to_tensors(numpy_params(config), config).items():
        ((_, leaf),) = assembler.add(name, tensor)
        assert leaf is tensor
        kept = [x for x in vars(assembler)["_tensors"].values() if isinstance(x, np.ndarray)]
        assert not kept


def test_tied_matrices_and_tensors_of_other_parts():
    config = xj.ModelConfig.from_hf(tiny.CONFIG)
    params = numpy_params(config)
    wanted = wanted_leaves(config, params)
    tensors = xj.params.params_to_tensors(params, config)
    embed = tensors[tiny.EMBED]
    others = {name: x for name, x in tensors.items() if name != tiny.EMBED}
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": embed[0], "visual.patch": embed}
    for stream in ({tiny.HEAD: embed} | others, {tiny.HEAD: embed[:1]} | tensors, tensors | more):
        assert_same(leaves_by_name(config, stream.items()), wanted)
    seeing = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    assert_same(leaves_by_name(config, seeing.items()), wanted)


def test_tensors_that_do_not_fit():
    config = xj.ModelConfig.from_hf(parity_cases.CASES[parity_cases.FIRST["phi3"]].hf)
    tensors = xj.params.params_to_tensors(numpy_params(config), config)
    (first, *rest) = tensors.items()
    joined = next(name for name in tensors if "qkv" in name)

    def error(pairs) -> str:
        with pytest.raises(xj.InputError) as caught:
            leaves_by_name(config, pairs)
        return str(caught.value)

    assert f"missing {first[0]}" in error(rest)
    assert "unknown other.weight" in error([*tensors.items(), ("other.weight", first[1])])
    assert f"{first[0]} came twice" in error([*tensors.items(), first])
    wrong = error((tensors | {joined: tensors[joined][:-1]}).items())
    assert f"{joined} has shape" in wrong and "the config asks for" in wrong
    assert "parameters are floats" in error([(first[0], first[1].astype(np.int32))])
    assert "must be an array of NumPy or jax" in error([(first[0], first[1].tolist())])
    assert "must be a text, got 5" in error([(5, first[1])])


def test_sources(tmp_path):
    config = xj.ModelConfig.from_hf(tiny.CONFIG)
    params = numpy_params(config)
    assert new_leaves(params, params, config) is None
    tensors = xj.params.params_to_tensors(params, config)
    for stream in (tensors.items(), iter(tensors.items()), list(tensors.items())):
        assert_same(dict(new_leaves(stream, params, config)), wanted_leaves(config, params))
    with pytest.raises(xj.InputError, match="pairs of a name and a tensor, got 'model.embed"):
        next(new_leaves(iter(tensors), params, config))
    with pytest.raises(xj.InputError, match="is no directory: give the directory of a checkpoint"):
        next(new_leaves(tmp_path / "nothing", params, config))


def test_differences_of_configs():
    config = xj.ModelConfig.from_hf(tiny.CONFIG)
    assert find_config_difference(config, config) is None
    assert find_config_difference(with_repeated_kv_heads(config, 4), config) is None
    other = xj.ModelConfig.from_hf(tiny.CONFIG | dict(rope_theta=5e5))
    (name, ours, theirs) = find_config_difference(config, other)
    assert "rope" in name and (ours, theirs) == (1e4, 5e5)
