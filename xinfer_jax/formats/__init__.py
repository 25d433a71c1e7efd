"""Files of tensors, and the forms in which matrices are quantized in them.

Reading order:

- `hub` finds the directory of a checkpoint or downloads it, and `files` reads its small files.
  `other_formats` describes files of other kinds.
- `tensors` opens safetensors files. `text_tensors` leaves out the tensors of images and sound. `tensor_files`
  writes files and directories.
- `own_format` and `bitnet_format` store leaves as they are in memory: saving and loading change no bit.
- `scaled_tensor` reads matrices of other formats: `awq_gptq_format` with `awq_gptq_settings`,
  `bitsandbytes_format`, `mxfp4_format`, `fp8_format`, `nvfp4_format`, `mlx_format`, and
  `compressed_tensors_format` with `compressed_tensors_packing`.
- `kept_leaves` keeps these matrices quantized, and `quantized_formats` chooses a format.
- `gguf_file`, `gguf_keys` and `gguf_format` read GGUF files.

Decision: a file is not trusted. Every value is checked before it is used, and tensors never come from a
pickle.
"""
