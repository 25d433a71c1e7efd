"""Estimates of a model's needs, without running it: bytes of memory on devices that this machine need not
have, and the bytes and operations of a prefill or a decode step.

`xinfer-jax plan` prints the memory. `xinfer-jax bench` compares its measurements with the bytes and
operations.

Reading order:

- `model_shapes`: shapes of real models by name, from model_shapes.json.
- `model_work`: the least that a model has to read and to compute.
- `card_specs`: data sheets of GPUs and TPUs, and the descriptions of them for which XLA compiles.
- `plan_estimates`: weights, pages, states and temporaries on each device of a mesh.
"""
