"""LoRA adapters: `adapter` (the pytree, in parameters and out of them), `peft_config` and `peft_files` (as
PEFT writes them). `weights/adapted_weight.py` has the leaf.
"""
