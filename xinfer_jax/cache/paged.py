"""Keys and values in pages of a pool that rows share (PagedAttention, Kwon et al. 2023)."""

import dataclasses
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config.model_config import ModelConfig
from ..errors import InputError
from .contiguous import Contiguous
from .page_size import PAGE_SIZE as PAGE_SIZE
from .stored_kv import map_slots, quantized_dtype, slice_slots

_MAX_BLOCK = 512  # keys that are gathered at a time: 1,024 took three to six times as long on CPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Paged(Contiguous):
    """Position p of row b is in slot p % 64 of page table_BP[b, p // 64]. k and v: pools [P, K, 64, H].

    Unused entries of a row's block table are 0: page 0 is never read, and padding may be written there.
    """

    table_BP: jax.Array  # int32

    @property
    def slots(self) -> int:
        return self.table_BP.shape[1] * PAGE_SIZE

    def _write(self, old_PKSH, new_BKTH, start_B, num_tokens_B):
        B, _, T, _ = new_BKTH.shape
        if B == 1 and T % PAGE_SIZE == 0:  # a prefill chunk, which begins with a page: no scatter
            for t in range(0, T, PAGE_SIZE):
                page = self.table_BP[0, (start_B[0] + t) // PAGE_SIZE]
                at = jnp.where(t < num_tokens_B[0], page, 0)
                new = new_BKTH[:, :, t : t + PAGE_SIZE]
                old_PKSH = lax.dynamic_update_slice_in_dim(old_PKSH, new, at, 0)
            return old_PKSH
        position_BT = start_B[:, None] + jnp.arange(T)
        none = len(old_PKSH)  # a page that does not exist: drops padding and tokens beyond the table
        page_BT = jnp.take_along_axis(
            self.table_BP, position_BT // PAGE_SIZE, 1, mode="fill", fill_value=none
        )
        page_BT = jnp.where(jnp.arange(T) < num_tokens_B[:, None], page_BT, none)
        new_BTKH = jnp.swapaxes(new_BKTH, 1, 2)
        return self._scatter(old_PKSH, page_BT, position_BT % PAGE_SIZE, new_BTKH)

    def block_layout(self, max_width: int) -> tuple[int, int]:
        """Returns the size of a block of keys and the number of blocks of a row. Blocks are whole pages."""
        return super().block_layout(min(max_width, _MAX_BLOCK))

    def kernel_options(self) -> dict[str, Any]:
        return {"table_BP": self.table_BP}

    def _cut(self, x: Any, at: Any, width: int, row: Any) -> Any:
        table_B1P1 = self.table_BP[:, None, :, None]
        pages_BP = slice_slots(table_B1P1, at // PAGE_SIZE, width // PAGE_SIZE, row)[:, 0, :, 0]

        def gather(x_PKSH: jax.Array) -> jax.Array:
            x_BKPSH = jnp.moveaxis(x_PKSH[pages_BP], 1, 2)
            return x_BKPSH.reshape(*x_BKPSH.shape[:2], width, -1)

        return map_slots(gather, x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class RoutePages(Paged):
    """The experts that tokens used, stored next to their keys, so that rows that share a page also share its
    routes. k: int16 [P, 1, 64, L U]. v: None.
    """

    def record(self, routes_BTLU: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Writes routes of tokens as `append` writes keys."""
        B, T = routes_BTLU.shape[:2]
        new_B1TI = routes_BTLU.astype(self.k.dtype).reshape(B, 1, T, -1)
        return dataclasses.replace(self, k=self._write(self.k, new_B1TI, start_B, num_tokens_B))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FeaturePages(Paged):
    """The features of the last token of each page, which a draft head needs for the token after it. Rows that
    share a page share them too. k: [P, 1, 1, X]. v: None.
    """

    def record(self, features_BTX: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Writes the features of those tokens that are the last ones of their pages. The tokens begin at the
        positions `start_B`.
        """
        T = features_BTX.shape[1]
        pool: Any = self.k
        none = len(pool)  # a page that does not exist
        x_PX = pool[:, 0, 0]
        for page in range(-(-T // PAGE_SIZE)):  # the ends of pages among T tokens
            at_B = (PAGE_SIZE - 1 - start_B) % PAGE_SIZE + page * PAGE_SIZE
            index_B1 = ((start_B + at_B) // PAGE_SIZE)[:, None]
            page_B = jnp.take_along_axis(self.table_BP, index_B1, 1, mode="fill", fill_value=none)[:, 0]
            page_B = jnp.where(at_B < num_tokens_B, page_B, none)
            at_B11 = jnp.minimum(at_B, T - 1)[:, None, None]
            last_BX = jnp.take_along_axis(features_BTX, at_B11, 1)[:, 0]
            x_PX = x_PX.at[page_B].set(last_BX.astype(x_PX.dtype), mode="drop")
        return dataclasses.replace(self, k=x_PX[:, None, None])

    def before(self, start_B: jax.Array) -> jax.Array:
        """Returns the features [B, X] of the token before each position, which begins a page. They are zeros
        for position 0.
        """
        index_B1 = jnp.maximum(start_B // PAGE_SIZE - 1, 0)[:, None]
        page_B = jnp.take_along_axis(self.table_BP, index_B1, 1)[:, 0]
        pool: Any = self.k
        return jnp.where(start_B[:, None] > 0, pool[page_B, 0, 0], 0)


def check_page_dtype(dtype: Any) -> None:
    """Raises InputError if pages cannot hold keys and values of that dtype."""
    found = quantized_dtype(dtype)
    if found is not None and found.page_obstacle:
        raise InputError(f"cache_dtype={dtype!r} {found.page_obstacle}")


def empty_pools(
    config: ModelConfig, pages: int, dtype: Any, mesh: Mesh | None = None, num_routes: int = 0
) -> tuple[tuple[Any, Any], ...]:
    """Returns the pair (k, v) of each mixer with keys as it is stored, with zeros.

    Args:
        dtype: the dtype, as in `cache_dtype_of`.
        mesh: the mesh, as in `init_cache`.
        num_routes: experts of a token in all layers, if `RoutePages` keep them.
    """
    pools = tuple(mixer.empty_pool(pages, dtype, mesh) for mixer in config.cached_mixers if mixer.has_keys)
    if not num_routes:
        return pools
    routes = _replicated_zeros((pages, 1, PAGE_SIZE, num_routes), np.dtype(np.int16), mesh)
    return (*pools, (routes, None))


def empty_features(pages: int, size: int, dtype: Any, mesh: Mesh | None = None) -> jax.Array:
    """Returns the pool of `FeaturePages`, with zeros. size: X."""
    return _replicated_zeros((pages, 1, 1, size), np.dtype(dtype), mesh)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _replicated_zeros(shape: tuple[int, ...], dtype: Any, mesh: Mesh | None) -> jax.Array:
    zeros = jnp.zeros(shape, dtype)
    replicated = mesh and NamedSharding(mesh, PartitionSpec())
    return lax.with_sharding_constraint(zeros, replicated) if replicated else zeros
