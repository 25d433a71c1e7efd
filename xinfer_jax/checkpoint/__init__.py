"""Loads a model and its tokenizer from a directory or a hub name. No other package reads those files.

In the order to read: `files` finds the directory and reads its small files, `other_formats` says what others
are; `template_files` finds the chat templates, `template_budget` limits the work of one and `chat_template`
renders it in a sandbox, `template_tools` finds what it does with tools; `response_template` reads how a
checkpoint says that its answers are written, `template_content` parses their fields and `template_splitter`
takes them apart; `token_coverage` bounds the number of ids of a text by its length; `tokenizer` converts text
to ids and back, `escaping` keeps control tokens out of what users write, `conversation` returns the ids of a
prompt, `tool_choice` has the grammar of answers that call a tool; `detokenizer` decodes ids as they arrive,
`stop_strings` finds stop strings in that text, `answer_detokenizer` does both; `tensors` opens safetensors
files, `text_tensors` leaves out those of vision models, draft layers and value heads; `own_format` is our
format of quantized checkpoints, `awq_gptq_format`, `bitnet_format` and `mxfp4_format` are those of others,
`quantized_formats` finds a checkpoint's format; `sharded_leaves` splits a leaf over the devices of a mesh and
`leaf_loader` reads it; `loading` has `load_model`.

- A checkpoint is not trusted. Every value is checked before use; tensors come only from safetensors, never
  from a pickle; the time and memory of a chat template are counted before they are spent, and patterns of a
  response template are rejected whose matches `re` might search for without end.
- Loading has two steps. `open_checkpoint` reads headers and small files, rejects what does not fit and knows
  every shape, so that programs compile while `Checkpoint.read` reads the weights.
- Weights are read leaf by leaf, in blocks on all cores, into memory that the device array keeps: on CPU
  `jax.device_put` adopts a NumPy buffer aligned to 64 bytes. Apart from the leaves, each core needs a block
  of a few MiB. Files are not memory-mapped: mapped pages would count as memory of the process.
- One place names a tensor, its `FileSpec`: a checkpoint stores it alone, as rows of a fused matrix, or as
  one tensor per expert. Missing, unexpected and mis-shaped tensors are reported together, before reading.
- Experts in MXFP4 keep their bytes, with outputs last and gate and up apart. To dequantize them, tensors that
  compute float numbers of the rows that are read replace theirs: all else is as for float files.
- Our quantized format stores every leaf as it is in memory: saving and loading change no bit.
- The config's EOS ids come from the first file that has any: generation_config, config, tokenizer.
"""
