"""The protocol of a layer cache."""

from functools import partial
from typing import Any, ClassVar, Self

import jax

from ..errors import ShortRepr
from .stored_kv import empty_pair


class LayerCache(ShortRepr):
    """The interface of every layer cache. A kind of cache is a pytree: a frozen dataclass whose arrays begin
    with an axis of rows, or of pages.

    Caches with keys and values are `Contiguous` (`append`, `get_block`) or a subclass. A mixer makes its own
    cache (`Mixer.empty_cache`).
    """

    has_keys: ClassVar[bool] = True  # keys and values of each token; False: a state of fixed size
    capacity: int  # tokens that a row can hold

    @property
    def fits(self) -> tuple:
        """Shapes by which a cache of another model is detected."""
        raise NotImplementedError

    @property
    def most_at_once(self) -> int:
        """The most tokens that one call may append to a row."""
        return self.capacity

    @property
    def limits(self) -> tuple:
        """The values that, together with the lengths, decide on `can_truncate`. If it is (), rows can have
        any shorter length.
        """
        return ()

    def describe_limits(self) -> str:
        """Returns the reason why a row cannot go back to a length, for errors."""
        raise NotImplementedError

    def can_truncate(self, length_B: Any, reached_B: jax.Array) -> Any:
        """Returns bool [B]: True if a row truncated to length_B still has all that its next tokens need.

        reached_B: the longest that each row has been.
        """
        return True

    def with_draft_slots(self, count: int, length_B: jax.Array) -> Self:
        """Returns a layer whose rows of these lengths can go back by the tokens of one call of at most
        `count`.
        """
        return self

    def reorder(self, index_B: jax.Array) -> Self:
        """Returns the cache whose row b is row index_B[b]."""
        return jax.tree.map(lambda leaf: leaf[index_B], self)

    def reorder_tail(self, index_B: jax.Array, first: jax.Array, count: int) -> Self:
        """Returns the same as `reorder`, if row b differs from row index_B[b] only at positions first … first
        + count - 1.
        """
        return self.reorder(index_B)

    def used_arrays(self, tokens: int) -> tuple[Any, Any]:
        """Returns two trees of arrays for a file, in one form on every device: the slots that rows of at most
        `tokens` tokens have used.
        """
        raise NotImplementedError

    def fill(self, first: Any, second: Any) -> Self:
        """Returns a layer of this shape that begins with these NumPy arrays of `used_arrays`. The rest is
        zeros.
        """
        raise NotImplementedError


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def sharded_pair(
    shape: tuple[int, ...], dtype: Any, side_by_side: bool, mesh: Any, has_rows: bool = True
) -> tuple[Any, Any]:
    """Returns `empty_pair`, divided by heads and, if the first axis is rows, by rows. mesh: None: on one
    device.
    """
    return shard_heads(empty_pair(shape, dtype, side_by_side), mesh, has_rows)


def shard_heads(tree: Any, mesh: Any, has_rows: bool = True) -> Any:
    """Returns the arrays divided by heads and rows over the mesh, in a traced function. mesh: None: the
    arrays are unchanged.
    """
    if mesh is None:
        return tree
    from ..sharding import constrain_heads  # optional: meshes

    return constrain_heads(tree, mesh, has_rows)
