"""DFlash (z-lab, 2026) and DSpark (DeepSpec, 2026), which draft a block of tokens in one pass.

Layers like Qwen3's attend to two sources of keys and values. The context is one vector for each token that
the target has run: hidden_norm(fc(outputs of some of the target's layers)), which is also the features of the
token. It has no norm before keys and values, and it is appended to the cache once. The block is the last
token and masks, embedded by the target. Its tokens see the context and, in layers without a window, all of
the block. Its keys and values are never in the cache.

In DFlash a mask's output is the token at its place. If `samples_anchor`, as in DSpark, each output is the
next token, so a block has one mask less. DSpark adds a bias to the logits that depends on the draft token
before, so it draws from left to right. Its confidence head is not read: a block is never cut short.
"""

import dataclasses
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.contiguous import Block
from ..cache.kv_cache import KVCache, update_layers
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError
from ..mixers.attention import VisibleKeys, attention
from ..mixers.mixer import Positions
from ..mixers.rope_append import rotate
from ..model.decoder import embed_ids, head_logits
from ..weights.layers import linear, norm, norm_before, products, rotary_angles
from ..weights.param_specs import dense, layer_specs, norm_spec
from ..weights.params import Params
from .draft_head import DraftHead, HeadParams
from .draft_vocabulary import d2t_spec, target_logits


