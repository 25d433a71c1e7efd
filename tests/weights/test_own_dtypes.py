"""A parameter whose spec names a dtype has it: made, converted or moved. test_glm4_moe.py has it in files."""

import jax
import jax.numpy as jnp
import parity_cases as cases
from random_matrices import random_params

import xinfer_jax as xj

CONFIG = cases.CASES["glm4-moe-groups"].config


def dtypes(params) -> tuple[set[str], set[str]]:
    """Returns the dtypes of routers, and of all other leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    of_router, others = set(), set()
    for path, leaf in leaves:
        (of_router if "router" in jax.tree_util.keystr(path) else others).add(leaf.dtype.name)
    return of_router, others


WANTED = {"float32"}, {"bfloat16"}


def test_made():
    assert dtypes(jax.eval_shape(lambda: xj.init_params(CONFIG, jax.random.key(0), "bfloat16"))) == WANTED


def test_converted_and_moved():
    params = random_params(CONFIG)
    tensors = xj.params.params_to_tensors(params, CONFIG)
    assert dtypes(xj.params.params_from_tensors(CONFIG, tensors, dtype="bfloat16")) == WANTED
    mesh = jax.make_mesh((1,), ("model",))
    assert dtypes(xj.params.reshard(params, CONFIG, mesh, dtype=jnp.bfloat16)[0]) == WANTED
