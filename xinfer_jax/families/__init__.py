"""Model families: config.json to `ModelConfig`, and names of tensors to leaves of parameters.

Reading order:

- `family` is the description of a family that its file fills in.
- `values` checks values of config.json. `layer_fields` and `rope_settings` read the settings that several
  families share. `grouped_experts` reads the settings of mixtures like DeepSeek-V3's, and `latent_fields`
  reads the settings of latent attention. `mamba_fields` has the settings and names of Mamba-2, and
  `mamba_hybrids` has the settings of models with Mamba-2 and attention.
- A file describes each family, or a few that share most of it: `llama`, `qwen`, `olmo`, `gemma`, `gemma4`,
  `phi3`, `bitnet`, `mixtral`, `exaone4`, `granite`, `granite_moe`, `gpt_oss`, `glm4_moe`, `hybrids`, `lfm2`,
  `lfm2_moe`, `lfm3`, `mamba`, `bamba`, `falcon_h1`, `granite_hybrid`, `nemotron_h`, `glm`, `ernie4_5`,
  `dots1`, `minimax_m2`, `hunyuan`, `cohere2`, `apertus`, `deepseek`, `glm4_moe_lite`, `mistral4`, `minicpm3`.
- `draft_heads` has the names of heads for multi-token prediction in the files of models, and their settings.
- `naming` makes the names of all tensors from a family's table.
- `wrappers` finds the text model within a model that also reads images.
- `reading` is `from_hf`, and `writing` is its inverse `to_hf`.
- `skipped_tensors` are the tensors that a text model does not read.
- `draft_files` is the description of the files of draft heads, which `dflash_files`, `eagle3_files` and
  `gemma4_assistant_files` fill in.
- `conversion` makes trees of tensors and tensors of trees. `leaf_assembly` makes leaves of tensors that come
  one by one.

Decisions:

- A family is a file here, a line in `plugins.py` and a case in `tests/support/parity_cases.py`.
- The features that a model does not support follow from its layers (`config.unsupported`): no family can
  forget one.
- Names are data: a table of leaves that differ from `naming.NAMES` and from the names of the parts of layers
  (`Mixer.names`), and the tensors that hold several leaves. Shapes are not repeated: rows within such a
  tensor follow from the parameter specs.
- A setting that would change the result and is not supported raises an error that names it. It is never
  ignored.
- A `text_config` next to a vision model's settings is read as if it were the whole file. mrope is accepted:
  for text all three positions are equal, so it is plain RoPE.
- Only `checkpoint` and `from_hf`'s callers import this package.
"""
