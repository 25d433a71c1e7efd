"""Samples one prompt many times inside your own jitted program: with the batch dimension, and with
`jax.vmap`.

The tokens are the same. The batch is faster: `vmap` copies the loop's carry at each step.

    python scripts/examples/many_draws.py
"""

from checkout import start

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()  # the bundled checkpoint; or a directory, or a name on the hub
    params = model.params
    config = model.config
    tok = model.tokenizer
    eos_ids = np.array(config.eos_token_ids)
    prompt_BT = jnp.array([tok.encode("The capital of Spain is")])

    def answers(tokens_BT, row_key_B, temperature_B):
        """Tokens [B, 16], and the number of tokens of each row."""
        B, T = tokens_BT.shape
        cache = xj.init_cache(config, rows=B, capacity=64)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, jnp.full(B, T), cache)
        sampling = xj.SamplingConfig(temperature=temperature_B)
        result = xj.decode_loop(params, config, logits_BV, cache, row_key_B, sampling, eos_ids, 16)
        return result.tokens_BT, result.length_B

    def answer(row_key, temperature):
        return answers(prompt_BT, row_key[None], temperature[None])[0][0]

    row_key_B = jax.random.split(jax.random.key(0), 4)
    temperature_B = jnp.array([0.0, 0.8, 1.5, 2.0])
    batched_BT, length_B = jax.jit(answers)(jnp.repeat(prompt_BT, 4, 0), row_key_B, temperature_B)
    mapped_BT = jax.jit(jax.vmap(answer))(row_key_B, temperature_B)
    for row, (temperature, length) in enumerate(zip(temperature_B, length_B, strict=True)):
        print(f"temperature {temperature:.1f}: {tok.decode(batched_BT[row, :length].tolist())!r}")
    print("vmap gives the same tokens:", bool((batched_BT == mapped_BT).all()))


if __name__ == "__main__":
    start(main)
