"""LoRA adapters (Hu et al. 2021) as pytrees, and in the files that PEFT writes. The adapted leaf is in
`weights`.

Reading order:

- `adapter` is the pytree.
- `fitted_adapter` gives an adapter the form that parameters need.
- `adapted_params` puts an adapter into parameters, takes it out and merges it.
- `peft_config` reads which modules an adapter_config.json means, and rejects settings that are not supported.
- `peft_modules` knows which matrices a module holds.
- `peft_files` reads and writes directories.

Decision: the matrix of a tied model has one adapter for embedding and head, "embed", or another adapter for
the head, "lm_head". PEFT adapts both separately unless `ensure_weight_tying` is set, so a file may have
either form.
"""
