"""LoRA adapters as pytrees: `xj.lora`. Use it to train an adapter, to load one, or to merge one.

- `init_adapter` makes a new `Adapter` of `LowRank` matrices. `load_adapter` and `save_adapter` read and write
  directories of PEFT.
- `with_adapter` returns parameters that compute with the adapter, and `with_adapters` does so with one
  adapter for each row.
- `split_adapter` takes the adapter out again, and `merge_adapter` adds it to the weights.

For example, the loss of a trainer is a function of the adapter::

    def loss(adapter):
        params = xj.lora.with_adapter(model.params, adapter)
        return -xj.score(params, model.config, tokens_BT).logprobs_BT.mean()

An engine serves several adapters, and requests choose one by its name (`Engine.add_adapter`). The code is in
`adapters/`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
