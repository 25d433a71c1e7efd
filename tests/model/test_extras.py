"""Adapters of rows in `Extras`, in one program of all layers and layer by layer."""

import jax
import numpy as np
import pytest
from parity_cases import CASES, Case
from random_adapters import random_adapter
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.adapters.adapter import row_matrices
from xinfer_jax.config.run_config import DEFAULT
from xinfer_jax.engine.adapter_stack import AdapterStack
from xinfer_jax.generation.executor import RunnableModel, run_program
from xinfer_jax.generation.loop import TracedExecutor
from xinfer_jax.layerwise.layerwise_executor import LayerwiseExecutor
from xinfer_jax.model.extras import Extras

TOKENS = np.arange(3 * 8, dtype=np.int32).reshape(3, 8) + 5, np.array([8, 6, 8], np.int32)


@pytest.mark.soak
def test_adapters_of_rows_in_both_executors():
    """Gemma 4 has a matrix with adapters outside its layers."""
    layers = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config = Case(CASES["gemma4-shared-kv"].hf | layers | dict(num_kv_shared_layers=0)).config
    assert "layer_proj" in row_matrices(config)
    params = random_params(config)
    adapters = [random_adapter(config, i, 2) for i in range(2)]
    stack = AdapterStack(params, config, len(adapters), 2, None, lambda function: function())
    for i, adapter in enumerate(adapters):
        for path, (a, b) in adapter.matrices.items():
            stack.set(run_program, i, path, np.asarray(a), np.asarray(b), adapter.scale_of()[path])
    extras = Extras(adapters=stack.adapters, adapter_B=np.array([1, -1, 0], np.int32))
    model = RunnableModel(params, config, extras)
    tokens_BT, num_tokens_B = TOKENS
    forward = jax.jit(xj.forward, static_argnums=1)
    wanted_BV = []
    for row, adapter in enumerate((adapters[1], None, adapters[0])):
        adapted = xj.lora.with_adapter(params, adapter) if adapter else params
        logits_BTV, _ = forward(adapted, config, tokens_BT[row : row + 1])
        wanted_BV.append(logits_BTV[0, num_tokens_B[row] - 1])
    for executor in (TracedExecutor(DEFAULT), LayerwiseExecutor(DEFAULT)):
        out = executor.prefill(model, TOKENS, xj.init_cache(config, 3, 16, "float32"))
        logits_BV = np.asarray(executor.logits(model, out.hidden)).reshape(3, -1)
        np.testing.assert_allclose(logits_BV, wanted_BV, atol=1e-4)
