"""Supervised fine-tuning by optax: conversations are packed, several in a row, and answers alone are learned.
Orbax keeps parameters and optimizer state while it trains, and the result is saved as a checkpoint that
transformers opens too.

    pip install '.[train]' && python scripts/examples/sft.py
"""

from checkout import start

# isort: split
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import xinfer_jax as xj

STEPS = 20
BREAK = 10  # the step at which training is interrupted
ROW = 96  # tokens
CAPITALS = {"Atlantis": "Poseidonis", "Utopia": "Amaurot", "Laputa": "Lagado", "Narnia": "Paravel"}


def question(country):
    return [dict(role="user", content=f"What is the capital of {country}?")]


def pack(texts):
    """Returns rows of texts, each a pair of lists of ids, prompt and answer: a text goes to the first row
    with space. The result is tokens, segment ids, from 1, and True if token t+1 belongs to an answer, [B,
    T-1] like the result of `score`.
    """
    rows = []
    for prompt, answer in texts:
        need = len(prompt) + len(answer)
        row = next((row for row in rows if len(row) + need <= ROW), None)
        if row is None:
            rows.append(row := [])
        segment = row[-1][1] + 1 if row else 1
        row += [(token, segment, False) for token in prompt] + [(token, segment, True) for token in answer]
    columns = np.array([row + [(0, 0, False)] * (ROW - len(row)) for row in rows])
    tokens_BT, segment_ids_BT, is_answer_BT = np.moveaxis(columns, -1, 0)
    return tokens_BT, segment_ids_BT, is_answer_BT[:, 1:] > 0


def main(argv):
    model = xj.load_model(dtype="float32")
    ask = lambda country: xj.encode_prompt(model, question(country))  # noqa: E731
    answer = lambda pair: model.tokenizer.encode("The capital of {} is {}.<|im_end|>".format(*pair))  # noqa: E731
    tokens_BT, segment_ids_BT, mask_BT = pack([(ask(pair[0]), answer(pair)) for pair in CAPITALS.items()])
    print(f"{len(CAPITALS)} texts in {len(tokens_BT)} rows of {ROW} tokens")
    optimizer = optax.adam(2e-3)

    def loss(params):
        logprobs_BT = xj.score(
            params, model.config, tokens_BT, segment_ids_BT=segment_ids_BT, remat="layer"
        ).logprobs_BT
        return -jnp.mean(logprobs_BT, where=mask_BT)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return value, optax.apply_updates(params, updates), state

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "training"
        params = model.params
        state = optimizer.init(params)
        for _ in range(BREAK):
            value, params, state = step(params, state)
        print(f"step {BREAK}: {value:.3f} nats per token")
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            checkpointer.save(kept, args=ocp.args.StandardSave((params, state)))  # in the background

        mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        (shapes, state_shapes) = jax.eval_shape(lambda: (model.params, optimizer.init(model.params)))
        target = jax.tree.map(shape_on, shapes, xj.params.shardings(model.config, mesh)), state_shapes
        params, state = ocp.StandardCheckpointer().restore(kept, target)  # each device reads its part
        for _ in range(STEPS - BREAK):
            value, params, state = step(params, state)
        print(f"step {STEPS}: {value:.3f} nats per token")

        xj.save_model(params, model.config, Path(folder) / "tuned", tokenizer=model.tokenizer)
        tuned = xj.load_model(Path(folder) / "tuned")
        for text in xj.generate_text(tuned, [*map(question, CAPITALS)], xj.GenerateOptions(max_tokens=24)):
            print(text)


def shape_on(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


if __name__ == "__main__":
    start(main)
