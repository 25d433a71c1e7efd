"""Names of types that functions of many packages share."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

Params: TypeAlias = dict[str, Any]  # nested dicts and tuples of arrays; an absent tensor is an absent key
AnyArray: TypeAlias = jax.Array | np.ndarray  # jit takes both
PerRow: TypeAlias = float | jax.Array | np.ndarray  # a number for all rows, or an array [B] with one for each
Dtype: TypeAlias = DTypeLike  # "float32", jnp.bfloat16, np.dtype("float32")
# "layer", or a policy of `jax.checkpoint_policies`; None: the backward pass computes nothing again.
Remat: TypeAlias = Literal["layer"] | Callable[..., Any] | None
