"""REINFORCE over a mesh: rows are sharded over its axis "data", the model over "model".

Rollouts run in a `jax.shard_map` over "data": each group of devices decodes its own rows and does not wait
for other groups. The library shards the model over "model", following the shardings of the parameters; the
gradient needs no further annotation. With XLA_FLAGS=--xla_force_host_platform_device_count=8 a CPU has 8
devices.

    python scripts/examples/reinforce_on_a_mesh.py
"""

from checkout import start

# isort: split
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import xinfer_jax as xj

NEW = 16
RATE = 1e-4


def make_training_step(mesh, config, eos_ids):
    """A function (params, prompt_BT, one key per row) -> params, mean reward. Parameters are sharded as by
    `xj.shardings`.
    """

    def sample(params, prompt_BT, key_B):
        B, T = prompt_BT.shape
        cache = xj.init_cache(config, batch=B, capacity=T + NEW)
        logits_BV, cache = xj.prefill(params, config, prompt_BT, jnp.full(B, T), cache)
        sampling = xj.SamplingConfig(temperature=1.0)
        rollout = xj.decode_loop(params, config, logits_BV, cache, key_B, sampling, eos_ids, NEW)
        return rollout.tokens_BT, rollout.length_B

    rows = PartitionSpec("data")
    replicated = PartitionSpec()
    specs = dict(in_specs=(replicated, rows, rows), out_specs=rows, axis_names={"data"})
    sample_all = jax.shard_map(sample, mesh=mesh, **specs)

    @jax.jit
    def step(params, prompt_BT, key_B):
        (B, T) = prompt_BT.shape
        (answer_BT, length_B) = sample_all(params, prompt_BT, key_B)
        reward_B = (answer_BT % 2 == 0).mean(1)

        def loss(params):
            tokens_BT = jnp.concatenate([prompt_BT, answer_BT], 1)
            logprobs_BT = xj.score(params, config, tokens_BT, T + length_B)[:, T - 1 :]
            return -((reward_B - reward_B.mean())[:, None] * logprobs_BT).sum() / B

        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), reward_B.mean()

    return step


def main(argv: list[str]) -> None:
    model = xj.load_model()
    config = model.config
    count = jax.device_count()
    shards = math.gcd(count, config.num_key_value_heads)
    mesh = jax.make_mesh((count // shards, shards), ("data", "model"))
    shardings = xj.shardings(config, mesh)
    params = jax.device_put(model.params, shardings)
    mesh = shardings["final_norm"].mesh
    step = make_training_step(mesh, config, np.array(config.eos_token_ids))
    prompt_BT = jnp.array([model.tokenizer.encode("The capital of")] * 8)
    for i in range(3):
        params, reward = step(params, prompt_BT, jax.random.split(jax.random.key(i), len(prompt_BT)))
        print(f"step {i}: reward {reward:.3f}, on {dict(mesh.shape)}")


if __name__ == "__main__":
    start(main)