@dataclasses.dataclass(frozen=True)
class DFlash(DraftHead):
    """A head that drafts a block of tokens in one pass.

    Attributes:
        block_size: the tokens of the longest block, its first token included.
        mask_token_id: the id whose embedding stands for a token that is to be drafted.
        target_layer_ids: the layers of the target, from 0, whose outputs make the features.
        samples_anchor: the output at the last token is the first draft token.
        markov_rank: the width of the bias that depends on the draft token before. 0: there is none.
        is_causal: a token of the block sees only tokens of the block before it. None: that is so in layers
            with a window.
        draft_vocab_size: the number of tokens that it can draft. None: the whole vocabulary.
        has_embed, has_lm_head: it has its own embeddings, or output matrix.
        embed_scale: the factor of embeddings, also of the target's.
        output_multiplier, final_logit_softcapping: the factor and the cap of logits, in place of the
            target's.
    """

    kind = "dflash"

    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    samples_anchor: bool = False
    markov_rank: int = 0
    is_causal: bool | None = None
    draft_vocab_size: int | None = None
    has_embed: bool = False
    has_lm_head: bool = False
    embed_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.target_layer_ids

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size if self.samples_anchor else self.block_size - 1

    def bound(self, target: ModelConfig) -> Self:
        own = self.config
        if own.hidden_size != target.hidden_size:
            raise InputError(
                f"the draft head has hidden_size {own.hidden_size}, and the model {target.hidden_size}: use"
                " the head of this model"
            )
        if own.vocab_size != target.vocab_size:
            raise InputError(
                f"the draft head has vocab_size {own.vocab_size}, and the model {target.vocab_size}: use"
                " the head of this model"
            )
        if (last := max(self.target_layer_ids)) >= target.num_hidden_layers:
            raise InputError(
                f"the draft head reads layer {last}, counted from 0, and the model has"
                f" {target.num_hidden_layers} layers: use the head of this model"
            )
        if self.mask_token_id >= target.vocab_size:
            raise InputError(
                f"mask_token_id {self.mask_token_id} of the draft head is not below the model's vocab_size"
                f" {target.vocab_size}: use the head of this model"
            )
        return super().bound(target)

    def param_specs(self) -> Params:
        config = self.config
        d = (config.hidden_size, "embed")
        taps = (config.hidden_size * len(self.target_layer_ids), None)
        vocabulary = (config.vocab_size, "vocab")
        drafted = vocabulary if self.draft_vocab_size is None else (self.draft_vocab_size, None)
        tree: Params = dict(
            fc=dense(d, taps),
            hidden_norm=norm_spec(d),
            layers=tuple(layer_specs(config, i) for i in range(config.num_hidden_layers)),
            final_norm=norm_spec(d),
        )
        if self.has_embed:
            tree["embed"] = dense(vocabulary, d, init="small")
        if self.has_lm_head:
            tree["lm_head"] = dense(drafted, d)
        if rank := self.markov_rank:
            tree["markov_in"] = dense(vocabulary, (rank, None), init="small")
            tree["markov_out"] = dense(drafted, (rank, None))
        if self.draft_vocab_size is not None:
            tree["d2t"] = d2t_spec(self.draft_vocab_size)
        return tree

    def features(self, params, hidden_BTD, reads):
        dtype = params.own["final_norm"].dtype
        joined_BTI = jnp.concatenate([read_BTD.astype(dtype) for read_BTD in reads], -1)
        return norm(linear(joined_BTI, params.own["fc"]), params.own, "hidden_norm", self.config)

    def read(self, params, unread, cache, run_config):
        T = jnp.shape(unread.tokens_BT)[1]
        features_BTD = jnp.asarray(unread.features_BTX).astype(params.own["final_norm"].dtype)
        num_tokens_B = jnp.asarray(unread.num_tokens_B, jnp.int32)
        args = features_BTD, self._positions(cache, num_tokens_B, T), self.config
        layers = tuple(
            _append_context(layer, old, *args, kind, run_config)
            for layer, old, kind in zip(params.own["layers"], cache.layers, self._kinds, strict=True)
        )
        return update_layers(cache, layers, num_tokens_B)

    def draft(self, params, call, count):
        own = params.own
        cache = self.read(params, call.unread, call.cache, call.run_config)
        end_B1 = jnp.maximum(call.unread.num_tokens_B - 1, 0)[:, None]
        last_B = jnp.take_along_axis(jnp.asarray(call.unread.tokens_BT), end_B1, 1)[:, 0]
        masks = count - 1 if self.samples_anchor else count
        block_BT = jnp.pad(last_B[:, None], ((0, 0), (0, masks)), constant_values=self.mask_token_id)
        x_BTD = self._run_block(params, block_BT, cache, call.run_config)
        x_BTD = norm(x_BTD[:, -count:], own, "final_norm", self.config)
        logits_BTV = self.logits(params, x_BTD)

        def body(i: jax.Array, carry: Any) -> Any:
            draft_BT, before_B, context = carry
            logits_BV = logits_BTV[:, i] + self._bias(params, before_B)
            logits_BV = target_logits(logits_BV, own.get("d2t"), self.target.vocab_size)
            token_B, context = call.sample(logits_BV, context)
            return draft_BT.at[:, i].set(token_B), token_B, context

        draft_BT = jnp.zeros((len(last_B), count), jnp.int32)
        draft_BT, *_ = lax.fori_loop(0, count, body, (draft_BT, last_B.astype(jnp.int32), call.context))
        return draft_BT, cache

    def logits(self, params: HeadParams, states_BTD: jax.Array) -> jax.Array:
        """Returns the logits of normed outputs of the block over the head's vocabulary, float32 [B, T, V],
        without the bias of the draft token before.
        """
        head = params.own if self.has_lm_head else params.target
        changes = dict(final_logit_softcapping=self.final_logit_softcapping)
        config = dataclasses.replace(self.target, logits_scaling=1 / self.output_multiplier, **changes)
        return head_logits(head, config, states_BTD)

    def _bias(self, params: HeadParams, before_B: jax.Array) -> jax.Array | float:
        """Returns what is added to the logits after a token, [B, V]."""
        if not self.markov_rank:
            return 0.0
        before_BR = embed_ids(params.own, self.config, before_B, "markov_in")
        return linear(before_BR, params.own["markov_out"], jnp.float32)

    def _run_block(
        self, params: HeadParams, block_BT: jax.Array, cache: KVCache, run_config: RunConfig
    ) -> jax.Array:
        """Returns the outputs of the last layer, [B, T, D], for the tokens of the block."""
        tree, config = (params.own, self.config) if self.has_embed else (params.target, self.target)
        x_BTD = embed_ids(tree, config, block_BT, scale=self.embed_scale)
        x_BTD = x_BTD.astype(params.own["final_norm"].dtype)
        B, T = block_BT.shape
        positions = self._positions(cache, jnp.full(B, T, jnp.int32), T)
        for layer, kv, kind in zip(params.own["layers"], cache.layers, self._kinds, strict=True):
            x_BTD = _block_layer(layer, kv, x_BTD, positions, self, kind, run_config)
        return x_BTD

    def sees_later(self, kind: int) -> bool:
        """Returns True if the tokens of a block see the block's later tokens in this kind of layer."""
        window = self.config.layers[kind].attention.window  # type: ignore[union-attr]
        return window is None if self.is_causal is None else not self.is_causal

    @property
    def _kinds(self) -> tuple[int, ...]:
        """The kind of each layer: the first one with its spec."""
        return tuple(map(self.config.layers.index, self.config.layers))

    def _positions(self, cache: KVCache, num_tokens_B: jax.Array, tokens: int) -> Positions:
        """Returns the slots after the cache. A slot is rotated by the position of the token before it."""
        slot_BT = cache.length_B[:, None] + jnp.arange(tokens)
        longest_B = jnp.zeros_like(cache.length_B) if cache.longest_B is None else cache.longest_B
        angles = rotary_angles(self.config, jnp.maximum(slot_BT - 1, 0), longest_B)
        return Positions(angles, cache.length_B, num_tokens_B, slot_BT)


