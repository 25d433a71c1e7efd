"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a layer of Llama's kind, which drafts tokens from the outputs
of three layers of the target.

Features of a token are fc [outputs of the three layers]. With e = attn_norm(embed(token s)) and g =
hidden_norm(features of token s - 1), the layer's queries, keys and values are products of [e | g], and its
residual is the features themselves. Its output, before the final norm, is the features of the next step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..cache.kv_cache import update_layers
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..model.decoder import embed_ids, head_logits, lm_head
from ..model.decoder_layer import LayerInputs, all_layers, run_layers
from ..model.extras import NO_EXTRAS
from ..weights.layers import linear, norm, norm_before
from ..weights.param_specs import dense, layer_specs, norm_spec
from ..weights.params import Params
from .draft_head import ChainHead, check_sizes, head_positions
from .draft_vocabulary import d2t_spec, target_logits

NUM_TAPS = 3  # unless its files say otherwise


@dataclasses.dataclass(frozen=True)
class Eagle3(ChainHead):
    """An EAGLE-3 head. The `vocab_size` of its config is the target's.

    Attributes:
        target_hidden_size: the width of the target's hidden states.
        layer_ids: the layers of the target, from 0, whose outputs it gets. -1 is the embeddings. None: three
            layers: the second one, the one before the middle, and the fourth from the end.
        draft_vocab_size: the tokens that it can draft. None: all tokens, by the output matrix of the target.
        has_offsets: True if the parameters have the ids of draft tokens in the target, "d2t".
        has_embed: True if it has its own embedding matrix. Otherwise it uses the target's.
        norm_before_residual: True if the residual of the layer is g in place of the features.
        feature_norm: "each" norms the outputs of the target's layers before fc, "joint" norms all three as
            one vector. None: neither.
        recycles_norm: True if the features of the next step are the output after the final norm.
    """

    kind = "eagle3"

    target_hidden_size: int = 0
    layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    has_offsets: bool = False
    has_embed: bool = False
    norm_before_residual: bool = False
    feature_norm: str | None = None
    recycles_norm: bool = False

    @property
    def taps(self) -> tuple[int, ...]:
        layers = self.target.num_hidden_layers
        return self.layer_ids or (1, layers // 2 - 1, layers - 4)

    @property
    def num_taps(self) -> int:
        """The number of layers of the target that it gets."""
        return len(self.layer_ids or range(NUM_TAPS))

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    def bound(self, target: ModelConfig) -> "Eagle3":
        head = dataclasses.replace(self, target=target)
        check_sizes(target, hidden_size=self.target_hidden_size, vocab_size=self.config.vocab_size)
        last = target.num_hidden_layers - 1
        if wrong := [layer for layer in head.taps if not -1 <= layer <= last]:
            raise InputError(
                f"this draft head reads the output of layer {wrong[0]}, and the layers of the model are 0 to"
                f" {last}: use the head of this model"
            )
        if not (self.has_embed and self.draft_vocab_size):
            check_sizes(target, hidden_size=self.config.hidden_size)
        return head

    def param_specs(self) -> Params:
        config = self.config
        d = (config.hidden_size, "embed")
        taps = (self.num_taps * self.target_hidden_size, None)
        first: Params = layer_specs(config, 0) | dict(hidden_norm=norm_spec(d))
        for name in "qkv":
            outputs = first[name]["weight"]
            wide = dict(shape=(outputs.shape[0], 2 * config.hidden_size), axes=(outputs.axes[0], None))
            first[name] = first[name] | dict(weight=dataclasses.replace(outputs, **wide))
        rest = (layer_specs(config, i) for i in range(1, config.num_hidden_layers))
        tree: Params = dict(fc=dense(d, taps), layers=(first, *rest), final_norm=norm_spec(d))
        if self.feature_norm == "each":
            tree["feature_norms"] = (norm_spec((self.target_hidden_size, None)),) * self.num_taps
        if self.feature_norm == "joint":
            tree["feature_norm"] = norm_spec(taps)
        if self.has_embed:
            tree["embed"] = dense((config.vocab_size, "vocab"), d, init="small")
        if self.draft_vocab_size is not None:
            tree["lm_head"] = dense((self.draft_vocab_size, "vocab"), d)
        if self.has_offsets:
            tree["d2t"] = d2t_spec(self.draft_vocab_size or config.vocab_size)
        return tree

    def features(self, params, hidden_BTD, reads) -> jax.Array:
        own = params.own
        outputs = [jnp.asarray(x_BTD).astype(own["final_norm"].dtype) for x_BTD in reads]
        if self.feature_norm == "each":
            pairs = zip(outputs, own["feature_norms"], strict=True)
            outputs = [norm(x_BTD, dict(weight=weight), "weight", self.config) for x_BTD, weight in pairs]
        joined_BTI = jnp.concatenate(outputs, -1)
        if self.feature_norm == "joint":
            joined_BTI = norm(joined_BTI, own, "feature_norm", self.config)
        return linear(joined_BTI, own["fc"])

    def run(self, params, unread, call):
        own = params.own
        config = self.config
        first = own["layers"][0]
        features_BTD = jnp.asarray(unread.features_BTX).astype(own["final_norm"].dtype)
        embedded_BTD = norm(self._embed(params, unread.tokens_BT), first, "attn_norm", config)
        normed_BTD = norm(features_BTD, first, "hidden_norm", config)
        joined_BTI = jnp.concatenate([embedded_BTD, normed_BTD], -1)
        residual_BTD = normed_BTD if self.norm_before_residual else features_BTD

        cache = call.cache
        run_config = call.run_config
        positions = head_positions(config, features_BTD.shape[:2], unread.num_tokens_B, cache)
        caches: tuple[Any, ...] = (None,) * config.num_hidden_layers if cache is None else cache.layers
        (attention,) = config.mixers(0)
        args = first, joined_BTI, positions, caches[0], run_config
        x_BTD, new = attention.forward(*args, residual=residual_BTD)
        mlp: Any = config.feed_forward(0)
        x_BTD, _ = mlp.forward(first, x_BTD, norm_before(first, "mlp_norm", config), x_BTD, run_config)
        caches = new, *caches[1:]
        if config.num_hidden_layers > 1:
            rest = slice(1, None)
            inputs = (LayerInputs(),) * (config.num_hidden_layers - 1)
            more = positions, inputs, NO_EXTRAS, caches, run_config
            out = run_layers(own["layers"][rest], all_layers(config).part(rest), x_BTD, *more)
            x_BTD = out.hidden_BTD
            caches = out.caches
        x_BTD = norm(x_BTD, own, "final_norm", config) if self.recycles_norm else x_BTD
        return x_BTD, cache and update_layers(cache, caches, unread.num_tokens_B)

    def _embed(self, params: Any, tokens_BT: Any) -> jax.Array:
        """Returns the embeddings of tokens, without the factor that the target may multiply them by."""
        own, target = params
        token_BT = jnp.asarray(tokens_BT)
        if self.has_embed:
            return embed_ids(own, self.config, token_BT)
        return embed_ids(target, self.target, token_BT, scale=1.0).astype(own["final_norm"].dtype)

    def logits(self, params, states_BX) -> jax.Array:
        own, target = params
        hidden_BD = states_BX if self.recycles_norm else norm(states_BX, own, "final_norm", self.config)
        matrix = own["lm_head"] if "lm_head" in own else lm_head(target)
        size = self.draft_vocab_size or self.config.vocab_size
        config = dataclasses.replace(self.config, vocab_size=size)
        logits_BC = head_logits(dict(lm_head=matrix), config, hidden_BD)
        return target_logits(logits_BC, own.get("d2t"), self.target.vocab_size)
