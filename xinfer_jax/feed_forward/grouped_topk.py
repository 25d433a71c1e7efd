"""`GroupedTopkRouter`: a router by sigmoid or softmax scores, with a bias for the choice alone and groups of
experts, as DeepSeek-V3, GLM-4.5 and many others have it.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.layer_spec import RouterSpec
from ..weights.layers import linear
from ..weights.param_specs import tensor
from ..weights.params import Params
from .routers import Router


@dataclasses.dataclass(frozen=True)
class GroupedTopkSpec(RouterSpec):
    """The experts with the largest scores, within the groups with the largest scores. Fields have the
    names of config.json and of vLLM.
    """

    kind = "grouped_topk"

    scoring_func: str = "sigmoid"  # the function of the logits: or "softmax", over all experts
    correction_bias: bool = True  # experts and groups are chosen by score + bias; weights have no bias
    n_group: int = 1  # groups of experts, one after the other and of equal size
    topk_group: int = 1  # groups of which each token may use the experts
    group_score: str = "top2"  # the sum of the two best experts of a group: or "max", the best one
    masked_score: float = -math.inf  # what the experts of other groups have in place of their scores
    norm_topk_prob: bool = True  # weights are divided by their sum
    norm_epsilon: float = 1e-20  # is added to that sum
    norm_minimum: float = 0.0  # the sum is at least this number
    routed_scaling_factor: float = 1.0  # weights are multiplied by it


class GroupedTopkRouter(Router):
    """The router whose spec is a `GroupedTopkSpec`.

    Its parameters are float32 in every model, and so are its input and scores: a rounded bias or weight would
    choose other experts.
    """

    def param_specs(self) -> Params:
        spec: Any = self.spec.router
        tree = super().param_specs()
        tree = {name: dataclasses.replace(leaf, dtype="float32") for name, leaf in tree.items()}
        if spec.correction_bias:
            experts = (self.spec.num_experts, None)
            tree["correction_bias"] = tensor(experts, init="small", dtype="float32")
        return tree

    def choose(
        self, params: Params, x_BTD: jax.Array, given_BTU: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        spec: Any = self.spec.router
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1]).astype(jnp.float32)
        logit_MX = linear(x_MD, params)
        is_sigmoid = spec.scoring_func == "sigmoid"
        score_MX = jax.nn.sigmoid(logit_MX) if is_sigmoid else jax.nn.softmax(logit_MX, -1)
        choice_MX = score_MX + params["correction_bias"] if spec.correction_bias else score_MX
        if spec.n_group > 1:
            choice_MX = self._within_groups(choice_MX)
        _, expert_MU = lax.top_k(choice_MX, self.spec.num_experts_per_tok)
        if given_BTU is not None:
            expert_MU = self.given_or(expert_MU, given_BTU)
        weight_MU = jnp.take_along_axis(score_MX, expert_MU, -1)
        if spec.norm_topk_prob:
            sum_M1 = weight_MU.sum(-1, keepdims=True) + spec.norm_epsilon
            weight_MU = weight_MU / (jnp.maximum(sum_M1, spec.norm_minimum) if spec.norm_minimum else sum_M1)
        return weight_MU * spec.routed_scaling_factor, expert_MU

    def _within_groups(self, choice_MX: jax.Array) -> jax.Array:
        """Returns the scores that experts are chosen by, masked in the groups that a token does not use."""
        spec: Any = self.spec.router
        by_group = choice_MX.reshape(choice_MX.shape[0], spec.n_group, -1)
        best_in_group = lax.top_k(by_group, 2 if spec.group_score == "top2" else 1)[0].sum(-1)
        _, used = lax.top_k(best_in_group, spec.topk_group)
        is_used = (used[..., None] == jnp.arange(spec.n_group)).any(1)
        return jnp.where(is_used[..., None], by_group, spec.masked_score).reshape(choice_MX.shape)
