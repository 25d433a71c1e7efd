"""A soft prompt: vectors that replace some embeddings, trained so that a sentence becomes more likely after
them.

`xj.score` returns the log-probability of every token except the first. It is differentiable, also in the
parameters.

    python scripts/examples/soft_prompt.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp

import xinfer_jax as xj

SOFT_TOKENS = 4
STEPS = 10
RATE = 0.03


def main(argv: list[str]) -> None:
    model = xj.load_model()
    ids = model.tokenizer.encode("Madrid is a city.")
    tokens_BT = jnp.array([[0] * SOFT_TOKENS + ids])  # the soft prompt replaces these ids

    def loss(soft_PD, params):
        inputs_BTD = xj.embed_tokens(params, model.config, tokens_BT).at[:, :SOFT_TOKENS].set(soft_PD)
        scores_BT = xj.score(params, model.config, tokens_BT, inputs_BTD=inputs_BTD).logprobs_BT
        return -scores_BT[:, SOFT_TOKENS - 1 :].mean()  # entry SOFT_TOKENS - 1: first token of the sentence

    @jax.jit
    def step(soft_PD, params):
        value, gradient_PD = jax.value_and_grad(loss)(soft_PD, params)
        return value, soft_PD - RATE * gradient_PD / jnp.linalg.norm(gradient_PD)

    soft_PD = 0.1 * jax.random.normal(jax.random.key(0), (SOFT_TOKENS, model.config.hidden_size))
    for i in range(STEPS):
        value, soft_PD = step(soft_PD, model.params)
        print(f"step {i}: {value:.3f} nats per token")


if __name__ == "__main__":
    start(main)
