"""Model families, one file each: config.json to `ModelConfig`, and names of tensors to leaves of parameters.

In the order to read: `family` is what a file says of its family; `values` checks values of config.json,
`rope_settings`, `layer_fields` and `sparse_layers` read what several families share; then one file for each
family (`llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe`, `smollm3`, `olmo2`, `olmo3`, `gemma2`, `gemma3`,
`gemma4`, `phi3`, `bitnet`, `gpt_oss`; `hybrids` is what `qwen3_next` and `qwen3_5` share); `naming` makes the
names of all tensors from a family's table; `reading` is `from_hf`.

- A family is a file here, a line in `plugins.py` and a case in `tests/support/parity_cases.py`.
- What a model does not support follows from its layers (`config.unsupported`): no family can forget it.
- Names are data: a table of leaves that differ from `naming.NAMES`, and the tensors that hold several leaves.
  Shapes are not repeated: rows within such a tensor follow from the parameter specs.
- A setting that would change the result and is not supported is rejected by name, never ignored.
- A `text_config` beside a vision model's settings is read as if it were the whole file. `mrope_section` and
  `mrope_interleaved` are accepted: for text all three positions are equal, so it is plain RoPE.
- Only `checkpoint` and `from_hf`'s callers import this package.
"""
