"""What a model needs, without running it: bytes of memory on devices that this machine need not have, and the
bytes and operations of a prefill or a decode step. `xinfer-jax plan` prints the first, and `xinfer-jax bench`
compares what it measures with the second.

In the order to read: `model_shapes` (shapes of real models by name, from model_shapes.json), `model_work`
(what a model has to read and to compute at least), `card_specs` (data sheets of GPUs and TPUs, and their
descriptions, for which XLA compiles), `plan_estimates` (weights, pages, states and temporaries on each device
of a mesh).
"""
