"""The tree of parameters: `xj.params`. Use it to list leaves, to convert them, or to place them on devices.

- `param_names` lists every leaf as a `ParamName`: path, Hugging Face name, shape and logical axes.
- `params_from_tensors` and `params_to_tensors` convert between the tree and named tensors.
- `stack_layers` and `unstack_layers` are for programs that scan over layers.
- `dequantize` returns float arrays in place of quantized matrices.
- `shardings` and `reshard` place a tree on a mesh, for example
  `jax.device_put(params, xj.params.shardings(config, mesh))`.

The code is in `families/` and `weights/`.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
