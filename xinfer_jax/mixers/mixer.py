"""`Mixer`: the part of a layer that reads other tokens, with its parameters, forward pass and cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import Mesh

from ..cache.layer_cache import LayerCache
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..weights.layers import Angles, Norm
from ..weights.params import Params


class Positions(NamedTuple):
    """The positions of the tokens of a call: the values that are computed once for all layers."""

    angles: Angles
    start_B: jax.Array | None  # int32: position of each row's first token; None: there is no cache
    num_tokens_B: jax.Array  # int32: real tokens of each row
    position_BT: jax.Array  # int32: of each token
    # int32: where each token's segment begins, or a `FirstKey`. None: a row is one segment.
    first_BT: Any = None


class Divided(NamedTuple):
    """A number that the devices along an axis have to divide."""

    axis: str  # the logical axis, of `sharding.RULES`
    name: str  # of the number, for errors
    size: int


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A mixer of a model. A kind is a subclass with a line in `plugins.TABLE`.

    All that is about a layer's tokens, its cache among it, asks the mixers of the layer. The parameters of a
    layer are one flat dict, so mixers side by side have different names.
    """

    config: ModelConfig
    spec: Any  # the `MixerSpec`, of the mixer's kind

    # The names of leaves in a Hugging Face checkpoint, within a layer, of families that have no others.
    names: ClassVar[Mapping[str, str]] = {}
    has_keys: ClassVar[bool] = False  # its cache has keys and values of each token, which may be in pages

    def param_specs(self) -> Params:
        """Returns the specs of its parameters by name, without the norms around it."""
        raise NotImplementedError

    def forward(
        self,
        params: Params,
        x_BTD: Any,
        positions: Positions,
        cache: Any,
        run_config: RunConfig,
        before: Norm | None = None,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns the output, [B, T, D], and the cache with the new tokens.

        Args:
            params: the parameters of the layer.
            x_BTD: hidden states.
            positions: `Positions` of the call.
            cache: a `LayerCache` of the tokens before. None: these tokens are the first ones.
            run_config: the settings of the program.
            before: a norm of the hidden states, which comes first.
            residual: is added to the output, [B, T, D].
        """
        raise NotImplementedError

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> LayerCache:
        """Returns the cache of rows without tokens. It takes the arguments of `empty_layers`."""
        raise NotImplementedError

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        """Returns the bytes of one row in `empty_cache`."""
        raise NotImplementedError

    def empty_pool(self, pages: int, dtype: Any, mesh: Mesh | None = None) -> tuple[Any, Any]:
        """Returns the arrays (k, v) of a pool of pages, if it has keys. It takes the arguments of
        `empty_pools`.
        """
        raise NotImplementedError

    @property
    def window(self) -> int | None:
        """The sliding window of its keys. None: it has none."""
        return None

    @property
    def fits(self) -> tuple:
        """`LayerCache.fits` of the caches that it can use."""
        raise NotImplementedError

    @property
    def divided(self) -> tuple[Divided, ...]:
        """The sizes that devices have to divide, in addition to the sizes of the mixer's parameters."""
        return ()

    @property
    def unsupported(self) -> dict[str, str]:
        """Features that it does not support, of `config.unsupported`, with the part that is the reason."""
        return {}

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        """Returns the operands of the kernels of a call, as their selectors take them, by the kernel's name.

        Args:
            params: the parameters of the layer.
            rows: the number of rows of the call.
            dtype: the dtype of the activations.
            cache: the shapes of the cache that it uses.
        """
        return {}
