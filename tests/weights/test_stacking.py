"""Stacked trees of other things than arrays."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick import full_except
from small_models import QWEN

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

CONFIG = xj.ModelConfig.from_hf(QWEN | dict(hidden_size=64, intermediate_size=128))
MESH = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))


def shapes(quantize=None):
    init = lambda key: xj.init_params(CONFIG, key, "float32", quantize)  # noqa: E731
    return jax.eval_shape(init, jax.random.key(0))


def test_masks_labels_and_shapes():
    params = shapes()
    mask = jax.tree.map(lambda x: len(x.shape) > 1, params)
    stacked = xj.params.stack_layers(mask, CONFIG)
    arrays = xj.params.stack_layers(params, CONFIG)
    assert jax.tree.structure(stacked) == jax.tree.structure(arrays)
    assert stacked["layers"]["blocks"][0]["q"] == dict(weight=True, bias=False)
    assert arrays["layers"]["blocks"][0]["q"]["weight"].shape == (2, 64, 64)
    labels = jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1]), params)
    assert xj.params.stack_layers(labels, CONFIG)["layers"]["blocks"][0]["q"]["weight"] == "['weight']"
    mask["layers"][1]["q"]["weight"] = False
    with pytest.raises(xj.InputError, match="must have equal masks, .* got True and False"):
        xj.params.stack_layers(mask, CONFIG)
    with pytest.raises(xj.InputError, match="unstack_layers takes arrays"):
        xj.params.unstack_layers(stacked)
    assert jax.eval_shape(xj.params.unstack_layers, arrays) == params


@pytest.mark.parametrize("quantize", full_except(["int4"], [None, "int8", "int4"]))
def test_shardings_like_stacked_layers(quantize):
    """They are those of the layers, with an axis in front that is not divided."""
    params = shapes(quantize)
    stacked = xj.params.stack_layers(params, CONFIG)
    found = xj.params.shardings(CONFIG, MESH, like=stacked)
    assert found == xj.params.stack_layers(xj.params.shardings(CONFIG, MESH, like=params), CONFIG)
    assert jax.tree.structure(found) == jax.tree.structure(stacked)
    if quantize is None:
        want = PartitionSpec(None, "model", None)
        assert found["layers"]["blocks"][0]["q"]["weight"] == NamedSharding(MESH, want)
        specs = jax.tree.map(lambda x: x.spec, xj.params.shardings(CONFIG, MESH))
        assert xj.params.stack_layers(specs, CONFIG)["layers"]["blocks"][0]["q"]["weight"] == want
