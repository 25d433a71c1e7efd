"""One step of the short convolution before a recurrent state, which moves its inputs in place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton


class Convolution(NamedTuple):
    """The references of a convolution."""

    before: Any  # its last inputs, [B, heads, W, width]
    new: Any  # the input of the token, [B, heads · width]
    taps: Any  # [heads · width, W + 1]
    after: Any  # the same memory as `before`
    bias: Any = None  # [heads · width]

    def step(self, place: tuple[Any, Any], first: Any, size: int, begins: Any, interpret: bool) -> jax.Array:
        """Returns silu of the convolution, float32, of `size` columns of a head, from `first` on. Moves their
        inputs by one, so no other program may read them.

        place: the row and the head. begins: True if the inputs before the token were zeros.
        """
        row, head = place
        W, width = self.before.shape[2:]
        columns = pl.ds(head * width + first, size)
        places = [(row, head, w, pl.ds(first, size)) for w in range(W)]
        inputs = [jnp.where(begins, 0, self.before[place]) for place in places]
        inputs.append(self.new[row, columns].astype(jnp.float32))
        taps = (self.taps[columns, w].astype(jnp.float32) for w in range(W + 1))
        total: Any = sum(x * tap for x, tap in zip(inputs, taps, strict=True))
        if self.bias is not None:
            total += self.bias[columns].astype(jnp.float32)
        if not interpret:
            pltriton.debug_barrier()  # several warps have loaded the same inputs
        for place, x in zip(places, inputs[1:], strict=True):
            self.after[place] = x
        return jax.nn.silu(total)
