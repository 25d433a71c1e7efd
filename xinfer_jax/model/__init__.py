"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Read the files in this order: `layers` (norm, RoPE, linear, gated MLP), `attention` (causal attention),
`rope_append` (RoPE and the append to the cache), `experts` (mixture of experts), `decoder_layer` (one layer,
for all families), `decoder` (`forward`, `hidden_states` and `unembed`). `linear_attention` (Gated DeltaNet,
in place of attention) and `key_bias` (that of quantized caches) are plugged in.
All of it is plain jnp; other forms (kernels, CPUs, meshes) are in `ops`, chosen when a program is traced.

- Layers are a tuple, unrolled in Python: layers may differ, and a scan over stacked weights would slice a
  copy of the layer in each step. Logits, norms, softmax and RoPE angles are float32, whatever the weights.
- Without a cache the loops of attention have static bounds, so `forward` and `score` have reverse-mode
  gradients. With a cache they run over the visible blocks only, so cost follows the length, not the capacity.
- Linear attention computes one token by the recurrence, more by the WY form in blocks of 64 tokens, each of
  which needs the state before it. Draft tokens leave the state as it was: the next call applies those that
  were accepted, so nothing is undone, and no state is kept for each token.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append
  (`ModelConfig.cache_of_layer`). A sink (gpt-oss) is the first score of the online softmax, without a value.
- Over a mesh a layer is one `jax.shard_map` over the axis "model": each device has some heads with their
  keys, and some of the MLP's features or experts. Two sums over all devices follow. Logits stay sharded by
  vocabulary. Arrays sharded along Explicit axes are rejected: with them jax demands an output sharding for
  every product.
"""
