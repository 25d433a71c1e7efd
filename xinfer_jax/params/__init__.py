"""The tree of parameters: `xj.params`. Use it to name leaves, to convert them, or to lay them out on devices.

- `param_names` lists every leaf as a `ParamName`: path, Hugging Face name, shape and logical axes.
- `params_from_tensors` and `params_to_tensors` convert between the tree and named tensors.
- `stack_layers` and `unstack_layers` serve programs that scan over layers.
- `dequantize` returns float arrays in place of quantized matrices.
- `shardings` and `reshard` place a tree on a mesh.

The code is in `families/` and `weights/`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
