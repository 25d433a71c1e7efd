"""`SoftmaxAttention`: the mixer with keys and values of each token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from ..cache.contiguous import Contiguous, uncached_kv
from ..cache.layer_cache import sharded_pair
from ..cache.page_size import PAGE_SIZE
from ..cache.ring import Ring, num_slots
from ..cache.stored_kv import is_quantized_kv, pair_bytes, stores_side_by_side
from ..config.run_config import RunConfig
from ..weights.layers import Norm, joint_norms, linear, norm_before, products, rms_norm
from ..weights.param_specs import ParamSpec, dense, norm_spec, tensor
from ..weights.params import Params
from .attention import Scoring, VisibleKeys, attention
from .mixer import Divided, Mixer, Positions
from .rope_append import QKV, HeadNorms, rotate, rotate_and_append


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

    def forward(
        self, params, x_BTD, positions, cache, run_config, before=None, residual=None
    ) -> tuple[jax.Array, Any]:
        """Runs attention. Returns the output and the cache.

        Without a cache, it returns the keys and values in place of the cache if other layers of the model use
        them. A layer that uses the keys and values of another layer gets that layer's cache, and returns it
        unchanged.
        """
        spec = self.spec
        start_B: Any = positions.start_B  # not None if there is a cache
        num_tokens_B = positions.num_tokens_B
        key_bias_fn = None
        if cache is not None and is_quantized_kv(cache.k):
            from .key_bias import split_key_bias  # optional: quantized caches

            params, key_bias_fn = split_key_bias(params, self.config, spec, self.rope_index, cache.capacity)
        angles = self.angles(positions)
        gate_BTI = None
        if spec.shares_kv:
            q_BTNH = self._only_queries(params, x_BTD, angles, before, run_config)
            visible = cache
        else:
            qkv, gate_BTI = self.project(params, x_BTD, before, run_config)
            qkv = checkpoint_name(qkv, "qkv")
            rotated = self.rotation(params, qkv, angles)
            if start_B is None:
                q_BTNH, k_BTKH, v_BTKH = rotate(*rotated)
                visible = uncached_kv(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2))
                cache = visible if self.config.shares_kv else None
            else:
                q_BTNH, cache = rotate_and_append(*rotated, cache, start_B, num_tokens_B, run_config)
                visible = cache
        q_BTNH = scale_queries(q_BTNH, positions.position_BT, spec.query_scaling)
        length_B = num_tokens_B
        if start_B is not None:
            # Without queries no key is read.
            length_B = jnp.where(num_tokens_B > 0, start_B + num_tokens_B, 0)
        # The model's window: a cache that stores every token may have been made without one.
        windowed = dataclasses.replace(visible, window=spec.window, key_bias_fn=key_bias_fn)
        keys = VisibleKeys(start_B, length_B, positions.first_BT)
        out_BTNH = attention(q_BTNH, windowed, keys, **self.scoring(params), run_config=run_config)
        out_BTI = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
        if spec.o_norm:
            (out_BTI,) = joint_norms([out_BTI], params, ["o_norm"], self.config, run_config)
        if gate_BTI is not None:
            out_BTI = out_BTI * jax.nn.sigmoid(gate_BTI)
        how: dict[str, Any] = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(out_BTI, params["o"], **how), cache

    @property
    def rope_index(self) -> int | None:
        """The index in `ModelConfig.ropes` of its rotary embedding. None: it has none."""
        spec = self.spec
        return self.config.ropes.index(spec.rope or self.config.rope) if spec.uses_rope else None

    def angles(self, positions: Positions) -> Any:
        """Returns cosine and sine of the rotary angles. None: it has no rotary embedding."""
        return None if self.rope_index is None else positions.angles[self.rope_index]

    def project(
        self, params: Params, x_BTD: jax.Array, before: Norm | None, run_config: RunConfig
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
        """Returns queries, keys and values by head, [B, T, N or K, H], after norms of all heads together.
        Also returns the gate of the output, [B, T, N H], if it has one.
        """
        spec = self.spec
        wanted = dict(q=True, k=True, v=not spec.values_are_keys, attn_gate=spec.output_gate)
        leaves = [params[name] for name in wanted if wanted[name]]
        ys = products(x_BTD, leaves, before=before, run_config=run_config)
        if spec.qk_norm == "joint":
            ys[:2] = joint_norms(ys[:2], params, ["q_norm", "k_norm"], self.config, run_config)
        if spec.values_are_keys:
            ys.insert(2, ys[1])
        q_BTNH, k_BTKH, v_BTKH = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in ys[:3])
        if spec.v_norm:
            v_BTKH = rms_norm(v_BTKH, jnp.ones(self.head_dim, v_BTKH.dtype), self.config.rms_norm_eps)
        return (q_BTNH, k_BTKH, v_BTKH), ys[3] if spec.output_gate else None

    def _only_queries(self, params, x_BTD, angles, before, run_config) -> jax.Array:
        """Returns queries by head, [B, T, N, H], of a layer without keys, after their norm and RoPE."""
        (q_BTI,) = products(x_BTD, [params["q"]], before=before, run_config=run_config)
        q_BTNH = q_BTI.reshape(*q_BTI.shape[:2], -1, self.head_dim)
        return rotate(*self.rotation(params, (q_BTNH,) * 3, angles))[0]

    def rotation(self, params: Params, qkv: QKV, angles: Any) -> tuple[QKV, HeadNorms | None, Any]:
        """Returns queries, keys and values, the norms of heads and the angles, as `rotate` takes them."""
        norms = None
        if self.spec.qk_norm in ("head", "rotated_head"):
            q_norm = norm_before(params, "q_norm", self.config)
            norms = q_norm, q_norm if self.spec.shares_kv else norm_before(params, "k_norm", self.config)
        if self.spec.qk_norm == "rotated_head" or (self.spec.rope or self.config.rope).interleaved:
            from .rope_orders import reordered  # optional: other orders of RoPE

            return reordered(self.spec, self.config, qkv, norms, angles)
        return qkv, norms, angles

    def scoring(self, params: Params) -> dict[str, Any]:
        """Returns the arguments of a layer that `attention` takes in addition to queries and keys."""
        spec = self.spec
        scale = spec.attention_multiplier or (spec.query_pre_attn_scalar or self.head_dim) ** -0.5
        sink_N = params["sinks"] if spec.sinks else None
        return dict(scoring=Scoring(scale, spec.logit_softcapping), sink_N=sink_N, ahead=spec.ahead)

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
        norms = {"scales": "norms of another kind or in other places"}
        later = dict.fromkeys(("draft model", "causal"), "attention to later tokens")
        return (norms if self.spec.o_norm else {}) | (later if self.spec.ahead else {})

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        if self.spec.shares_kv:
            return {}
        query = jax.ShapeDtypeStruct((rows, 1, self.config.num_attention_heads, self.head_dim), dtype)
        return dict.fromkeys(("prefill_attention", "decode_attention"), (query, cache))


def scale_queries(q_BTNH: jax.Array, position_BT: jax.Array, query_scaling: Any) -> jax.Array:
    """Returns queries with `AttentionSpec.query_scaling`."""
    if not query_scaling:
        return q_BTNH
    beta, length = query_scaling
    scale_BT = 1 + beta * jnp.log(1 + (position_BT // length).astype(jnp.float32))
    return q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)
