"""What a model is, as numbers: a frozen `ModelConfig`, static under jit, from a Hugging Face config.json.

In the order to read: `values` checks one value of config.json against the range that a model could ask for;
`rope` is the rotary embedding's settings; `families` has one small function for each model family over one
table of defaults; `model_config` is `ModelConfig` and `from_hf`.

- A family is settings, not code. What a layer has follows from the parameter tree (a norm that the tree lacks
  passes x on), what differs by numbers from the config; no other room knows a family's name.
- A setting that would change the result and is not supported is refused by name, never ignored.
- EOS ids are not compared, and read on the host only: models that differ in nothing else share programs.
- Prompt and new tokens beyond `context_length` are refused, not cut.
- longrope's factors belong to a sequence, not to a position: `forward` takes those of each row's length; with
  a cache they are fixed for the batch (`with_fixed_rope`), and what would cross the switch is refused, where
  transformers throws the cache away. A draft only guesses: it keeps the long factors throughout.
"""
