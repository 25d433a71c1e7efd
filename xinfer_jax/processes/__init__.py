"""Processes that work together: one connection, one way to encode messages, one proof of the secret, and one
launcher. It knows no engine, no flag and no HTTP: `engine`, `cli` and `serve` give messages their meaning.

In the order to read: `secret` (its file, and signatures made with it), `codec` (messages as JSON), `channel`
(a connection of two processes), `coordinator` (compares the settings of processes, and ends all of them
together) and `launcher` (the parent of one of them, which starts it). These load neither jax nor numpy. With
jax: `control_channel` (from process 0 of a run to the others), `array_transfer` (arrays to another process),
`tensor_stream` (named tensors to another process).

- Both ends of a connection prove that they know the secret of the run before they send a message. Messages
  are signed and numbered, so nobody can add, change, repeat or remove one. Nothing is encrypted.
- Messages are data: each class has a function that makes its values, and nothing is unpickled.
"""
