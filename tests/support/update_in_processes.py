"""One of two processes with an engine whose weights are replaced. Arguments: port, number. Prints errors."""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from small_models import QWEN

import xinfer_jax as xj

VECTOR = np.linspace(-1, 1, QWEN["hidden_size"], dtype=np.float32)
BIAS = xj.LogitsProcessor(
    None, lambda s, logits_BV, context: logits_BV + s["by"][:, None] * jnp.sin(jnp.arange(logits_BV.shape[1]))
)
OPTIONS = xj.GenerateOptions(max_tokens=60, eos_token_ids=())


def answer(engine, updates, update, host, root) -> None:
    """Runs in process 0: makes an answer with an update in flight, and others with the weights before and
    after it.
    """
    running = engine.submit([5] * 9, OPTIONS)
    others = []
    for tree, mode in zip(updates, ("recompute", "continue", "wait", "continue"), strict=True):
        while not running.ended and len(running.answers[0].tokens) < 5:
            engine.step()
        update(tree, mode=mode)
        others.append(engine.submit([7] * 9, OPTIONS).result())
    check_directories(engine, host, root)
    running = running.result()
    with jax.default_device(jax.local_devices()[0]):
        wanted = [
            xj.generate(host[i], engine.model.config, [[7] * 9], OPTIONS).logprobs for i in (1, 1, 2, 2)
        ]
    np.testing.assert_allclose([other.logprobs for other in others], wanted, atol=1e-5)
    versions = [sorted({*each.token_versions[0]}) for each in (running, *others)]
    assert versions == [[0, 1], [1], [1], [2], [2]] and engine.version == 4
    use_functions(engine, host[2])
    engine.close()


def check_directories(engine, host, root) -> None:
    """Runs in process 0 alone: the other process reads the same directories within `follow`."""
    with jax.default_device(jax.local_devices()[0]):
        wanted = [xj.generate(x, engine.model.config, [[7] * 9], OPTIONS).logprobs for x in host]
    for number, name in ((1, "1"), (1, "nothing"), (2, "2")):
        try:
            engine.update(root / name)
        except xj.InputError as error:
            assert name == "nothing" and "is no directory" in str(error), error
        found = engine.submit([7] * 9, OPTIONS).result().logprobs
        np.testing.assert_allclose(found, wanted[number], atol=1e-5)
    assert engine.version == 4


def use_functions(engine, params) -> None:
    """Runs in process 0: makes requests that name a caller's processor, and a vector."""
    other, processed, steered = (
        engine.submit([7] * 9, dataclasses.replace(OPTIONS, **named)).result().logprobs
        for named in ({}, dict(processors=dict(bias=dict(by=3.0))), dict(taps=dict(up=2.0)))
    )

    def generated(**how):
        return xj.generate(
            params, engine.model.config, [[7] * 9], dataclasses.replace(OPTIONS, **how)
        ).logprobs

    with jax.default_device(jax.local_devices()[0]):
        wanted = (
            generated(processors=[(BIAS, dict(by=3.0))]),
            generated(taps={0: xj.Tap(2 * VECTOR, jnp.add)}),
        )
    np.testing.assert_allclose([processed, steered], wanted, atol=1e-5)
    assert other not in (processed, steered)


def main(port: str, number: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    config = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=2))
    with jax.default_device(jax.local_devices()[0]):
        base = jax.tree.map(np.asarray, xj.init_params(config, jax.random.key(0), "float32"))
    host = [jax.tree.map(lambda x, i=i: x * (1 - i / 10), base) for i in range(3)]

    def over_mesh(tree):
        def put(x, sharding):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree, xj.params.shardings(config, mesh))

    lacking = dict(host[1], layers=host[1]["layers"][:1]) if number else host[1]
    updates = [host[1], lacking, over_mesh(host[2]), dict(host[0], final_norm=np.ones(3, np.float32))]
    how = dict(processors=dict(bias=(BIAS, dict(by=0.0))), taps=dict(up={0: VECTOR}))
    model = xj.Model(over_mesh(base), config)
    root = Path(tempfile.gettempdir()) / f"update-{port}"
    for i in (1, 2):  # all processes save, and the first one writes
        xj.save_model(host[i], config, root / str(i))
    engine = xj.Engine(model, rows=2, capacity=128, pages=8, chunk=64, **how)
    problems = []

    def update(tree, **how) -> None:
        try:
            engine.update(tree, **how)
        except xj.InputError as error:
            problems.append(str(error))

    if number:
        update(base)
        while engine.follow():
            update(updates.pop(0))
    else:
        answer(engine, updates, update, host, root)
        shutil.rmtree(root)
    print(json.dumps(problems), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once: the other process would be waited for
