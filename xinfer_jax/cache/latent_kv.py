"""Keys and values of latent attention: one vector for each token, of which the first part is the value."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..errors import InputError
from ..kernels_pallas.key_layouts import LANES, Latents
from .layer_cache import shard_heads
from .stored_kv import StoredKV, quantized_dtype, stores_side_by_side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LatentKV(StoredKV):
    """Keys of one layer in an array of floats. The first C numbers of a key are its value."""

    # [B, K, S, `stored_width`]: the latent, the rotated part, and on TPUs zeros; or pages of them.
    values: Any
    scale: None
    rank: int = dataclasses.field(metadata=dict(static=True))  # C
    width: int = dataclasses.field(metadata=dict(static=True))  # C + R

    @property
    def name(self) -> str:
        return self.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:3], self.width)

    @property
    def value_width(self) -> int:
        """The width of values, which is another than that of keys."""
        return self.rank

    def map_slots(self, function: Callable, *others: Self) -> Self:
        return dataclasses.replace(self, values=function(*(kv.values for kv in (self, *others))))

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        return dataclasses.replace(self, values=self._fill(x_BKTH[0]))

    def decode(self) -> tuple[jax.Array, jax.Array]:
        return self.values[..., : self.width], self.values[..., : self.rank]

    def kernel_array(self) -> Latents:
        return Latents(self.values, self.rank)

    def with_kernel_array(self, array: Latents) -> Self:
        return dataclasses.replace(self, values=array.values)

    def separate(self) -> tuple[Any, Any]:
        """Returns the latents and the rotated parts."""
        return self.values[..., : self.rank], self.values[..., self.rank : self.width]

    def join(self, k: Any, v: Any) -> Self:
        return dataclasses.replace(self, values=self._fill(np.concatenate([k, v], -1)))

    def _fill(self, x: Any) -> Any:
        """Returns vectors of C + R numbers in the width of `values`."""
        widths = [*[(0, 0)] * (x.ndim - 1), (0, self.values.shape[-1] - self.width)]
        return (np if isinstance(x, np.ndarray) else jnp).pad(x, widths)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty_latents(
    shape: tuple[int, ...], rank: int, dtype: Any, mesh: Mesh | None = None, has_rows: bool = True
) -> LatentKV:
    """Returns zeros, divided over a mesh as in `sharded_pair`. shape: [B, K, S, C + R]."""
    *rows, width = shape
    zeros = jnp.zeros((*rows, stored_width(width, dtype)), dtype)
    return shard_heads(LatentKV(zeros, None, rank, width), mesh, has_rows)


def stored_width(width: int, dtype: Any) -> int:
    """Returns the width in which new caches of this process store vectors. TPUs fill lanes of 128: XLA would
    store half-empty lanes in another order of axes, and copy the cache before and after kernels.
    """
    return -(-width // LANES) * LANES if stores_side_by_side(dtype) else width


def check_latent_dtype(dtype: Any) -> None:
    """Raises InputError if latents cannot be stored in that dtype."""
    if quantized_dtype(dtype) is not None:
        raise InputError(
            f"cache_dtype={dtype!r} is not supported for latent attention, whose keys and values are one"
            " vector: use a float type, for example 'bfloat16'"
        )
