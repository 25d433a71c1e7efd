"""`jax.export` with symbolic numbers of rows and tokens: one program serves every batch and length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from parity_cases import CASES, params_from, random_tensors

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

FEWER_LAYERS = {
    "llama3-new": dict(num_hidden_layers=1),
    "moe-defaults": dict(num_hidden_layers=1),
    "qwen3-5-tied": dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    "nemotron-h-published": dict(num_hidden_layers=3, hybrid_override_pattern="ME*"),
}
EOS = np.array([2], np.int32)


def rollout(config):
    def run(params, tokens_BT, num_tokens_B, key):
        cache = xj.init_cache(config, tokens_BT.shape[0], 64)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
        out = xj.decode_loop(
            params, config, logits_BV, cache, key, xj.SamplingConfig(temperature=0.8), EOS, 3
        )
        return xj.rollouts.pack_rollout(tokens_BT, num_tokens_B, out)

    return run


def training(config):
    def run(params, tokens_BT, num_tokens_B, key):
        loss = lambda params: xj.score(params, config, tokens_BT, num_tokens_B).logprobs_BT.sum()  # noqa: E731
        return jax.grad(loss)(params), xj.forward(params, config, tokens_BT, None, num_tokens_B)[0]

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", FEWER_LAYERS)
@pytest.mark.parametrize("of", [rollout, training])
def test_symbolic_rows_and_tokens(name, of):
    """The tokens, and logits to rounding, of a program for these sizes: here experts and blocks of keys take
    the form that serves every size.
    """
    config = xj.ModelConfig.from_hf(CASES[name].hf | FEWER_LAYERS[name])
    params = params_from(config, random_tensors(config, 5))
    given = np.arange(14, dtype=np.int32).reshape(2, 7), np.array([7, 4], np.int32), jax.random.key(1)
    B, T = export.symbolic_shape("B, T", constraints=["T >= 2"])
    shapes = jax.eval_shape(lambda *given: given, params, *given)
    symbolic = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, T), (B,))]
    exported = export.export(jax.jit(of(config)))(shapes[0], *symbolic, shapes[-1])
    want = jax.jit(of(config))(params, *given)
    for got, wanted in zip(*map(jax.tree.leaves, (exported.call(params, *given), want)), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4 * max(1, np.abs(wanted).max()))
