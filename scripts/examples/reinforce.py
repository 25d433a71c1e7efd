"""Steps of REINFORCE, each in one program: sample, reward, gradient of the log-probabilities.

The policy gradient is right because the log-probabilities of the rollout equal those of the training pass.
The program prints their largest difference.

    python scripts/examples/reinforce.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj

NEW = 16
RATE = 1e-4


def main(argv: list[str]) -> None:
    model = xj.load_model()
    config = model.config
    eos_ids = np.array(model.config.eos_token_ids)

    @jax.jit
    def step(params, prompt_BT, key):
        B, T = prompt_BT.shape
        cache = xj.init_cache(config, batch=B, capacity=T + NEW)
        logits_BV, cache = xj.prefill(params, config, prompt_BT, jnp.full(B, T), cache)
        sampling = xj.SamplingConfig(temperature=1.0)
        rollout = xj.decode_loop(params, config, logits_BV, cache, key, sampling, eos_ids, NEW)
        reward_B = (rollout.tokens_BT % 2 == 0).mean(1)  # even ids; any function of the tokens
        advantage_B = reward_B - reward_B.mean()

        def loss(params):
            tokens_BT = jnp.concatenate([prompt_BT, rollout.tokens_BT], 1)
            logprobs_BT = xj.score(params, config, tokens_BT, T + rollout.length_B)[:, T - 1 :]
            return -(advantage_B[:, None] * logprobs_BT).sum(1).mean(), logprobs_BT

        gradient, logprobs_BT = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
        return params, reward_B.mean(), jnp.abs(logprobs_BT - rollout.logprobs_BT).max()

    params = model.params
    prompt_BT = jnp.array([model.tokenizer.encode("The capital of")] * 8)
    for i in range(3):
        params, reward, apart = step(params, prompt_BT, jax.random.key(i))
        print(f"step {i}: reward {reward:.3f}, log-probabilities apart by {apart:.1e}")


if __name__ == "__main__":
    start(main)
