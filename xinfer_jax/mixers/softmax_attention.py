"""`SoftmaxAttention`: the mixer with keys and values of each token."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from ..cache.contiguous import Contiguous
from ..cache.layer_cache import sharded_pair
from ..cache.page_size import PAGE_SIZE
from ..cache.ring import Ring, num_slots
from ..cache.stored_kv import pair_bytes, stores_side_by_side
from ..weights.param_specs import ParamSpec, dense, norm_spec, tensor
from ..weights.params import Params
from .mixer import Divided, Mixer


class SoftmaxAttention(Mixer):
    """Softmax attention, whose spec is an `AttentionSpec`."""

    names = {leaf: f"self_attn.{leaf}_proj" for leaf in "qkvo"} | {
        leaf: f"self_attn.{leaf}.weight" for leaf in ("q_norm", "k_norm")
    }
    has_keys = True

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.spec.num_key_value_heads or self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """H."""
        return self.spec.head_dim or self.config.head_dim

    def param_specs(self) -> Params:
        spec = self.spec
        h = self.head_dim
        d = (self.config.hidden_size, "embed")
        n = (self.config.num_attention_heads * h, "heads")
        k = (self.num_kv_heads * h, "kv_heads")
        own = {} if spec.shares_kv else {"k": k} if spec.values_are_keys else {"k": k, "v": k}
        gate = {"attn_gate": n} if spec.output_gate else {}
        tree: Params = {name: dense(size, d, spec.qkv_bias) for name, size in ({"q": n} | own | gate).items()}
        tree["o"] = dense(d, n, spec.o_bias)
        if spec.sinks:
            tree["sinks"] = tensor((self.config.num_attention_heads, "heads"), init="small")
        if spec.o_norm:
            tree["o_norm"] = norm_spec(n)
        if spec.qk_norm:
            sizes = dict(q_norm=n) | ({} if spec.shares_kv else dict(k_norm=k))
            of_head = (h, None)
            tree |= {x: norm_spec(size if spec.qk_norm == "joint" else of_head) for x, size in sizes.items()}
        return jax.tree.map(self._with_kv_heads, tree, is_leaf=lambda x: isinstance(x, ParamSpec))

    def _with_kv_heads(self, spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(spec, kv_heads=self.num_kv_heads) if "kv_heads" in spec.axes else spec

    def forward(self, params, x_BTD, positions, cache, impl, over=None, before=None, residual=None):  # noqa: PLR0913
        from ..model.decoder_layer import self_attention  # optional: until its code is in this package

        layer = next(i for i, of_layer in enumerate(self.config.layers) if self.spec in of_layer.mixers)
        around: dict[str, Any] = dict(before=before, residual=residual)
        return self_attention(params, self.config, layer, x_BTD, positions, cache, impl, over, **around)

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> Contiguous:
        side_by_side = stores_side_by_side(dtype)
        slots = num_slots(self.window, capacity, side_by_side)
        k, v = sharded_pair((batch, self.num_kv_heads, slots, self.head_dim), dtype, side_by_side, mesh)
        return (Ring if slots < capacity else Contiguous)(k, v, self.window, capacity)

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        slots = num_slots(self.window, capacity, stores_side_by_side(dtype))
        return self.num_kv_heads * slots * pair_bytes(self.head_dim, dtype)

    def empty_pool(self, pages: int, dtype: Any, mesh: Mesh | None = None) -> tuple[Any, Any]:
        shape = pages, self.num_kv_heads, PAGE_SIZE, self.head_dim
        return sharded_pair(shape, dtype, stores_side_by_side(dtype), mesh, False)

    @property
    def window(self) -> int | None:
        return self.spec.window

    @property
    def fits(self) -> tuple[int, ...]:
        return self.num_kv_heads, self.head_dim

    @property
    def divided(self) -> tuple[Divided, ...]:
        heads = Divided("heads", "heads", self.config.num_attention_heads)
        if self.spec.shares_kv:
            return (heads,)
        return heads, Divided("kv_heads", "kv_heads", self.num_kv_heads)

    @property
    def unsupported(self) -> dict[str, str]:
        norms = dict.fromkeys(("rotations", "scales"), "norms of another kind or in other places")
        later = dict.fromkeys(("draft model", "causal"), "attention to later tokens")
        return (norms if self.spec.o_norm else {}) | (later if self.spec.ahead else {})

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        if self.spec.shares_kv:
            return {}
        query = jax.ShapeDtypeStruct((rows, 1, self.config.num_attention_heads, self.head_dim), dtype)
        return dict.fromkeys(("prefill_attention", "decode_attention"), (query, cache))
