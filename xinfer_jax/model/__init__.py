"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Read the files in this order: `layers` (norm, RoPE, linear, gated MLP), `attention` (causal attention),
`rope_append` (RoPE and the append to the cache), `experts` (mixture of experts), `decoder_layer` (one layer,
for all families), `decoder` (`forward`, `hidden_states` and `unembed`). `linear_attention` (Gated DeltaNet,
in place of attention) and `key_bias` (that of quantized caches) are plugged in.

- Layers are a tuple, unrolled in Python. A scan over stacked weights made decoding on CPU twice as slow,
  since each step slices a copy of the layer; and layers may differ.
- Logits, norms, softmax and RoPE angles are float32, whatever the weights are.
- Without a cache the loops of attention have static bounds, so `forward` and `score` have reverse-mode
  gradients. With a cache they run over the visible blocks only, so cost follows the length, not the capacity.
- On CPU a few queries (decoding, verification of draft tokens) attend one row after the other, 64 keys at a
  time. Products batched over rows took three to four times as long, and as long as the longest row. So a
  row's bits depend on no other row. Half of the time of a step is the copy of its keys at 8 GB/s, the rest is
  small products and softmax, all on one core. An accelerator computes all rows at once.
- Mixture of experts: on GPUs (16-bit matrices) and TPUs a kernel, whose cost follows the choices. On CPU,
  from four times as many experts as a token chooses, many tokens are sorted by expert, and a loop multiplies
  a tile of rows by one expert: 1.0 to 2.7 times as fast as every expert for every token, which is the form
  elsewhere. Where the chosen experts are fewer than all (decoding), only they are computed. Kernel and tiles
  have the derivative of the plain form.
- Linear attention computes one token by the recurrence, more by the WY form in blocks of 64 tokens from the
  first of a call on, one block after another: a block needs the state before it, and then one triangular
  system of the width of a value is solved, not two of the widths of a key and a value. All is float32. It is
  plain jnp on all devices. Padding has decay 1 and beta 0, so it changes no state. A call of a few draft
  tokens leaves the state as it was, and stores what they would change; the next call applies what was
  accepted. So nothing is undone, and no state is kept for each token (17 of 48 MiB for the 9B shape).
- The query, key, value, gate, beta and decay of linear attention are leaves of their own, whatever matrices a
  checkpoint has: they are divided over a mesh by heads, and quantized, as other matrices are. beta and decay
  stay float: they are a thousandth of the weights.
- On a GPU RoPE of up to 17 tokens a row and the append of their keys and values, quantized or not, are one
  launch, which updates the cache in place. XLA would launch two or more, and compute sines and cosines again
  in each layer. Keys in GEAR's format and in float8_e4m3fn stay with XLA. The derivative is plain jnp's.
- On a GPU a decode step launches four products a layer: norm, q, k and v; o and residual; norm, gate, up and
  activation; down and residual. A norm that another step follows, and matrices that the kernel does not take,
  stay with XLA. A product's derivative is that of plain jnp.
- The greedy token needs no logits where a kernel runs: it keeps the maximum, its index and the sum of
  exponentials, which gives the log-probability too. `lax.cond` on "all rows are greedy" selects it, so that
  temperature stays traced.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append.
  `ModelConfig.cache_of_layer` says whose; a program of several layers gets each cache once. Without a cache
  a layer returns its keys and values for them.
- A sink (gpt-oss) is the first score of the online softmax: it sets the largest score so far, and a sum of 1
  without values. So every cache has it, and kernels take it in the same way.
- A soft prompt enters as `inputs_BTD` in place of embeddings. Positions, lengths and shapes stay those of the
  tokens.
- Over a mesh (`sharding`) a layer is one `jax.shard_map` over its axis "model". Each device has some of the
  heads with their keys, and some of the MLP's features or experts. It runs the single-device code on them,
  kernels and quantized products too. Two sums [.., D] a layer over all devices follow, in the dtype of the
  activations; the embedding needs a third. Logits stay sharded by vocabulary, and the compiler completes what
  samples from them, with a few numbers per row. A vocabulary matrix whose rows the devices do not divide has
  rows of padding; `unembed` cuts off their logits, and the compiler keeps the others unevenly sharded. int8
  scales activations by the largest of a device's inputs, so its last bits depend on the number of devices.
- Under `jax.shard_map` the initial values of loops must be marked as varying (`match_varying_axes`). Arrays
  sharded along Explicit axes, the default of `jax.make_mesh`, are rejected: with them jax demands an output
  sharding for every product. The type of an array tells, so the check costs a call nothing.
"""
