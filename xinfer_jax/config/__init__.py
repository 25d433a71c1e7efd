"""A frozen `ModelConfig`, static under jit: all numbers of a model. `families` reads it from config.json.

In the order to read: `rope` has the settings of rotary embedding; `layer_spec` says what a layer has;
`model_config` is `ModelConfig`; `run_config` has what is static about a run and no part of the model;
`unsupported` finds what the parts of a model do not support.

- A model is settings, not code: no field stands for a family, and only `families` knows the name of one.
- Numbers that all layers have are fields with the names of config.json. A `LayerSpec` has the structure of a
  layer, and where it differs from these numbers.
- A layer has what its spec says, not the tensors that happen to be there: a missing one is an error.
- A layer has no mixer, one, or several side by side, and no feed-forward or one. What is about one of them
  asks `config.mixers(layer)` or `config.feed_forward(layer)`, which look its class up in `plugins.TABLE`.
- Experts are the same in all layers that have them.
- EOS ids are not compared, and used on the host only: models that differ in nothing else share programs.
- Prompts and answers beyond `context_length` are rejected, not truncated.
- longrope's factors depend on the length of a sequence, not on the position: `forward` takes those of each
  row's length. With a cache they are fixed for the batch (`with_fixed_rope`), in an engine for each row by
  what prompt and answer may have together (`KVCache.longest_B`); sequences that would change their factors
  are rejected, where transformers recomputes the cache. A draft model needs no exact result: it
  always has the long factors.
"""
