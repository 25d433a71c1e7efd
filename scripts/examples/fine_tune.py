"""A fine-tune of the bundled model by optax. Orbax keeps parameters and optimizer state while it trains, and
the result is saved as a checkpoint that transformers opens too.

    pip install optax orbax-checkpoint; python scripts/examples/fine_tune.py
"""

from checkout import start

# isort: split
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import xinfer_jax as xj

STEPS = 20
BREAK = 10  # the step at which training is interrupted
QUESTION = [dict(role="user", content="What is the capital of Atlantis?")]
ANSWER = "The capital of Atlantis is Poseidonis.<|im_end|>"


def main(argv: list[str]) -> None:
    model = xj.load_model(dtype="float32")
    question = xj.encode_prompt(model, QUESTION)
    tokens_BT = jnp.array([question + model.tokenizer.encode(ANSWER)])
    optimizer = optax.adam(1e-3)

    def loss(params):
        return -xj.score(params, model.config, tokens_BT)[:, len(question) - 1 :].mean()

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
        target = jax.tree.map(shape_on, shapes, xj.shardings(model.config, mesh)), state_shapes
        params, state = ocp.StandardCheckpointer().restore(kept, target)  # each device reads its part
        for _ in range(STEPS - BREAK):
            value, params, state = step(params, state)
        print(f"step {STEPS}: {value:.3f} nats per token")

        xj.save_model(Path(folder) / "tuned", params, model.config, tokenizer=model.tokenizer)
        tuned = xj.load_model(Path(folder) / "tuned")
        print(xj.generate_text(tuned, QUESTION, xj.GenerateOptions(max_new_tokens=24)))


def shape_on(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


if __name__ == "__main__":
    start(main)
