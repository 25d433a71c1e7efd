"""`ShortConv`: the gated short convolution of LFM2 (Liquid AI 2025), whose state is its last few inputs.

y = O (c · conv(b · x)), where b, c and x are products of the hidden states, "·" multiplies element by
element, and conv is a depthwise causal convolution of W + 1 tokens. A row's cache has the last W inputs of
conv, which the next token needs. Channels are in K groups of width H, so that devices can divide the groups.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..cache.layer_cache import shard_heads
from ..config.layer_spec import MixerSpec
from ..config.run_config import RunConfig
from ..weights.layers import Norm, linear, products
from ..weights.param_specs import Params, dense, tensor
from .convolution import by_group, convolve, last_inputs, pad_slots
from .mixer import Divided, Mixer, Positions
from .state_cache import StateCache

_PRODUCTS = ("conv_b", "conv_c", "conv_x")


@dataclasses.dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """A gated short convolution."""

    kind = "short_conv"

    kernel_dim: int  # tokens that it reads, the token itself included
    bias: bool = False  # its matrices and the convolution have biases


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class ShortConvCache(StateCache):
    """The last W inputs of each row. P draft slots hold the inputs of tokens that may not be accepted."""

    layer_kind = "short convolutions"

    inputs: jax.Array  # [B, K, W + P, H], float32: the last W, then those of the draft slots
    reach: int = dataclasses.field(metadata=dict(static=True))  # W
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens of a row in the other layers
    base_B: jax.Array | None = dataclasses.field(default=None, kw_only=True)  # int32: tokens before the draft

    @staticmethod
    @partial(jax.jit, static_argnums=(0, 1, 2, 3))
    def empty(
        shape: tuple[int, int, int], batch: int, capacity: int, mesh: Mesh | None = None
    ) -> "ShortConvCache":
        """Returns the inputs of rows without tokens: zeros. shape: the shape of a row, [K, W, H]."""
        inputs = shard_heads(jnp.zeros((batch, *shape), np.float32), mesh)
        return ShortConvCache(inputs, shape[1], capacity)

    @property
    def draft_slots(self) -> int:
        return self.inputs.shape[2] - self.reach

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a row without draft slots."""
        (_, K, _, H) = self.inputs.shape
        return ((K, self.reach, H),)

    def before(self, start_B: jax.Array) -> jax.Array:
        """Returns the last inputs before the tokens at start_B, [B, K, W, H]. They are zeros at the beginning
        of a row.
        """
        inputs = self.inputs
        if self.base_B is not None:
            accepted_B = jnp.clip(start_B - self.base_B, 0, self.draft_slots)
            inputs = last_inputs(inputs, accepted_B, self.reach)
        return jnp.where((start_B == 0)[:, None, None, None], 0, inputs)

    def after(self, inputs: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Returns the cache after a call from position start_B on. Rows without tokens stay as they are.

        Args:
            inputs: the W inputs before the call, and the inputs of its T tokens, [B, K, W + T, H].
            start_B, num_tokens_B: the start and the number of tokens of each row.
        """
        base_B = start_B
        if not self.holds_drafts(inputs.shape[2] - self.reach):
            inputs = last_inputs(inputs, num_tokens_B, self.reach)
            base_B = start_B + num_tokens_B
        new = dataclasses.replace(self, inputs=pad_slots(inputs, self.inputs.shape[2]))
        if self.base_B is not None:
            new = dataclasses.replace(new, base_B=base_B)
        return self.updated(new, num_tokens_B)

    def with_draft_slots(self, count: int, length_B: jax.Array) -> Self:
        if self.has_draft_slots(count):
            return self
        inputs = pad_slots(self.inputs, self.reach + count)
        return dataclasses.replace(self, inputs=inputs, base_B=length_B)

    def used_arrays(self, tokens: int) -> tuple[jax.Array, tuple[()]]:
        self.check_without_drafts()
        return self.inputs, ()

    def fill(self, inputs: Any, rest: Any) -> Self:
        return dataclasses.replace(self, inputs=jnp.asarray(inputs))


class ShortConv(Mixer):
    """A gated short convolution, whose spec is a `ShortConvSpec`."""

    unsupported = dict.fromkeys(("scales", "draft model"), "short convolutions")

    def param_specs(self) -> Params:
        bias = self.spec.bias
        d = (self.config.hidden_size, "embed")
        channels = (self.config.hidden_size, "heads")
        tree: Params = {name: dense(channels, d, bias) for name in _PRODUCTS}
        tree["conv_taps"] = tensor(channels, (self.spec.kernel_dim, None), stays_float=True)
        tree |= {"conv_bias": tensor(channels, init="small")} if bias else {}
        return tree | {"conv_o": dense(d, channels, bias)}

    def forward(
        self,
        params: Params,
        x_BTD: Any,
        positions: Positions,
        cache: Any,
        run_config: RunConfig,
        before: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, ShortConvCache | None]:
        leaves = [params[name] for name in _PRODUCTS]
        b_BTD, c_BTD, x_BTD = products(x_BTD, leaves, before=before, run_config=run_config)
        (_, W, H) = self._row_shape
        new_BKTH = by_group(b_BTD.astype(jnp.float32) * x_BTD.astype(jnp.float32), H)
        if cache is None:
            inputs_BKSH = jnp.pad(new_BKTH, ((0, 0), (0, 0), (W, 0), (0, 0)))
        else:
            start_B: Any = positions.start_B  # not None if there is a cache
            inputs_BKSH = jnp.concatenate([cache.before(start_B), new_BKTH], 2)
            cache = cache.after(inputs_BKSH, start_B, positions.num_tokens_B)
        out_BKTH = convolve(inputs_BKSH, params["conv_taps"], positions.first_BT)
        out_BTD = jnp.swapaxes(out_BKTH, 1, 2).reshape(c_BTD.shape)
        if self.spec.bias:
            out_BTD = out_BTD + params["conv_bias"].astype(jnp.float32)
        out_BTD = (c_BTD.astype(jnp.float32) * out_BTD).astype(c_BTD.dtype)
        around: dict[str, Any] = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(out_BTD, params["conv_o"], **around), cache

    @property
    def _row_shape(self) -> tuple[int, int, int]:
        """[K, W, H] of a row's inputs: as many groups as heads, or fewer if that does not divide D."""
        D = self.config.hidden_size
        K = math.gcd(D, self.config.num_attention_heads)
        return K, self.spec.kernel_dim - 1, D // K

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> ShortConvCache:
        return ShortConvCache.empty(self._row_shape, batch, capacity, mesh)

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        return 4 * math.prod(self._row_shape)

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        return (self._row_shape,)

    @property
    def divided(self) -> tuple[Divided, ...]:
        return (Divided("heads", "groups of channels of short convolutions", self._row_shape[0]),)
