"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Read the files in this order: `layers` (norm, RoPE, linear, gated MLP), `attention` (causal attention),
`rope_append` (RoPE and the append to the cache), `experts` (mixture of experts), `decoder_layer` (one layer,
for all families), `decoder` (`forward`, `hidden_states` and `unembed`). Plugged in are `linear_attention`
(Gated DeltaNet), `stacked_layers` (a scan over equal layers), `packing` (several texts in a row), `routes`
(which experts tokens use), `taps` (the residual stream, read or edited), `rope_scaling` (RoPE for longer
contexts) and `key_bias` (that of quantized caches). `ops` has other forms of operations. `attention_maps`
is for looking into a model.

- Layers are a tuple, unrolled in Python: layers may differ, and a scan over stacked weights would slice a
  copy of the layer in each step. Logits, norms, softmax and RoPE angles are float32, whatever the weights.
- Without a cache the loops of attention have static bounds, so `forward` and `score` have reverse-mode
  gradients. With a cache they run over the visible blocks only, so cost follows the length, not the capacity.
- Linear attention computes one token by the recurrence, more by the WY form in blocks of 64 tokens, each of
  which needs the state before it. Draft tokens leave the state as it was: the next call applies those that
  were accepted, so nothing is undone, and no state is kept for each token.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append
  (`ModelConfig.cache_of_layer`). A sink (gpt-oss) is the first score of the online softmax, without a value.
- `over`, where functions have it, is the axis of a mesh along which a `jax.shard_map` around the layer has
  divided heads, experts and features. Then the initial values of loops must be marked as varying
  (`match_varying_axes`).
"""
