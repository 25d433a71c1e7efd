"""Files of tensors, and how matrices are quantized in them.

- `hub` finds the directory of a checkpoint or downloads it, `files` reads its small files, and
  `other_formats` says what other files are.
- `tensors` opens safetensors files, `text_tensors` leaves out the tensors of images and sound, and
  `tensor_files` writes files and directories.
- `own_format` and `bitnet_format` store leaves as they are in memory: saving and loading change no bit.
- `scaled_tensor` reads matrices of other formats: `awq_gptq_format` with `awq_gptq_settings`,
  `bitsandbytes_format`, `mxfp4_format`, `fp8_format`, `nvfp4_format`, `mlx_format`, and
  `compressed_tensors_format` with `compressed_tensors_packing`. `kept_leaves` keeps them quantized, and
  `quantized_formats` chooses a format.
- `gguf_file`, `gguf_keys` and `gguf_format` read GGUF files.

A file is not trusted: every value is checked before it is used, and tensors never come from a pickle.
"""
