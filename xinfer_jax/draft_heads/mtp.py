"""Multi-token prediction (DeepSeek-V3 report, 2024): one layer of the model's own kind, which drafts tokens
from the model's last hidden states. Files of Qwen3-Next, Qwen3.5, DeepSeek-V3, GLM-4.5 and others have one.

x = proj [embed_norm(embed(token s)) | hidden_norm(features of token s - 1)], then the layer, then final_norm.
Features are the model's hidden states after its final norm, and after the first draft token the head's own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..config.layer_spec import DraftHeadSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..model.decoder import embed_ids, head_logits
from ..weights.layers import linear, norm
from ..weights.param_specs import dense, layer_specs, norm_spec
from ..weights.params import Params
from .draft_head import ChainHead, run_head_layers


@dataclasses.dataclass(frozen=True)
class MtpSpec(DraftHeadSpec):
    """The head in the files of a model."""

    kind = "mtp"

    layer: LayerSpec


@dataclasses.dataclass(frozen=True)
class Mtp(ChainHead):
    """Multi-token prediction."""

    kind = "mtp"

    @staticmethod
    def of_model(config: ModelConfig) -> "Mtp":
        """Returns the head that a model has in its files."""
        spec: Any = config.draft_head
        own = dataclasses.replace(config, num_hidden_layers=1, layers=(spec.layer,), draft_head=None)
        return Mtp(own, config)

    def param_specs(self) -> Params:
        d = (self.config.hidden_size, "embed")
        both = (2 * self.config.hidden_size, None)
        return dict(
            embed_norm=norm_spec(d),
            hidden_norm=norm_spec(d),
            proj=dense(d, both),
            layers=(layer_specs(self.config, 0),),
            final_norm=norm_spec(d),
        )

    def run(self, params, unread, call):
        own, target = params
        embedded_BTD = embed_ids(target, self.target, jnp.asarray(unread.tokens_BT))
        features_BTD = jnp.asarray(unread.features_BTX).astype(embedded_BTD.dtype)
        embedded_BTD = norm(embedded_BTD, own, "embed_norm", self.config)
        features_BTD = norm(features_BTD, own, "hidden_norm", self.config)
        joined_BTI = jnp.concatenate([embedded_BTD, features_BTD], -1)
        x_BTD = linear(joined_BTI, own["proj"], run_config=call.run_config)
        args = unread.num_tokens_B, call.cache, call.run_config
        x_BTD, cache = run_head_layers(self.config, own["layers"], x_BTD, *args)
        return norm(x_BTD, own, "final_norm", self.config), cache

    def logits(self, params, states_BX) -> jax.Array:
        return head_logits(params.target, self.target, states_BX)
