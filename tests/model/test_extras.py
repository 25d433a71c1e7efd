"""Adapters of rows in `Extras`, in one program of all layers and layer by layer."""

import jax
import numpy as np
import pytest
from parity_cases import CASES, Case
from random_adapters import random_adapter

import xinfer_jax as xj
from xinfer_jax.adapters.adapter import row_matrices
from xinfer_jax.config.run_config import DEFAULT
from xinfer_jax.engine.adapter_stack import AdapterStack
from xinfer_jax.generation.executor import RunnableModel, run_program
from xinfer_jax.generation.loop import TracedExecutor
from xinfer_jax.layerwise.layerwise_executor import LayerwiseExecutor
from xinfer_jax.model.extras import Extras

TOKENS = np.arange(3 * 8, dtype=np.int32).reshape(3, 8) + 5, np.array([8, 6, 8], np.int32)


@pytest.mark.parametrize("case", ["qwen2-gqa-tied-old", "gemma4-shared-kv"])
def test_adapters_of_rows_in_both_executors(case):
    """gemma4-shared-kv has a matrix with adapters outside its layers."""
    config = Case(CASES[case].hf).config
    assert ("layer_proj" in row_matrices(config)) == (case == "gemma4-shared-kv")
    params = xj.init_params(config, jax.random.key(0), "float32")
    adapters = [random_adapter(config, i, 2) for i in range(2)]
    stack = AdapterStack(params, config, len(adapters), 2, None, lambda function: function())
    for i, adapter in enumerate(adapters):
        for path, (a, b) in adapter.matrices.items():
            stack.set(run_program, i, path, np.asarray(a), np.asarray(b), adapter.scale_of()[path])
    extras = Extras(adapters=stack.adapters, adapter_B=np.array([1, -1, 0], np.int32))
    model = RunnableModel(params, config, extras)
    alone = [xj.with_adapter(params, adapters[1]), params, xj.with_adapter(params, adapters[0])]
    for executor in (TracedExecutor(DEFAULT), LayerwiseExecutor(DEFAULT)):
        out = executor.prefill(model, TOKENS, xj.init_cache(config, 3, 16, "float32"))
        logits_BV = np.asarray(executor.logits(model, out.hidden)).reshape(3, -1)
        for row, adapted in enumerate(alone):
            (tokens_BT, num_tokens_B) = (x[row : row + 1] for x in TOKENS)
            wanted_BTV, _ = xj.forward(adapted, config, tokens_BT)
            last_V = np.asarray(wanted_BTV)[0, num_tokens_B[0] - 1]
            np.testing.assert_allclose(logits_BV[row], last_V, atol=1e-4)
