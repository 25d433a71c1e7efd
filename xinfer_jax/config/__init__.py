"""A frozen `ModelConfig`, static under jit: all numbers of a model. `families` reads it from config.json.

`rope` has the settings of rotary embedding; `model_config` is `ModelConfig`.

- A model is settings, not code: no field stands for a family, and no package but `families` knows the name of
  one. `weights.param_specs` has the tensors of each layer.
- EOS ids are not compared, and used on the host only: models that differ in nothing else share programs.
- Prompts and answers beyond `context_length` are rejected, not truncated.
- longrope's factors depend on the length of a sequence, not on the position: `forward` takes those of each
  row's length. With a cache they are fixed for the batch (`with_fixed_rope`), in an engine for each row by
  what prompt and answer may have together (`KVCache.longest_B`); sequences that would change their factors
  are rejected, where transformers recomputes the cache. A draft model needs no exact result: it
  always has the long factors.
"""
