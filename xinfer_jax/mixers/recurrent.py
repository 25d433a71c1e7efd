"""The cache of a layer of linear attention or Mamba-2: a state of fixed size in place of keys and values.

N value heads, K key heads, H width of a key, Y of a value, W tokens before the current one that the
convolution reads, P draft slots. Mamba-2 has groups in place of key heads, C and B in place of queries and
keys, and its states have the axes [N, Y, H].
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..cache.layer_cache import shard_heads
from .convolution import last_inputs, pad_slots
from .state_cache import StateCache

Inputs = tuple[jax.Array, ...]  # of the convolution of queries, keys and values, or of C, B and x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Recurrent(StateCache):
    """The state of each row."""

    layer_kind = "layers of linear attention or Mamba-2"

    # The last W inputs of the convolution, then the P of draft slots: [B, K or N, W + P, H or Y].
    inputs: Inputs
    state: jax.Array  # [B, N, H, Y]; of Mamba-2 [B, N, Y, H]
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens of a row in the other layers
    # Of the tokens in draft slots: the logarithm of the decay, and beta or dt, [B, N, P, 2]; None: no slots.
    steps: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    base_B: jax.Array | None = dataclasses.field(default=None, kw_only=True)  # int32: tokens in `state`

    @staticmethod
    @partial(jax.jit, static_argnums=(0, 1, 2, 3))
    def empty(
        shapes: tuple[tuple[int, ...], ...], batch: int, capacity: int, mesh: Mesh | None = None
    ) -> "Recurrent":
        """Returns the state of rows without tokens: zeros. shapes: of a row's arrays, as in `fits`."""
        arrays = [jnp.zeros((batch, *shape), np.float32) for shape in shapes]
        *inputs, state = shard_heads(arrays, mesh)
        return Recurrent(tuple(inputs), state, capacity)

    @property
    def draft_slots(self) -> int:
        """P."""
        return 0 if self.steps is None else self.steps.shape[2]

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a row's arrays without draft slots."""
        W = self.inputs[0].shape[2] - self.draft_slots
        (q, k, v) = ((x.shape[1], W, x.shape[3]) for x in self.inputs)
        return q, k, v, self.state.shape[1:]

    def before(
        self, start_B: jax.Array, replay: Callable[[Inputs, jax.Array, jax.Array], jax.Array]
    ) -> tuple[Inputs, jax.Array]:
        """Returns the inputs and the state before the tokens at start_B, after the draft tokens that were
        accepted. They are zeros at the beginning of a row.

        Args:
            start_B: the position of each row's first token.
            replay: a function of inputs, of the steps of their tokens and of the state before them. It
                returns the state after them.
        """
        inputs = self.inputs
        state = self.state
        if self.steps is not None and self.base_B is not None:
            P = self.draft_slots
            accepted_B = jnp.clip(start_B - self.base_B, 0, P)
            is_accepted = jnp.arange(P) < accepted_B[:, None, None]
            state = replay(inputs, jnp.where(is_accepted[..., None], self.steps, 0), state)
            inputs = tuple(last_inputs(x, accepted_B, x.shape[2] - P) for x in inputs)
        begins_B111 = (start_B == 0)[:, None, None, None]
        return jax.tree.map(lambda x: jnp.where(begins_B111, 0, x), (inputs, state))

    def after(
        self, inputs: Inputs, state: jax.Array, steps: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array
    ) -> Self:
        """Returns the cache after a call from position start_B on. Rows without tokens stay as they are.

        Args:
            inputs: W inputs before the call, and the T inputs of its tokens.
            state: the state after its tokens or, if `holds_drafts`, before them.
            steps: the steps of its tokens, [B, N, T, 2], 0 at padding.
        """
        T = steps.shape[2]
        P = self.draft_slots
        W = inputs[0].shape[2] - T
        base_B = start_B
        if not self.holds_drafts(T):
            inputs = tuple(last_inputs(x, num_tokens_B, W) for x in inputs)
            base_B = start_B + num_tokens_B
            steps = steps[:, :, :0]
        new = dataclasses.replace(self, inputs=tuple(pad_slots(x, W + P) for x in inputs), state=state)
        if self.steps is not None:
            new = dataclasses.replace(new, steps=pad_slots(steps, P), base_B=base_B)
        return self.updated(new, num_tokens_B)

    def with_draft_slots(self, count: int, length_B: jax.Array) -> Self:
        if self.has_draft_slots(count):
            return self
        inputs = tuple(pad_slots(x, x.shape[2] + count) for x in self.inputs)
        steps = jnp.zeros((*self.state.shape[:2], count, 2), jnp.float32)
        return dataclasses.replace(self, inputs=inputs, steps=steps, base_B=length_B)

    def used_arrays(self, tokens: int) -> tuple[Inputs, jax.Array]:
        self.check_without_drafts()
        return self.inputs, self.state

    def fill(self, inputs: Any, state: Any) -> Self:
        inputs, state = jax.tree.map(jnp.asarray, (inputs, state))
        return dataclasses.replace(self, inputs=inputs, state=state)


def state_shapes(spec: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of one row's arrays, as `Recurrent.fits`. spec: a `GatedDeltaSpec`."""
    W = spec.conv_kernel_dim - 1
    key = (spec.num_key_heads, W, spec.key_head_dim)
    N = spec.num_value_heads
    Y = spec.value_head_dim
    return key, key, (N, W, Y), (N, spec.key_head_dim, Y)
