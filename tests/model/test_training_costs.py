"""Tests of the costs to compile and to compute a training step: stacked layers by their number, experts by
the number that is chosen.
"""

import math

import jax
import numpy as np
import parity_cases as cases
import pytest
from layer_changes import with_experts
from quick import full_except
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.backends import expert_tiles
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.feed_forward.mlp import gated_mlp

SMALL = QWEN | dict(hidden_size=16, intermediate_size=24, vocab_size=32)
M, D, F, X, U = 8192, 512, 256, 64, 4  # tokens, width, width of an expert, experts, those chosen


def lowered(layers):
    """grad(score) of so many stacked layers, of which nothing is computed."""
    config = xj.ModelConfig.from_hf(SMALL | dict(num_hidden_layers=layers))
    params = jax.eval_shape(
        lambda: xj.params.stack_layers(xj.init_params(config, jax.random.key(0), "float32"), config)
    )
    tokens_BT = jax.ShapeDtypeStruct((2, 16), np.int32)
    loss = lambda params, tokens_BT: xj.score(params, config, tokens_BT).logprobs_BT.sum()  # noqa: E731
    return jax.jit(jax.grad(loss)).lower(params, tokens_BT)


@pytest.mark.parametrize("is_compiled", full_except([False], [False, True]))
def test_programs_of_stacked_layers_have_one_size(is_compiled):
    """The sizes are compared as traced, and as compiled: the computation of a layer stands in the program
    once.
    """
    few, many = (lowered(layers) for layers in (8, 80))
    if is_compiled:
        few, many = few.compile(), many.compile()
    few, many = (program.as_text().count(" = ") for program in (few, many))
    assert many < 1.02 * few


def flop(jaxpr, trips):
    """Returns the operations of the matrix products of a jaxpr, whose loops without a static length run
    `trips` times.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inputs = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * inputs
        times = {"while": trips, "scan": eqn.params.get("length")}.get(eqn.primitive.name, 1)
        parts = [getattr(x, "jaxpr", x) for x in jax.tree.leaves([*eqn.params.values()])]
        several = [times * flop(part, trips) for part in parts if hasattr(part, "eqns")]
        total += max(several) if eqn.primitive.name == "cond" else sum(several)
    return total


def test_work_of_a_mixture_is_that_of_the_chosen_experts():
    """Forwards and backwards, against a dense MLP as wide as the chosen experts; with the router, and the
    rows that fill tiles, for experts drawn evenly.
    """
    config = cases.CASES["moe-defaults"].config
    config = with_experts(config, num_experts=X, num_experts_per_tok=U, intermediate_size=F)
    shape = jax.ShapeDtypeStruct
    matrix = lambda *sizes: dict(weight=shape(sizes, np.float32))  # noqa: E731
    x_BTD = shape((1, M, D), np.float32)
    mixture = dict(
        router=matrix(X, D), experts=dict(gate=matrix(X, F, D), up=matrix(X, F, D), down=matrix(X, D, F))
    )
    dense = dict(gate=matrix(U * F, D), up=matrix(U * F, D), down=matrix(D, U * F))
    draws = np.random.default_rng(0).random((M, X)).argsort(-1)[:, :U]
    tiles = -(-np.bincount(draws.ravel(), minlength=X) // expert_tiles._rows(draws, config))

    def of(mlp, layer):
        slopes = jax.grad(lambda x_BTD, layer: mlp(x_BTD, layer, config).sum(), (0, 1))
        return flop(jax.make_jaxpr(slopes)(x_BTD, layer).jaxpr, int(tiles.sum()))

    chosen, whole = of(mixture_of_experts, mixture), of(gated_mlp, dense)
    print(f"{chosen / whole:.3f} of {whole / 1e9:.1f} GFLOP")
    assert whole == 9 * 2 * M * D * U * F
    assert whole < chosen <= 1.3 * whole
