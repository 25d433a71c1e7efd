"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Read the files in this order: `decoder_layer` (one layer, for all families), `decoder` (`forward`,
`hidden_states` and `unembed`). Plugged in are `stacked_layers` (a scan over equal layers),
`packing` (several texts in a row), `routes` (which experts tokens use) and `taps` (the residual stream, read
or edited). `attention_maps` is for looking into a model.

- Layers are a tuple, unrolled in Python: layers may differ, and a scan over stacked weights would slice a
  copy of the layer in each step. Logits, norms, softmax and RoPE angles are float32, whatever the weights.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append
  (`ModelConfig.cache_of_layer`). A sink (gpt-oss) is the first score of the online softmax, without a value.
- `over`, where functions have it, is the axis of a mesh along which a `jax.shard_map` around the layer has
  divided heads, experts and features. Then the initial values of loops must be marked as varying
  (`match_varying_axes`).
"""
