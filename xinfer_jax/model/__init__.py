"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits.

Reading order:

- `extras` has the arrays that rows bring along in addition to their tokens.
- `decoder_layer` is one layer, for all families.
- `decoder` has `forward`, `run_model` and `unembed`.
- `forward_parts` has parts of the forward pass for callers.

Only some calls use these:

- `stacked_layers` scans over equal layers.
- `packing` puts several texts in a row.
- `routes` has the experts that tokens use.
- `taps` reads or edits the residual stream, by functions that `caller_functions` checks.
- `attention_maps` is for looking into a model.

Decisions:

- `run_model` returns all results by name (`ModelOutput`). `forward` and `hidden_states` return two values,
  whatever their arguments are.
- Adapters and vectors of rows, routes and taps are `Extras`, a separate argument: parameters and caches
  contain nothing else than their docstrings say.
- Layers are a tuple, unrolled in Python: layers may differ, and a scan over stacked weights would slice a
  copy of the layer in each step.
- Logits, norms, softmax and RoPE angles are float32, whatever the weights are.
- In Gemma 4 the last layers have no keys: they attend to the cache of an earlier layer, after its append
  (`ModelConfig.caches_of_layers`). A sink (gpt-oss) is the first score of the softmax, without a value.
- `RunConfig.over` is the axis of a mesh along which a `jax.shard_map` around the layer has divided heads,
  experts and features. Then the initial values of loops must be marked as varying (`match_varying_axes`).
"""
