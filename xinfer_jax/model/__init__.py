"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

In the order to read: `layers` has norm, rotary embedding, linear and gated MLP; `experts` the mixture of
experts; `attention` causal attention, in plain jnp and by the kernels of `kernels_pallas`; `decoder` puts
them together as `forward`, `hidden_states` and `unembed`, one decoder for all families; `greedy` is the
likeliest token, of logits or straight from the hidden state.

- Layers are a tuple, unrolled in Python: a scan over stacked weights took twice as long to decode on CPU
  (each step slices a copy of the layer), and layers may differ.
- Logits, norms, softmax and angles are float32, whatever the weights.
- Without a cache attention's loops have static bounds, so `forward` and `score` have reverse-mode gradients;
  with one they run over the visible blocks alone, so cost follows the length, not the capacity.
- On CPU few queries (decoding, guesses) attend one row after the other, 64 keys at a time: products batched
  over rows took three to four times as long and followed the longest row, and a row's bits now depend on no
  other. Half of a step waits for the copy of its keys, at 8 GB/s, the rest is small products and softmax, all
  on one core. An accelerator takes all rows at once.
- Experts are a scan over all where tokens are many, each asked for every token: exact and short, at X /
  chosen times the arithmetic needed. Where choices are fewer than experts (decoding) only those are read.
- The greedy token needs no logits where a kernel serves: it keeps maximum, index and sum of exponentials,
  which gives the log-probability too. `lax.cond` on "all rows are greedy" picks it: temperature stays traced.
- A soft prompt enters as `inputs_BTD` in place of embeddings: positions, lengths and shapes stay the tokens'.
- Over a mesh (`sharding`) a layer is one `jax.shard_map` over its axis "model": each device has some heads,
  the keys of these, and some of the MLP's inside or some experts, runs the code of one device on them,
  kernels and quantized products too, and adds what it gives to what the others give: two sums [.., D] a
  layer in the type of the activations. The embedding adds a third; logits stay divided by vocabulary, and
  what chooses from them is completed by the compiler, with numbers of rows only. Matrices of a vocabulary
  that devices do not divide have rows of padding; `unembed` cuts their logits off, and the compiler keeps
  the others divided, unevenly. int8 scales activations by
  the largest of a device's inputs, so its last bits depend on the number of devices.
- Under `jax.shard_map` what loops start from says that it varies (`varying_as`). Arrays divided along
  Explicit axes, the default of `jax.make_mesh`, are refused: jax then wants the layout of every product said.
  The type of an array tells, so the check costs a call nothing.
"""
