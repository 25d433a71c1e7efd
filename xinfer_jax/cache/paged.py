"""Keys and values in pages of a pool that rows share and give back (PagedAttention, Kwon et al. 2023)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..config.model_config import ModelConfig
from .kinds import Contiguous
from .quantized import by_slot, empty, over_heads, part

PAGE = 64  # positions of a page
_MOST = 512  # keys gathered at a time: 1,024 took three to six times as long on CPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Paged(Contiguous):
    """Position p of row b lies in slot p % 64 of page table_BP[b, p // 64]. k and v: pools [P, K, 64, H].

    Entries of the table that a row does not use are 0: nobody reads page 0, and padding may be written there.
    """

    table_BP: jax.Array  # int32

    @property
    def slots(self) -> int:
        return self.table_BP.shape[1] * PAGE

    def _write(self, old_PKSH, new_BKTH, start_B, num_tokens_B):
        B, _, T, _ = new_BKTH.shape
        if B == 1 and T % PAGE == 0:  # a part of a prompt, which begins with a page: no scatter
            for t in range(0, T, PAGE):
                page = self.table_BP[0, (start_B[0] + t) // PAGE]
                at = jnp.where(t < num_tokens_B[0], page, 0)
                new = new_BKTH[:, :, t : t + PAGE]
                old_PKSH = lax.dynamic_update_slice_in_dim(old_PKSH, new, at, 0)
            return old_PKSH
        position_BT = start_B[:, None] + jnp.arange(T)
        none = len(old_PKSH)  # where what is not a token goes, or lies past the table
        page_BT = jnp.take_along_axis(self.table_BP, position_BT // PAGE, 1, mode="fill", fill_value=none)
        page_BT = jnp.where(jnp.arange(T) < num_tokens_B[:, None], page_BT, none)
        new_BTKH = jnp.swapaxes(new_BKTH, 1, 2)
        return old_PKSH.at[page_BT, :, position_BT % PAGE].set(new_BTKH, mode="drop")

    def blocks(self, most: int) -> tuple[int, int]:
        """As of other kinds; blocks are whole pages."""
        return super().blocks(min(most, _MOST))

    def ordered(self) -> tuple[Any, Any]:
        """A copy of all pages of the rows: no kernel reads a table."""
        k, v = (self._cut(x, 0, self.slots, None) for x in (self.k, self.v))
        return k, v

    def _cut(self, x: Any, at: Any, width: int, row: Any) -> Any:
        pages_BP = part(self.table_BP[:, None, :, None], at // PAGE, width // PAGE, row)[:, 0, :, 0]

        def gathered(x_PKSH: jax.Array) -> jax.Array:
            x_BKPSH = jnp.moveaxis(x_PKSH[pages_BP], 1, 2)
            return x_BKPSH.reshape(*x_BKPSH.shape[:2], width, -1)

        return by_slot(gathered, x)


def empty_pools(
    config: ModelConfig, pages: int, dtype: Any, mesh: Mesh | None = None
) -> tuple[tuple[Any, Any], ...]:
    """(k, v) of each layer, zeros; dtype: a float type, "int8" or "int4"; mesh: as in `init_cache`."""
    shape = (pages, config.num_key_value_heads, PAGE, config.head_dim)
    return tuple(_empty_pools(shape, dtype, mesh) for _ in range(config.num_hidden_layers))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_pools(shape: tuple[int, ...], dtype: Any, mesh: Mesh | None) -> tuple[Any, Any]:
    k, v = over_heads((empty(shape, dtype), empty(shape, dtype)), mesh)
    return k, v
