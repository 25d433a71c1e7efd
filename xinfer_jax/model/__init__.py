"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Read the files in this order: `extras` (what rows bring along next to their tokens), `decoder_layer` (one
layer, for all families), `decoder` (`forward`, `run_model` and `unembed`), `forward_parts` (its parts for
callers). Only some calls use `stacked_layers` (a scan over equal layers), `packing` (several texts in a row),
`routes` (which experts tokens use) and `taps` (the residual stream, read or edited, by functions that
`caller_functions` checks). `attention_maps` is for looking into a model.

- `run_model` returns all results by name (`ModelOutput`). `forward` and `hidden_states` return two values,
  whatever their arguments are.
- Adapters and vectors of rows, routes and taps are `Extras`, an argument of their own: parameters and caches
  contain nothing else than their docstrings say.
- Layers are a tuple, unrolled in Python: layers may differ, and a scan over stacked weights would slice a
  copy of the layer in each step. Logits, norms, softmax and RoPE angles are float32, whatever the weights.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append
  (`ModelConfig.caches_of_layers`). A sink (gpt-oss) is the first score of the softmax, without a value.
- `RunConfig.over` is the axis of a mesh along which a `jax.shard_map` around the layer has divided heads,
  experts and features. Then the initial values of loops must be marked as varying (`match_varying_axes`).
"""
