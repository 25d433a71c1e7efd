"""`LatentAttention`: multi-head latent attention (MLA, DeepSeek-V2 2024), whose cache has one vector of each
token for all heads.

A latent c of C numbers and a rotated part r of R numbers are computed for each token. The keys of head n are
(Uₙ c, r), and its values are Wₙ c, with matrices U ("k_up") and W ("v_up"). There are two forms:

- Expanded: keys and values of all heads are computed. Calls without a cache (training, scoring) use it.
- Absorbed: (Uₙᵀ qₙ, rotated part of qₙ) is a query of the cached vector (c, r), whose value is c, and Wₙ is
  applied to the weighted sum of values. So the cache is not expanded. Calls with a cache use it.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from ..cache.contiguous import Contiguous, uncached_kv
from ..cache.latent_kv import LatentKV, check_latent_dtype, empty_latents, stored_width
from ..cache.page_size import PAGE_SIZE
from ..cache.ring import num_slots
from ..cache.stored_kv import stores_side_by_side
from ..config.layer_spec import MixerSpec
from ..config.rope import RopeConfig
from ..ops.product import float_precision
from ..weights.adapted_weight import AdaptedWeight
from ..weights.layers import Norm, apply_rope, linear, products, rms_norm
from ..weights.param_specs import Params, dense, norm_spec
from .attention import Scoring, VisibleKeys, attention
from .mixer import Divided, Mixer, Positions
from .rope_append import rotate_and_append
from .rope_orders import halves_first
from .softmax_attention import scale_queries


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec(MixerSpec):
    """Latent attention. Fields have the names of config.json."""

    kind = "latent_attention"
    uses_rope: ClassVar[bool] = True
    rope: ClassVar[RopeConfig | None] = None  # the model's

    kv_lora_rank: int  # C, the width of a latent
    qk_nope_head_dim: int  # P, the part of a query that is not rotated
    qk_rope_head_dim: int  # R, the part that is rotated
    v_head_dim: int  # V, the width of a head's values
    q_lora_rank: int | None = None  # the width of a query's latent; None: queries have one matrix
    bias: bool = False  # the matrices of latents and the output matrix have biases
    norm_eps: float = 1e-6  # of the norms of latents
    query_scaling: tuple[float, int] | None = None  # as in `AttentionSpec`
    kv_copies: int = 1  # K, copies of each latent: devices of a mesh have one each


class LatentAttention(Mixer):
    """Latent attention, whose spec is a `LatentAttentionSpec`."""

    names = {
        "q": "self_attn.q_proj",
        "q_a": "self_attn.q_a_proj",
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "self_attn.kv_a_layernorm.weight",
        "k_up": "self_attn.k_up_proj",
        "v_up": "self_attn.v_up_proj",
        "o": "self_attn.o_proj",
    }
    has_keys = True
    unsupported = {"scales": "latent attention"}

    def param_specs(self) -> Params:
        spec = self.spec
        N = self.config.num_attention_heads
        d = (self.config.hidden_size, "embed")
        latent = (spec.kv_lora_rank, None)
        queries = (N * (spec.qk_nope_head_dim + spec.qk_rope_head_dim), "heads")
        values = (N * spec.v_head_dim, "heads")
        tree: Params = {}
        if spec.q_lora_rank is None:
            tree["q"] = dense(queries, d)
        else:
            rank = (spec.q_lora_rank, None)
            tree |= dict(q_a=dense(rank, d, spec.bias), q_a_norm=norm_spec(rank), q_b=dense(queries, rank))
        return tree | dict(
            kv_a=dense((self.key_width, None), d, spec.bias),
            kv_a_norm=norm_spec(latent),
            # Absorbed products take the rows of a head as inputs, which no quantized matrix has.
            k_up=dense((N * spec.qk_nope_head_dim, "heads"), latent, stays_float=True),
            v_up=dense(values, latent, stays_float=True),
            o=dense(d, values, spec.bias),
        )

    def forward(
        self, params, x_BTD, positions, cache, run_config, before=None, residual=None
    ) -> tuple[jax.Array, Contiguous | None]:
        spec = self.spec
        q_BTNH, latent_BTC, rotated_BTR = self._project(params, x_BTD, positions, before, run_config)
        length_B = positions.num_tokens_B
        scoring = Scoring(self.scale)
        if cache is None:
            kv = self._expanded(params, latent_BTC, rotated_BTR, run_config)
            visible = VisibleKeys(None, length_B, positions.first_BT)
            out_BTNV = attention(q_BTNH, kv, visible, scoring, run_config=run_config)
        else:
            start_B: Any = positions.start_B  # not None if there is a cache
            key_BT1H = jnp.concatenate([latent_BTC, rotated_BTR], -1)[:, :, None]
            key_BTKH = jnp.repeat(key_BT1H, cache.k.shape[1], 2)
            q_BTNP, q_BTNR = jnp.split(q_BTNH, [spec.qk_nope_head_dim], -1)
            q_BTNC = _times_heads(q_BTNP, params["k_up"], ("o", "i"))
            qkv = jnp.concatenate([q_BTNC, q_BTNR], -1), key_BTKH, key_BTKH
            q_BTNH, cache = rotate_and_append(qkv, None, None, cache, start_B, length_B, run_config)
            length_B = jnp.where(length_B > 0, start_B + length_B, 0)  # without queries no key is read
            visible = VisibleKeys(start_B, length_B, positions.first_BT)
            out_BTNC = attention(q_BTNH, cache, visible, scoring, run_config=run_config)
            out_BTNV = _times_heads(out_BTNC, params["v_up"], ("i", "o"))
        out_BTI = out_BTNV.reshape(*out_BTNV.shape[:2], -1)
        around: dict[str, Any] = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(out_BTI, params["o"], **around), cache

    def _project(
        self, params: Params, x_BTD: jax.Array, positions: Positions, before: Norm | None, run_config: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries by head, [B, T, N, P + R], latents, and the part of keys that all heads share,
        all after their norms and RoPE.
        """
        spec = self.spec
        has_latent = spec.q_lora_rank is not None
        leaves = [params["q_a" if has_latent else "q"], params["kv_a"]]
        q_BTI, kv_BTI = products(x_BTD, leaves, before=before, run_config=run_config)
        if has_latent:
            norm = Norm(params["q_a_norm"], spec.norm_eps, self.config.norm_offset)
            (q_BTI,) = products(q_BTI, [params["q_b"]], before=norm, run_config=run_config)
        q_BTNH = q_BTI.reshape(*q_BTI.shape[:2], -1, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        q_BTNP, q_BTNR = jnp.split(q_BTNH, [spec.qk_nope_head_dim], -1)
        latent_BTC, shared_BTR = jnp.split(kv_BTI, [spec.kv_lora_rank], -1)
        latent_BTC = rms_norm(latent_BTC, params["kv_a_norm"], spec.norm_eps, self.config.norm_offset)
        q_BTNH = jnp.concatenate([q_BTNP, self._rotate(q_BTNR, positions)], -1)
        q_BTNH = scale_queries(q_BTNH, positions.position_BT, spec.query_scaling)
        shared_BTR = self._rotate(shared_BTR[:, :, None], positions)[:, :, 0]
        return checkpoint_name((q_BTNH, latent_BTC, shared_BTR), "qkv")

    def _rotate(self, x_BTNR: jax.Array, positions: Positions) -> jax.Array:
        """Returns x after RoPE, with the first numbers of interleaved pairs before the second ones."""
        rope = self.config.rope
        if rope.interleaved:
            x_BTNR = halves_first(x_BTNR, rope)
        return apply_rope(x_BTNR, *positions.angles[self.config.ropes.index(rope)])

    def _expanded(
        self, params: Params, latent_BTC: jax.Array, rotated_BTR: jax.Array, run_config: Any
    ) -> Contiguous:
        """Returns the keys, [B, N, T, P + R], and the values, [B, N, T, V], of all heads."""
        spec = self.spec
        leaves = [params["k_up"], params["v_up"]]
        k_BTI, v_BTI = products(latent_BTC, leaves, run_config=run_config)
        k_BTNP = k_BTI.reshape(*k_BTI.shape[:2], -1, spec.qk_nope_head_dim)
        v_BTNV = v_BTI.reshape(*v_BTI.shape[:2], -1, spec.v_head_dim)
        rotated_BTNR = jnp.repeat(rotated_BTR[:, :, None], k_BTNP.shape[2], 2)
        k_BTNH = jnp.concatenate([k_BTNP, rotated_BTNR], -1)
        return uncached_kv(jnp.swapaxes(k_BTNH, 1, 2), jnp.swapaxes(v_BTNV, 1, 2))

    @property
    def scale(self) -> float:
        """The factor of scores. It has the square of yarn's factor for long contexts."""
        rope = self.config.rope
        factor = 1.0
        if rope.rope_type != "default" and rope.mscale_all_dim and rope.factor > 1:
            factor = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
        return (self.spec.qk_nope_head_dim + self.spec.qk_rope_head_dim) ** -0.5 * factor**2

    @property
    def num_kv_heads(self) -> int:
        """K, copies of each latent in the cache."""
        return self.spec.kv_copies

    @property
    def key_width(self) -> int:
        """C + R, the numbers of a token in the cache."""
        return self.spec.kv_lora_rank + self.spec.qk_rope_head_dim

    def empty_cache(self, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None) -> Contiguous:
        check_latent_dtype(dtype)
        shape = batch, self.num_kv_heads, self._slots(capacity, dtype), self.key_width
        latents = empty_latents(shape, self.spec.kv_lora_rank, dtype, mesh)
        return Contiguous(latents, None, None, capacity)

    def row_bytes(self, capacity: int, dtype: Any) -> int:
        check_latent_dtype(dtype)
        numbers = self.num_kv_heads * self._slots(capacity, dtype) * stored_width(self.key_width, dtype)
        return numbers * jnp.dtype(dtype).itemsize

    def _slots(self, capacity: int, dtype: Any) -> int:
        return num_slots(None, capacity, stores_side_by_side(dtype))

    def empty_pool(self, pages: int, dtype: Any, mesh: Mesh | None = None) -> tuple[LatentKV, None]:
        check_latent_dtype(dtype)
        shape = pages, self.num_kv_heads, PAGE_SIZE, self.key_width
        return empty_latents(shape, self.spec.kv_lora_rank, dtype, mesh, False), None

    @property
    def fits(self) -> tuple[int, ...]:
        return self.num_kv_heads, self.key_width, self.spec.kv_lora_rank

    @property
    def divided(self) -> tuple[Divided, ...]:
        heads = Divided("heads", "heads", self.config.num_attention_heads)
        return heads, Divided("kv_heads", "kv_heads", self.num_kv_heads)

    def kernels(self, params: Params, rows: int, dtype: Any, cache: Any) -> dict[str, tuple[Any, ...]]:
        query = jax.ShapeDtypeStruct((rows, 1, self.config.num_attention_heads, self.key_width), dtype)
        return dict.fromkeys(("prefill_attention", "decode_attention"), (query, cache))


def _times_heads(x_BTNX: jax.Array, leaf: Params, axes: tuple[str, str]) -> jax.Array:
    """Returns the numbers of each head times its rows of a matrix [N O, I]. axes: "o" and "i", first the axis
    that x has in place of X, then the axis of the result.
    """
    x, y = axes
    base_NOI, adapter = _by_head(leaf["weight"], x_BTNX)
    y_BTNY = _einsum(f"btn{x},noi->btn{y}", x_BTNX, base_NOI)
    if adapter:
        (low_rank, scale) = adapter
        x_BTNR = _einsum(f"btn{x},{low_rank[x][0]}->btnr", x_BTNX, low_rank[x][1]) * scale
        y_BTNY += _einsum(f"btnr,{low_rank[y][0]}->btn{y}", x_BTNR, low_rank[y][1])
    return y_BTNY.astype(x_BTNX.dtype)


def _by_head(weight: Any, x_BTNX: jax.Array) -> tuple[jax.Array, Any]:
    """Returns a matrix [N O, I] as [N, O, I], and the adapters of the rows of x, if it has some: the axes and
    the array of their matrices of inputs ("i") and of outputs ("o"), and the scale.
    """
    (B, _, N, _) = x_BTNX.shape
    if not isinstance(weight, AdaptedWeight):
        return weight.reshape(N, -1, weight.shape[-1]), None
    a_BRI, b_BOR = weight.of_rows(x_BTNX)
    b_BNOR = b_BOR.reshape(B, N, -1, b_BOR.shape[-1])
    low_rank = dict(i=("bri", a_BRI), o=("bnor", b_BNOR))
    return weight.base.reshape(N, -1, weight.shape[-1]), (low_rank, weight.scale)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the einsum in float32. It does not round float32 operands first."""
    precision = float_precision(y.dtype)
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32, precision=precision)