# Jitted within a trace too: the layers then share a trace.
@partial(jax.jit, static_argnames=("config", "kind", "run_config"))
def _append_context(
    layer: Params,
    kv: Any,
    features_BTD: jax.Array,
    positions: Positions,
    config: ModelConfig,
    kind: int,
    run_config: RunConfig,
) -> Any:
    """Returns the cache of a layer with keys and values of the context."""
    mixer: Any = config.mixers(kind)[0]
    ys = products(features_BTD, [layer["k"], layer["v"]], run_config=run_config)
    k_BTKH, v_BTKH = (y.reshape(*y.shape[:2], -1, mixer.head_dim) for y in ys)
    rotated = mixer.rotation(layer, (k_BTKH, k_BTKH, v_BTKH), mixer.angles(positions))
    _, k_BTKH, v_BTKH = rotate(*rotated)
    return kv.append(k_BTKH, v_BTKH, positions.start_B, positions.num_tokens_B)


@partial(jax.jit, static_argnames=("head", "kind", "run_config"))
def _block_layer(
    layer: Params,
    kv: Any,
    x_BTD: jax.Array,
    positions: Positions,
    head: DFlash,
    kind: int,
    run_config: RunConfig,
) -> jax.Array:
    """Runs a layer on a block. kv: the context of the layer. positions: of the block, which follows it."""
    config = head.config
    mixer: Any = config.mixers(kind)[0]
    qkv, _ = mixer.project(layer, x_BTD, norm_before(layer, "attn_norm", config), run_config)
    q_BTNH, k_BTKH, v_BTKH = rotate(*mixer.rotation(layer, qkv, mixer.angles(positions)))
    window = mixer.spec.window
    slot_BT = positions.position_BT
    first_BT = jnp.ones_like(slot_BT) if window is None else jnp.maximum(slot_BT - window + 1, 1)
    block = Block(
        jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2), slot_BT, jnp.ones(slot_BT.shape, bool)
    )
    # Attention sees the keys up to a query's own place: places after the block see all of it.
    start_B = slot_BT[:, -1] if head.sees_later(kind) else slot_BT[:, 0]
    visible = VisibleKeys(start_B, positions.start_B, first_BT, block)
    context = dataclasses.replace(kv, window=None)
    no_kernel = dataclasses.replace(run_config, impl=None)  # of attention that has `first_BT`
    out_BTNH = attention(q_BTNH, context, visible, **mixer.scoring(layer), run_config=no_kernel)
    out_BTI = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
    x_BTD = linear(out_BTI, layer["o"], residual=x_BTD, run_config=run_config)
    before = norm_before(layer, "mlp_norm", config)
    feed_forward: Any = config.feed_forward(kind)
    return feed_forward.forward(layer, x_BTD, before, x_BTD, run_config, None)[0]
