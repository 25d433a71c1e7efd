"""Supervised fine-tuning of a LoRA adapter by optax: the model's own weights have no gradients and no
optimizer state. The adapter is saved as PEFT does, and an engine answers with it and without in one batch.

    pip install '.[train]'; python scripts/examples/adapter_sft.py
"""

from checkout import start

# isort: split
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import xinfer_jax as xj

STEPS = 40
CAPITALS = {"Atlantis": "Poseidonis", "Utopia": "Amaurot", "Laputa": "Lagado"}


def question(country):
    return [dict(role="user", content=f"What is the capital of {country}?")]


def main(argv):
    model = xj.load_model(dtype="float32")
    prompts = [xj.encode_prompt(model, question(country)) for country in CAPITALS]
    answers = [
        model.tokenizer.encode("The capital of {} is {}.<|im_end|>".format(*x)) for x in CAPITALS.items()
    ]
    num_tokens_B = np.array(
        [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    )
    place_BT = np.arange(max(num_tokens_B))[None]
    tokens_BT = np.zeros((len(CAPITALS), max(num_tokens_B)), np.int32)
    for row, ids in zip(tokens_BT, map(list.__add__, prompts, answers), strict=True):
        row[: len(ids)] = ids
    starts_B = np.array([*map(len, prompts)])
    mask_BT = ((place_BT >= starts_B[:, None]) & (place_BT < num_tokens_B[:, None]))[:, 1:]
    options = xj.GenerateOptions(max_tokens=24)
    adapter = xj.lora.init_adapter(model.config, jax.random.key(0), rank=8)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(adapter)

    def loss(adapter):
        adapted = xj.lora.with_adapter(model.params, adapter)
        return -jnp.mean(xj.score(adapted, model.config, tokens_BT, num_tokens_B).logprobs_BT, where=mask_BT)

    @jax.jit
    def step(adapter, state):
        value, gradient = jax.value_and_grad(loss)(adapter)
        updates, state = optimizer.update(gradient, state)
        return value, optax.apply_updates(adapter, updates), state

    for i in range(STEPS):
        value, adapter, state = step(adapter, state)
        if i % 10 == 9:
            print(f"step {i + 1}: {value:.3f} nats per token")
    trained, all_weights = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (adapter, model.params))
    print(f"trained: {trained} numbers beside {all_weights}")
    with tempfile.TemporaryDirectory() as folder:
        xj.lora.save_adapter(adapter, model.config, Path(folder) / "capitals")
        with xj.Engine(
            model, rows=4, capacity=192, adapters=dict(capitals=Path(folder) / "capitals")
        ) as engine:
            for country in CAPITALS:
                both = engine.generate([question(country)] * 2, options, adapter=["capitals", None])
                print(" | ".join(model.tokenizer.decode(out.tokens[0]) for out in both))


if __name__ == "__main__":
    start(main)
