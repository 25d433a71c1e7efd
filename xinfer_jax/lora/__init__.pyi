from ..adapters.adapted_params import (
    merge_adapter as merge_adapter,
    split_adapter as split_adapter,
    with_adapter as with_adapter,
    with_adapters as with_adapters,
)
from ..adapters.adapter import Adapter as Adapter, LowRank as LowRank, init_adapter as init_adapter
from ..adapters.peft_files import load_adapter as load_adapter, save_adapter as save_adapter
