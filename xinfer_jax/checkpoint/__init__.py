"""From a directory, or a name on the hub, to a model and its tokenizer. No other room reads those files.

In the order to read: `files` finds the directory and reads its small files; `template_work` says what a chat
template may do, `chat_template` runs it in a sandbox; `tokenizer` is text to ids and back, `escaping` keeps
what users write from becoming control tokens, `conversation` gives the ids of a prompt; `detokenizer` gives
text as ids come, `stop_strings` finds stop strings in it; `tensors` finds what safetensors files hold;
`own_format` is our quantized checkpoints, `quantized_formats` those of AWQ, GPTQ and BitNet; `spread` reads
of a leaf what the devices of a mesh hold; `loading` is `load_model`.

- What comes from a checkpoint is not trusted: every value is checked before it is used, tensors are
  safetensors alone (a pickle is refused), a template's time and memory are counted before they are spent.
- Loading has two steps: `open_checkpoint` reads headers and small files, refuses what does not fit and gives
  every shape, so that programs can be compiled while `Checkpoint.read` reads the weights.
- Weights are read a leaf at a time, in blocks on all cores, into memory that the array keeps: on CPU
  `jax.device_put` takes over a NumPy buffer that is aligned to 64 bytes. Beside the leaves each core holds a
  block of a few MiB. Files are not mapped: the pages of a map count as memory of the process.
- A tensor is named in one place, its `ParamSpec`: where a checkpoint holds it alone, as rows of a fused
  matrix, or one for each expert. Missing, unexpected and mis-shaped ones are named together, before reading.
- Our quantized format holds every leaf as it is in memory, so writing and loading change no bit.
- EOS ids of the config are those of the first that has any: generation_config, config, tokenizer.
"""
