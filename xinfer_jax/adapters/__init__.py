"""LoRA adapters (Hu et al. 2021) as pytrees, and as PEFT writes them; `weights` has the adapted leaf.

In the order to read: `adapter` is the pytree; `fitted_adapter` gives it the form that parameters need, and
`adapted_params` puts it into them, takes it out and merges it; `peft_config` says which modules an
adapter_config.json means, and rejects what is not done; `peft_modules` knows which matrices a module holds;
`peft_files` reads and writes directories.

- A tied model's matrix has one adapter for embedding and head, "embed", or another for the head, "lm_head".
  PEFT adapts them apart unless `ensure_weight_tying` is set, so a file may have either.
"""
