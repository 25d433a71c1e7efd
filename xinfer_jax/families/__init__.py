"""Model families: config.json to `ModelConfig`, and names of tensors to leaves of parameters.

In the order to read: `family` is what a file says of a family; `values` checks values of config.json,
`layer_fields` and `rope_settings` read what several families share; then a file for each family, or for those
that share most of it (`llama`, `qwen`, `olmo`, `gemma`, `gemma4`, `phi3`, `bitnet`, `mixtral`, `exaone4`,
`granite`, `gpt_oss`, `glm4_moe`, `hybrids`, `lfm2`, `glm`, `ernie4_5`, `dots1`, `minimax_m2`, `hunyuan`,
`cohere2`, `apertus`), and `grouped_experts` for those with experts as in DeepSeek-V3; `naming` makes the
names of all tensors from a family's table; `wrappers` finds the text model within one that sees, `reading` is
`from_hf`, `writing` its inverse `to_hf`; `skipped_tensors` are those that a text model does not read,
`conversion` makes trees of tensors and tensors of trees, `leaf_assembly` leaves of tensors that come one by
one.

- A family is a file here, a line in `plugins.py` and a case in `tests/support/parity_cases.py`.
- What a model does not support follows from its layers (`config.unsupported`): no family can forget it.
- Names are data: a table of leaves that differ from `naming.NAMES` and from those of the parts of layers
  (`Mixer.names`), and the tensors that hold several leaves. Shapes are not repeated: rows within such a
  tensor follow from the parameter specs.
- A setting that would change the result and is not supported is rejected by name, never ignored.
- A `text_config` beside a vision model's settings is read as if it were the whole file. mrope is accepted:
  for text all three positions are equal, so it is plain RoPE.
- Only `checkpoint` and `from_hf`'s callers import this package.
"""
