"""The fingerprint of a model: of every family, on every jax version, after every change."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from layer_changes import with_mixer, with_windows

from xinfer_jax.cache.fingerprint import fingerprint
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.int8_weight import Int8Weight
from xinfer_jax.weights.params import param_specs

CONFIG = from_hf(tiny.CONFIG)


def random_params(config) -> dict:
    """Parameters as NumPy arrays, all different."""
    specs, tree = jax.tree.flatten(param_specs(config))
    shapes = enumerate(spec.shape for spec in specs)
    return jax.tree.unflatten(tree, [np.random.RandomState(i).randn(*shape) for i, shape in shapes])


def trees_with_one_changed_leaf(params):
    """Yields, for every leaf, the tree with that leaf scaled."""
    leaves, tree = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):
        yield jax.tree.unflatten(tree, [*leaves[:i], leaf * 1.001, *leaves[i + 1 :]])


FAMILIES = (
    "qwen2-gqa-tied-old",
    "moe-some-layers-dense",
    "olmo3-yarn-old",
    "gemma3-old",
    "phi3-longrope-beyond",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_leaf_of_every_family_changes_the_fingerprint(name):
    config = cases.CASES[name].config
    params = random_params(config)
    seen = {fingerprint(tree, config) for tree in (params, *trees_with_one_changed_leaf(params))}
    assert len(seen) == 1 + len(jax.tree.leaves(params))


def test_the_fingerprint_is_the_same_everywhere():
    """Compared with recorded values: independent of jax, NumPy, Python and the type of the arrays."""
    params = jax.tree.map(np.float32, random_params(CONFIG))
    params["layers"][0]["q"]["weight"] = Int8Weight(
        np.arange(1024, dtype=np.int8).reshape(32, 32), np.ones(32, np.float32)
    )
    params["layers"][1]["down"]["weight"] = GroupedWeight(
        np.arange(768, dtype=np.uint8).reshape(3, 8, 32), np.ones((3, 32), np.float16), None, None, 48
    )
    recorded = "22ebbe3e2c458c2525dacf3be8a7214756ce203ac8981baa68ee48a8ea14950f"
    assert fingerprint(params, CONFIG) == recorded
    assert fingerprint(jax.tree.map(jnp.asarray, params), CONFIG) == recorded


def test_every_setting_changes_the_fingerprint_and_reprs_do_not():
    params = random_params(CONFIG)
    changed = [
        CONFIG,
        dataclasses.replace(CONFIG, rms_norm_eps=1e-3),
        dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, rope_theta=1e5)),
        with_windows(CONFIG, (8, None)),
        with_mixer(CONFIG, logit_softcapping=3.0),
    ]
    assert len({fingerprint(params, config) for config in changed}) == len(changed)

    @dataclasses.dataclass(frozen=True)
    class Later(type(CONFIG)):
        added: float = 0.0  # by a later version
        noted: tuple = dataclasses.field(default=(), compare=False)

    later = Later(**{f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}, noted=(1,))
    assert fingerprint(params, later) == fingerprint(params, CONFIG)
    assert fingerprint(params, dataclasses.replace(later, added=1.0)) != fingerprint(params, CONFIG)


def test_the_fingerprint_keeps_no_parameters_and_rereads_numpy_arrays():
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    first = fingerprint(params, CONFIG)
    alive = weakref.ref(params["embed"]["weight"])
    assert fingerprint(params, CONFIG) == first
    params = jax.tree.map(lambda x: x * 1.5, params)
    gc.collect()
    assert alive() is None and fingerprint(params, CONFIG) != first
    written = jax.tree.map(np.array, params)
    before = fingerprint(written, CONFIG)
    written["layers"][0]["q"]["weight"] *= 1.5
    assert fingerprint(written, CONFIG) != before


def test_scales_of_groups_are_the_same_on_tpus():
    scale = np.array([[0.5, 0.1]], np.float16)
    weight = GroupedWeight(np.zeros((1, 8, 2), np.uint8), scale, None, None, 16)
    on_tpu = dataclasses.replace(weight, scale=scale.astype(np.float32))
    exact = dataclasses.replace(weight, scale=np.array([[0.5, 0.1]], np.float32))
    hashes = [fingerprint({"weight": of}, CONFIG) for of in (weight, on_tpu, exact)]
    assert hashes[0] == hashes[1] != hashes[2]
