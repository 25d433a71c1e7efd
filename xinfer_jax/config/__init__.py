"""A frozen `ModelConfig`, static under jit, from a Hugging Face config.json.

In the order to read: `values` checks single values of config.json; `rope` has the settings of rotary
embedding, `sparse_layers` those of experts; `hybrids` has families with linear attention, `gemma4` and
`gpt_oss` the families of these names; `families` has one small function for each model family over one table
of defaults; `model_config` is `ModelConfig` and `from_hf`.

- A family is settings, not code. The parameter tree says which tensors a layer has (a missing norm is the
  identity), the config has the numbers. No other package knows a family's name.
- A setting that would change the result and is not supported is rejected by name, never ignored.
- A `text_config` beside a vision model's settings is read as if it were the whole file. `mrope_section` and
  `mrope_interleaved` are accepted: for text all three positions are equal, so it is plain RoPE.
- EOS ids are not compared, and used on the host only: models that differ in nothing else share programs.
- Prompts and answers beyond `context_length` are rejected, not truncated.
- longrope's factors depend on the length of a sequence, not on the position: `forward` takes those of each
  row's length. With a cache they are fixed for the batch (`with_fixed_rope`), in an engine for each row by
  what prompt and answer may have together (`KVCache.longest_B`); sequences that would change their factors
  are rejected, where transformers recomputes the cache. A draft model needs no exact result: it
  always has the long factors.

A new family needs two files: `families` gets its defaults and its function, and
`tests/support/parity_cases.py` a case of it. A family with a new kind of layer also needs fields in
`model_config`, parameter specs in `weights/params.py` and the layer in `model/`.
"""
