"""LoRA adapters as pytrees: `xj.lora`. Use it to train an adapter, to load one, or to merge one.

- `init_adapter` makes an `Adapter` of `LowRank` matrices, `load_adapter` and `save_adapter` read and write
  PEFT's directories.
- `with_adapter` returns parameters that compute with the adapter, `with_adapters` with one for each row.
- `split_adapter` takes the adapter out again, and `merge_adapter` adds it to the weights.

An engine holds adapters by name (`Engine.add_adapter`). The code is in `adapters/`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
