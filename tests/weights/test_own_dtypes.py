"""A parameter whose spec names a dtype has it in every model: made, loaded, saved, converted or moved."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parity_cases as cases
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.formats.tensors import open_tensors

CONFIG = cases.CASES["glm4-moe-groups"].config


def dtypes(params) -> tuple[set[str], set[str]]:
    """Those of routers, and of all other leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    of_router, others = set(), set()
    for path, leaf in leaves:
        (of_router if "router" in jax.tree_util.keystr(path) else others).add(leaf.dtype.name)
    return of_router, others


WANTED = {"float32"}, {"bfloat16"}


def test_made():
    assert dtypes(jax.eval_shape(lambda: xj.init_params(CONFIG, jax.random.key(0), "bfloat16"))) == WANTED


def test_saved_and_loaded(tmp_path):
    """The values are those of float32 to the last bit, and config.json has the dtype of the others."""
    params = random_params(CONFIG)
    xj.save_model(tmp_path / "model", params, CONFIG, dtype="bfloat16")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    types = {name: tensor.type for name, tensor in open_tensors(tmp_path / "model").items()}
    assert {kind for name, kind in types.items() if ".mlp.gate." in name} == {"F32"}
    assert {kind for name, kind in types.items() if ".mlp.gate." not in name} == {"BF16"}
    loaded = xj.load_model(tmp_path / "model", dtype="bfloat16").params
    assert dtypes(loaded) == WANTED
    for old, new in zip(params["layers"], loaded["layers"], strict=True):
        jax.tree.map(np.testing.assert_array_equal, new.get("router"), old.get("router"))
        np.testing.assert_array_equal(new["q"]["weight"], old["q"]["weight"].astype(ml_dtypes.bfloat16))


def test_converted_and_moved():
    params = random_params(CONFIG)
    tensors = xj.params_to_tensors(params, CONFIG)
    assert dtypes(xj.params_from_tensors(CONFIG, tensors, dtype="bfloat16")) == WANTED
    mesh = jax.make_mesh((1,), ("model",))
    assert dtypes(xj.reshard(params, CONFIG, mesh, dtype=jnp.bfloat16)[0]) == WANTED
