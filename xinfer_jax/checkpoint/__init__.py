"""From a directory, or a name on the hub, to a model and its tokenizer. No other room reads those files.

In the order to read: `files` finds the directory and reads its small files; `template_work` says what a chat
template may do, `chat_template` runs it in a sandbox; `tokenizer` is text to ids and back, `detokenizer` the
same as ids come; `own_format` is our quantized checkpoints, `quantized_formats` those of AWQ and GPTQ;
`loading` is `load_model`.

- What comes from a checkpoint is not trusted: every value is checked before it is used, tensors are
  safetensors alone (a pickle is refused), a template's time and memory are counted before they are spent.
- Loading copies once, a tensor at a time, into memory that the array keeps: on CPU `jax.device_put` takes
  over a NumPy buffer that is aligned to 64 bytes.
- A tensor is named in one place, its `ParamSpec`: where a checkpoint holds it alone, as rows of a fused
  matrix, or one for each expert. Missing, unexpected and mis-shaped ones are named together, before reading.
- Our quantized format holds every leaf as it is in memory, so writing and loading change no bit.
- EOS ids of the config are those of the first that has any: generation_config, config, tokenizer.
"""
