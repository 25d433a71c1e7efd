"""Rows divided over devices: inside `jax.shard_map`, with its check of what differs between them, and by the
types of a mesh's axes. Programs are traced here; one runs on two devices, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_identities import QWEN

import xinfer_jax as xj
from xinfer_jax.config.model_config import from_hf

CONFIG = from_hf(QWEN | dict(num_hidden_layers=1))
ROWS, SAME = PartitionSpec("rows"), PartitionSpec()
ARGUMENTS = (np.arange(48, dtype=np.int32).reshape(4, 12), np.array([12, 5, 9, 1], np.int32), np.arange(8))


def answers(params, tokens_BT, num_tokens_B, key_data, times=1, cache_dtype=None):
    """Prompts `times` as long, and four tokens chosen behind each."""
    tokens_BT, num_tokens_B = jnp.tile(tokens_BT, (1, times)), num_tokens_B * times
    cache = xj.init_cache(CONFIG, len(tokens_BT), tokens_BT.shape[1] + 8, cache_dtype)
    logits_BV, cache = xj.prefill(params, CONFIG, tokens_BT, num_tokens_B, cache)
    keys = jax.random.wrap_key_data(key_data.reshape(-1, 2).astype(jnp.uint32))
    settings = xj.SamplingConfig(0.8, 20, repetition_penalty=1.2)
    out = xj.decode_loop(params, CONFIG, logits_BV, cache, keys, settings, jnp.array([3]), 4)
    return out.tokens_BT, out.logprobs_BT, out.length_B, out.cache.overflow_B


@pytest.mark.parametrize(
    "given", [{}, dict(times=60), dict(cache_dtype="gear")], ids=["plain", "chunks", "gear"]
)
def test_what_differs_between_devices_says_so(given):
    params = jax.eval_shape(lambda: xj.init_params(CONFIG, jax.random.key(0), "float32"))
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))

    def run(*args):
        return answers(*args, **given)

    specs = dict(mesh=mesh, in_specs=(SAME, ROWS, ROWS, ROWS))
    jax.eval_shape(jax.shard_map(run, out_specs=ROWS, **specs), params, *ARGUMENTS)
    with pytest.raises(ValueError, match="out_specs"):  # and is not taken for equal
        jax.eval_shape(jax.shard_map(run, out_specs=SAME, **specs), params, *ARGUMENTS)


def test_explicit_axes_are_refused_by_name():
    params = jax.eval_shape(lambda: xj.init_params(CONFIG, jax.random.key(0), "float32"))
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    cache = xj.init_cache(CONFIG, 4, 32)

    def prefill(spec):
        tokens_BT, num_tokens_B = (jax.device_put(x, NamedSharding(mesh, spec)) for x in ARGUMENTS[:2])
        return jax.eval_shape(lambda p: xj.prefill(p, CONFIG, tokens_BT, num_tokens_B, cache), params)

    with pytest.raises(xj.InputError, match=r"Explicit axes: make the mesh with axis_types=.*Auto"):
        prefill(ROWS)
    assert prefill(SAME)[0].shape == (4, CONFIG.vocab_size)


def main():
    """With the check as without, and on a mesh of either kind."""
    params = xj.init_params(CONFIG, jax.random.key(0), "float32")
    outs = []
    for kind, given in ((AxisType.Explicit, {}), (AxisType.Auto, dict(check_vma=False))):
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
        same, rows = (NamedSharding(mesh, spec) for spec in (SAME, ROWS))
        specs = dict(in_specs=(SAME, ROWS, ROWS, ROWS), out_specs=ROWS)
        run = jax.jit(jax.shard_map(answers, mesh=mesh, **specs, **given))
        outs.append(run(*jax.device_put((params, *ARGUMENTS), (same, rows, rows, rows))))
    jax.tree.map(np.testing.assert_array_equal, *outs)


@pytest.mark.slow
def test_on_two_devices():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, Path(__file__)], env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


if __name__ == "__main__":
    main()
