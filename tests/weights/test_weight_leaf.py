"""The protocol of leaves that are no float arrays: a format that the library does not know."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from random_matrices import random_params
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.weights.params import param_specs
from xinfer_jax.weights.weight_leaf import WeightLeaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Columns(WeightLeaf):
    """A matrix [O, I], stored with its inputs first, times a factor for each output."""

    values_IO: jax.Array
    factor_O: jax.Array

    @property
    def shape(self):
        return self.values_IO.shape[::-1]

    def product(self, x):
        return (x @ self.values_IO) * self.factor_O

    def rows(self, index):
        return self.values_IO.T[index] * self.factor_O[index][..., None]

    def field_axes(self, outputs, inputs):
        return {"values_IO": (inputs, outputs), "factor_O": (outputs,)}


def test_a_leaf_of_another_format_decodes_and_is_sharded():
    config = xj.ModelConfig.from_hf(QWEN)
    params = random_params(config)

    def leaf(spec, x):
        is_own = spec.is_quantizable
        return Columns(jnp.asarray(np.asarray(x).T / 2), jnp.full(len(x), 2.0)) if is_own else x

    own = jax.tree.map(leaf, param_specs(config), params)
    tokens_BT = np.random.default_rng(0).integers(2, config.vocab_size, (2, 7))
    forward = jax.jit(xj.forward, static_argnums=1)
    for cache in (None, xj.init_cache(config, 2, 16)):
        got, wanted = (forward(tree, config, tokens_BT, cache)[0] for tree in (own, params))
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    tree = xj.params.shardings(config, jax.make_mesh((1,), ("model",)), like=own)
    weight = tree["layers"][0]["q"]["weight"]
    assert weight.values_IO.spec == PartitionSpec(None, "model") and weight.factor_O.spec == PartitionSpec(
        "model"
    )
