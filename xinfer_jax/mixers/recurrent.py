"""The cache of a linear-attention layer: a state of fixed size in place of keys and values.

It is the state after a row's last token, so a row can go back only to 0 tokens; with draft slots also to
any length since the last call began. N value heads, K key heads, H width of a key, Y of a value, W tokens
before the current one that the convolution reads, P draft slots.
"""

import dataclasses
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from ..cache.layer_cache import LayerCache, shard_heads
from ..errors import InputError

Inputs = tuple[jax.Array, ...]  # of the convolution of queries, keys and values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Recurrent(LayerCache):
    """The state of each row, float32 whatever the dtype of keys and values.

    With draft slots it is the state before the last call of at most P tokens, which are stored beside it: the
    next call first applies those that were accepted, so nothing has to be undone.
    """

    has_keys = False

    # The last W inputs of the convolution, then the P of draft slots: [B, K or N, W + P, H or Y].
    inputs: Inputs
    state: jax.Array  # [B, N, H, Y]
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens of a row in the other layers
    # Of the tokens in draft slots: the logarithm of the decay, and beta, [B, N, P, 2]; None: no draft slots.
    steps: jax.Array | None = dataclasses.field(default=None, kw_only=True)
    base_B: jax.Array | None = dataclasses.field(default=None, kw_only=True)  # int32: tokens in `state`

    @staticmethod
    @partial(jax.jit, static_argnums=(0, 1, 2, 3))
    def empty(
        shapes: tuple[tuple[int, ...], ...], batch: int, capacity: int, mesh: Mesh | None = None
    ) -> "Recurrent":
        """The state of rows without tokens: zeros. shapes: of `state_shapes`."""
        arrays = [jnp.zeros((batch, *shape), np.float32) for shape in shapes]
        *inputs, state = shard_heads(arrays, mesh)
        return Recurrent(tuple(inputs), state, capacity)

    @property
    def draft_slots(self) -> int:
        """P."""
        return 0 if self.steps is None else self.steps.shape[2]

    @property
    def limits(self) -> tuple:
        return ("state",)

    def describe_limits(self) -> str:
        return "its linear-attention layers have no state of that length"

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a row's arrays without draft slots."""
        W = self.inputs[0].shape[2] - self.draft_slots
        (q, k, v) = ((x.shape[1], W, x.shape[3]) for x in self.inputs)
        return q, k, v, self.state.shape[1:]

    def can_truncate(self, length_B: Any, reached_B: jax.Array) -> Any:
        return length_B >= (reached_B if self.base_B is None else jnp.minimum(self.base_B, reached_B))

    def before(self, start_B: jax.Array) -> tuple[Inputs, jax.Array]:
        """Inputs and state before the tokens at start_B: zeros where a row begins. Without draft slots."""
        begins_B111 = (start_B == 0)[:, None, None, None]
        return jax.tree.map(lambda x: jnp.where(begins_B111, 0, x), (self.inputs, self.state))

    def after(
        self, inputs: Inputs, state: jax.Array, steps: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array
    ) -> Self:
        """The cache after a call from position start_B on; rows without tokens stay as they are.

        Args:
            inputs: W inputs before the call, and the T of its tokens.
            state: after its tokens; where `holds_drafts`, before them.
            steps: of its tokens, [B, N, T, 2]: 0 of padding.
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
        has_tokens_B = num_tokens_B > 0

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(has_tokens_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(choose, new, self)

    def holds_drafts(self, tokens: int) -> bool:
        """Whether a call of so many tokens is stored in the draft slots. A single one never is."""
        return 1 < tokens <= self.draft_slots

    def with_draft_slots(self, count: int, length_B: jax.Array) -> Self:
        if self.draft_slots >= count:
            return self
        if self.steps is not None:
            raise InputError(
                f"this cache has {self.draft_slots} draft slots, {count} are needed: prefill again"
            )
        inputs = tuple(pad_slots(x, x.shape[2] + count) for x in self.inputs)
        steps = jnp.zeros((*self.state.shape[:2], count, 2), jnp.float32)
        return dataclasses.replace(self, inputs=inputs, steps=steps, base_B=length_B)

    def used_arrays(self, tokens: int) -> tuple[Inputs, jax.Array]:
        if self.steps is not None:  # accepted tokens are not in the state yet
            raise InputError(
                "the state of a call with draft tokens cannot be saved: make the prefix without them"
            )
        return self.inputs, self.state

    def fill(self, inputs: Any, state: Any) -> Self:
        inputs, state = jax.tree.map(jnp.asarray, (inputs, state))
        return dataclasses.replace(self, inputs=inputs, state=state)


def last_inputs(x_BKSH: jax.Array, first_B: jax.Array, count: int) -> jax.Array:
    """`count` slots of each row from slot first_B[b] on."""
    return jax.vmap(lambda x, first: lax.dynamic_slice_in_dim(x, first, count, 1))(x_BKSH, first_B)


def pad_slots(x_BKSH: jax.Array, slots: int) -> jax.Array:
    """The array with zeros up to so many slots."""
    return jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, slots - x_BKSH.shape[2]), (0, 0)))


def state_shapes(spec: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of one row's arrays, as `Recurrent.fits`; spec: a `GatedDeltaSpec`."""
    W = spec.conv_kernel_dim - 1
    key = (spec.num_key_heads, W, spec.key_head_dim)
    N = spec.num_value_heads
    Y = spec.value_head_dim
    return key, key, (N, W, Y), (N, spec.key_head_dim, Y)
