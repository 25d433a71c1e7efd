"""Loads a model and its tokenizer: from a directory, hub name or GGUF file. No other package reads them.

In the order to read: `files` finds the directory and reads its small files, `other_formats` says what others
are; `template_files`, `template_budget` and `chat_template` find, limit and render chat templates,
`template_tools` finds what one does with tools; `response_template`, `template_content` and
`template_splitter` read how answers are written; `token_coverage` bounds the number of ids of a text,
`tokenizer_limits` what a tokenizer makes of it; `tokenizer_classes` and `tokenizer` convert text to ids and
back, `escaping` keeps control tokens out of what users write, `conversation` returns the ids of a prompt,
`tool_choice` has the grammar of answers that call a tool; `detokenizer` and `answer_detokenizer` decode ids
as they arrive; `tensors` opens safetensors files, `text_tensors` leaves out those of other models,
`tensor_files` writes files and directories. A quantized format is a `StoredFormat` in a file and a line in
`quantized_formats`: `own_format` and `bitnet_format` store leaves, others have a `scaled_tensor`
(`awq_gptq_format` and `awq_gptq_settings`, `bitsandbytes_format`, `mxfp4_format`, `fp8_format`,
`nvfp4_format`, `mlx_format`, `compressed_tensors_format`, `compressed_tensors_packing`) and `kept_leaves`;
`sharded_leaves` splits a leaf over a mesh, `leaf_loader` reads it; `embedding_modules` reads how vectors are
made of hidden states; `directory` opens a directory, `gguf_checkpoint` a GGUF file (`gguf_file`, `gguf_keys`,
`gguf_format`, `gguf_tensors`, `gguf_tokenizer`); `loading` has `load_model`, `saving` `save_model`.

- A checkpoint is not trusted. Every value is checked before use; tensors come from safetensors and GGUF,
  never from a pickle; the time and memory of a template are counted before they are spent.
- Loading has two steps. `open_checkpoint` reads headers and small files, rejects what does not fit and knows
  every shape, so that programs compile while `Checkpoint.read` reads the weights.
- Weights are read leaf by leaf into memory that the device array keeps. Files are not memory-mapped.
- One place names a tensor, its `FileSpec`. Missing, unexpected and mis-shaped tensors are reported together.
- Our quantized format stores every leaf as it is in memory: saving and loading change no bit.
"""
