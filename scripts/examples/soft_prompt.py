"""A soft prompt: vectors in place of some embeddings, trained until a sentence is likelier behind them.

`xj.score` gives the log-probability of every token but the first, with gradients: of the parameters too.

    python scripts/examples/soft_prompt.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp

import xinfer_jax as xj

PLACES = 4
STEPS = 10
RATE = 0.03


def main(argv: list[str]) -> None:
    model = xj.load_model()
    ids = model.tokenizer.encode("Madrid is a city.")
    tokens_BT = jnp.array([[0] * PLACES + ids])  # places for the soft prompt, whatever their ids

    def loss(soft_PD, params):
        inputs_BTD = xj.embed_tokens(params, model.config, tokens_BT).at[:, :PLACES].set(soft_PD)
        scores_BT = xj.score(params, model.config, tokens_BT, inputs_BTD=inputs_BTD)
        return -scores_BT[:, PLACES - 1 :].mean()  # entry PLACES - 1 is the first token behind it

    @jax.jit
    def step(soft_PD, params):
        value, gradient_PD = jax.value_and_grad(loss)(soft_PD, params)
        return value, soft_PD - RATE * gradient_PD / jnp.linalg.norm(gradient_PD)

    soft_PD = 0.1 * jax.random.normal(jax.random.key(0), (PLACES, model.config.hidden_size))
    for i in range(STEPS):
        value, soft_PD = step(soft_PD, model.params)
        print(f"step {i}: {value:.3f} nats per token")


if __name__ == "__main__":
    start(main)
