"""LoRA adapters (Hu et al. 2021) as pytrees, and as PEFT writes them; `weights` has the adapted leaf.

In the order to read: `adapter` puts adapters into a model's parameters, takes them out and merges them;
`peft_config` says which modules an adapter_config.json means, and rejects by name what is not done;
`peft_files` reads and writes directories.
"""
