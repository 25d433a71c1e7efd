"""A frozen `ModelConfig`, static under jit: all numbers of a model. `families` reads it from config.json.

Reading order:

- `rope` has the settings of rotary embedding.
- `layer_spec` says which parts a layer has.
- `model_config` is `ModelConfig`.
- `run_config` has the static settings of a run that are no part of the model.
- `unsupported` finds features that the parts of a model do not support.

Decisions about models:

- A model is settings, not code: no field stands for a family, and only `families` knows the name of one.
- Numbers that all layers have are fields with the names of config.json. A `LayerSpec` has the structure of a
  layer, and the numbers in which the layer differs.
- A layer has the parts of its spec, whatever tensors there are: a missing tensor is an error.
- A layer has no mixer, one mixer, or several side by side. It has no feed-forward or one. Code about one of
  them asks `config.mixers(layer)` or `config.feed_forward(layer)`, which look its class up in
  `plugins.TABLE`.
- Experts are the same in all layers that have them.

Decisions about runs:

- EOS ids are not compared, and are used on the host only. So models that differ in nothing else share
  programs.
- Prompts and answers beyond `context_length` raise an error. They are not truncated.
- longrope's factors depend on the length of a sequence, not on the position. `forward` takes the factors for
  each row's length. With a cache they are fixed for the batch (`with_fixed_rope`). In an engine they are
  fixed for each row by the length that prompt and answer may have together (`KVCache.longest_B`).
- A sequence that would change its longrope factors raises an error. transformers recomputes the cache in this
  case. A draft model needs no exact result: it always has the long factors.
"""
