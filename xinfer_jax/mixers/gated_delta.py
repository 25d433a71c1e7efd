"""`GatedDelta`: the mixer Gated DeltaNet, which has a state in place of keys and values."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from ..config.layer_spec import MixerSpec
from ..ops.operation import run
from ..weights.layers import linear, products
from ..weights.param_specs import Params, dense, tensor
from .linear_attention import BETWEEN_PRODUCTS, mix
from .mixer import Divided, Mixer
from .recurrent import Recurrent, state_shapes

_KERNELS = ("delta_step", "delta_prefill", "delta_drafts")


@dataclasses.dataclass(frozen=True)
class GatedDeltaSpec(MixerSpec):
    """Gated DeltaNet."""

    kind = "delta"

    num_key_heads: int  # heads of its queries and keys, which are repeated to those of values
    num_value_heads: int
    key_head_dim: int  # width of a query and key
    value_head_dim: int
    conv_kernel_dim: int  # tokens that its convolution reads, the token itself included


class GatedDelta(Mixer):
    """Gated DeltaNet, whose spec is a `GatedDeltaSpec`."""

    unsupported = dict.fromkeys(("scales", "leaf formats", "draft model"), "linear attention")

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        n = (spec.num_value_heads, "linear_heads")
        keys = (spec.num_key_heads * spec.key_head_dim, "linear_heads")
        values = (spec.num_value_heads * spec.value_head_dim, "linear_heads")
        sizes = dict(q=keys, k=keys, v=values, z=values)
        tree: Params = {name: dense(size, d) for name, size in sizes.items()}
        tree |= {name: dense(n, d, stays_float=True) for name in ("a", "b")}
        for name, channels in dict(q=keys, k=keys, v=values).items():
            tree[f"conv_{name}"] = tensor(channels, (spec.conv_kernel_dim, None), stays_float=True)
        tree |= dict(A_log=tensor(n, init="log_decay"), dt_bias=tensor(n, init="ones"))
        tree |= dict(gated_norm=tensor((spec.value_head_dim, None), init="ones"), o=dense(d, values))
        return tree

    def forward(
        self, params, x_BTD, positions, cache, run_config, before=None, residual=None
    ) -> tuple[jax.Array, Any]:
        leaves = [params[name] for name in ("q", "k", "v", "z", "b", "a")]
        new = products(x_BTD, leaves, before=before, run_config=run_config)
        layer = {name: params[name] for name in BETWEEN_PRODUCTS}
        operands: dict[str, Any] = dict(products=new, layer=layer, cache=cache)
        operands |= {name: getattr(positions, name) for name in ("start_B", "num_tokens_B", "first_BT")}
        plain = partial(mix, config=self.config, spec=self.spec)
        out_BTI, cache = run("delta_step", plain, run_config, static=dict(config=self.config), **operands)
        around: dict[str, Any] = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(out_BTI, params["o"], **around), cache

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> Recurrent:
        return Recurrent.empty(self.fits, batch, capacity, mesh)

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        return 4 * sum(map(math.prod, self.fits))

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self.spec)

    @property
    def divided(self) -> tuple[Divided, ...]:
        return (Divided("linear_heads", "linear_num_key_heads", self.spec.num_key_heads),)

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        query = jax.ShapeDtypeStruct((rows, self.spec.num_key_heads * self.spec.key_head_dim), dtype)
        return dict.fromkeys(_KERNELS, (query, params, self.config, cache))
