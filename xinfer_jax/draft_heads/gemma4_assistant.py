"""The assistant of Gemma 4 ("gemma4_assistant" in transformers): a few layers of Gemma 4 without keys of
their own, so it has no cache.

x = pre_projection [embed(token s) | features of token s - 1], where embed is the target's, with its factor.
Sliding layers see the keys of the target's last sliding layer that has keys, and full layers the keys of its
last full layer that has some. Queries always have the position after the last of these keys, also for later
draft tokens. post_projection makes the features of the next step from their output.
"""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..mixers.mixer import Positions
from ..model.decoder import embed_ids, head_logits
from ..model.decoder_layer import LayerGroup, LayerInputs, layer_kinds, run_layers
from ..model.extras import NO_EXTRAS
from ..weights.layers import embed, linear, norm, rotary_angles
from ..weights.param_specs import ParamSpec, dense, layer_specs, norm_spec
from ..weights.params import Params
from .draft_head import ChainHead, check_sizes
from .draft_vocabulary import NEVER


@dataclasses.dataclass(frozen=True)
class Gemma4Assistant(ChainHead):
    """An assistant of Gemma 4. All layers of its config share keys, and `vocab_size` is the target's.

    Attributes:
        target_hidden_size: the width of the target's hidden states.
        num_centroids: the groups of tokens, each with a vector: only tokens of the best groups get logits.
            0: all tokens get logits.
        num_chosen_centroids: the number of best groups.
    """

    kind = "gemma4_assistant"

    target_hidden_size: int = 0
    num_centroids: int = 0
    num_chosen_centroids: int = 0

    def bound(self, target: ModelConfig) -> "Gemma4Assistant":
        if not target.model_type.startswith("gemma4"):
            raise InputError(
                f"an assistant of Gemma 4 drafts for Gemma 4 only, and the model is"
                f" {format_value(target.model_type)}: use another draft head"
            )
        check_sizes(target, hidden_size=self.target_hidden_size, vocab_size=self.config.vocab_size)
        head = dataclasses.replace(self, target=target)
        for layer, cache in enumerate(head._caches):
            self._check_keys(layer, target.cached_mixers[cache] if cache >= 0 else None)
        return head

    def _check_keys(self, layer: int, keys: Any) -> None:
        """Raises InputError unless a layer can read the keys of this mixer of the target."""
        queries: Any = self.config.mixers(layer)[0]
        heads = self.config.num_attention_heads
        fits = keys is not None and (queries.head_dim, queries.window) == (keys.head_dim, keys.window)
        if not fits or heads % keys.num_kv_heads:
            found = "layers have no keys for it"
            if keys is not None:
                found = (
                    f"keys have {keys.num_kv_heads} heads of width {keys.head_dim} and window {keys.window}"
                )
            raise InputError(
                f"layer {layer} of this assistant has {heads} heads of width {queries.head_dim} and window"
                f" {queries.window}, and the model's {found}: use the assistant of this model"
            )

    @cached_property
    def _caches(self) -> tuple[int, ...]:
        """For each layer, the index in the target's `KVCache.layers` of the cache that it reads, or -1."""
        last = {mixer.window is None: i for i, mixer in enumerate(self.target.cached_mixers)}
        return tuple(last.get(window is None, -1) for window in self.config.layer_windows)

    @cached_property
    def _config(self) -> ModelConfig:
        """The config with windows for queries at the position of the last key. transformers lets a query see
        all keys whose distance from the last one is at most the window: one key more than the window.
        """
        layers = (
            layer.with_mixer(window=window and window + 1)
            for layer, window in zip(self.config.layers, self.config.layer_windows, strict=True)
        )
        return dataclasses.replace(self.config, layers=tuple(layers))

    def param_specs(self) -> Params:
        config = self.config
        d = (config.hidden_size, "embed")
        target_d = (self.target_hidden_size, None)
        vocabulary = (config.vocab_size, "vocab")
        tree: Params = dict(
            pre_projection=dense(d, (2 * self.target_hidden_size, None)),
            layers=tuple(layer_specs(config, i) for i in range(config.num_hidden_layers)),
            final_norm=norm_spec(d),
            post_projection=dense(target_d, d),
            embed=dense(vocabulary, d, init="small"),
        )
        if self.num_centroids:
            tree["centroids"] = dense((self.num_centroids, None), d)
            tree["token_ordering"] = ParamSpec((config.vocab_size,), (None,), init=0.0, dtype="int32")
        return tree

    def read(self, params, unread, cache, run_config):
        return cache

    def run(self, params, unread, call):
        """Returns states [B, T, S], the same for all tokens of a row: those of its last one. They are the
        features of the next step, and the hidden states for logits after them.
        """
        own, target = params
        D = self.target_hidden_size
        B, T = unread.tokens_BT.shape
        end_B1 = jnp.maximum(jnp.asarray(unread.num_tokens_B) - 1, 0)[:, None]
        token_B1 = jnp.take_along_axis(jnp.asarray(unread.tokens_BT), end_B1, 1)
        features_B1D = jnp.take_along_axis(jnp.asarray(unread.features_BTX), end_B1[..., None], 1)[..., :D]
        embedded_B1D = embed_ids(target, self.target, token_B1)
        joined_B1I = jnp.concatenate([embedded_B1D, features_B1D.astype(embedded_B1D.dtype)], -1)
        joined_B1I = joined_B1I.astype(own["final_norm"].dtype)
        x_B1D = linear(joined_B1I, own["pre_projection"], run_config=call.run_config)

        config = self._config
        cache = call.target_cache
        group = LayerGroup(config, layer_kinds(config), tuple((index,) for index in self._caches))
        inputs = (LayerInputs(),) * config.num_hidden_layers
        args = self._positions(cache), inputs, NO_EXTRAS, cache.layers, call.run_config
        x_B1D = run_layers(own["layers"], group, x_B1D, *args).hidden_BTD
        hidden_B1D = norm(x_B1D, own, "final_norm", config)
        next_B1D = linear(hidden_B1D, own["post_projection"], run_config=call.run_config)
        states_B1S = jnp.concatenate([next_B1D, hidden_B1D], -1)
        return jnp.broadcast_to(states_B1S, (B, T, states_B1S.shape[-1])), call.cache

    def _positions(self, cache: Any) -> Positions:
        """Returns the positions of one query in each row. Its angles are those of the position after the last
        key. It sees keys as a query at the position of the last key.
        """
        length_B = cache.length_B
        longest_B = jnp.zeros_like(length_B) if cache.longest_B is None else cache.longest_B
        angles = rotary_angles(self.config, length_B[:, None], longest_B)
        some_B = (length_B > 0).astype(jnp.int32)
        return Positions(angles, length_B - some_B, some_B, length_B[:, None])

    def logits(self, params, states_BX) -> jax.Array:
        own = params.own
        hidden_BD = states_BX[:, self.target_hidden_size :]
        if self.num_centroids:
            return self._logits_of_best_groups(own, hidden_BD)
        return head_logits(dict(embed=own["embed"]), self.config, hidden_BD)

    def _logits_of_best_groups(self, own: Params, hidden_BD: jax.Array) -> jax.Array:
        """Returns the logits [B, V] of the tokens in the groups whose vectors score best."""
        B = len(hidden_BD)
        score_BC = linear(hidden_BD, own["centroids"], jnp.float32)
        _, group_BU = lax.top_k(score_BC, self.num_chosen_centroids)
        id_CG = own["token_ordering"].reshape(self.num_centroids, -1)
        id_BI = id_CG[group_BU].reshape(B, -1)
        row_BID = embed(id_BI, own["embed"], hidden_BD.dtype)
        logit_BI = jnp.einsum("bd,bid->bi", hidden_BD, row_BID, preferred_element_type=jnp.float32)
        logits_BV = jnp.full((B, self.config.vocab_size), NEVER, jnp.float32)
        return logits_BV.at[jnp.arange(B)[:, None], id_BI].set(logit_BI)
