"""Processes that work together: one connection, one way to encode messages, one proof of the secret, and one
launcher.

The package knows no engine, no flag and no HTTP: `engine`, `cli` and `serve` give messages their meaning.

Reading order, modules that load neither jax nor numpy:

- `secret` has the file of the secret, and signatures made with it.
- `codec` encodes messages as JSON.
- `channel` is a connection of two processes.
- `coordinator` compares the settings of processes, and ends all of them together.
- `launcher` is the parent of one of them, which starts it.

Modules that load jax:

- `control_channel` sends from process 0 of a run to the others.
- `array_transfer` sends arrays to another process.
- `tensor_stream` sends named tensors to another process.

Decisions:

- Both ends of a connection prove that they know the secret of the run before they send a message. Messages
  are signed and numbered, so nobody can add, change, repeat or remove one. Nothing is encrypted.
- Messages are data: each class has a function that makes its values, and nothing is unpickled.
"""
