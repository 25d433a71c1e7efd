"""Opens, loads and saves a model: from a directory, a hub name or a GGUF file.

Reading order:

- `directory` opens a directory. `gguf_checkpoint` opens a GGUF file with `gguf_architectures`, `gguf_states`
  and `gguf_tensors`.
- `sharded_leaves` splits a leaf over a mesh, and `leaf_loader` reads it.
- `embedding_modules` reads how vectors are made of hidden states.
- `loading` has `load_model`, and `saving` has `save_model`. `draft_loading` loads and saves draft heads.
- `model_defaults` fills in the sampling settings, the key and the EOS ids that a caller does not give.
- `config_difference` compares the config of a checkpoint with the config of a model.
- `new_leaves` reads new weights of a running model, leaf by leaf.

Decisions:

- Loading has two steps. `open_checkpoint` reads headers and small files, rejects settings that do not fit and
  knows every shape. So programs compile while `Checkpoint.read` reads the weights.
- Weights are read leaf by leaf into memory that the device array keeps. Files are not memory-mapped.
- One place names a tensor, its `FileSpec`. Missing, unexpected and mis-shaped tensors are reported together.
"""
