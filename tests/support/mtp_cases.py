"""Models with a head for multi-token prediction: their configs and weights, and the logits of its drafts."""

import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.draft_heads.draft_head import DraftCall, HeadParams, UnreadTokens
from xinfer_jax.draft_heads.mtp import Mtp
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.model.decoder import run_model

_HYBRID = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
_CHANGED = {  # names of cases in `parity_cases`, and changed fields
    "deepseek_v3": ("deepseek-v3-yarn-groups", {}),
    "glm4_moe": ("glm4-moe-groups", dict(first_k_dense_replace=1)),
    "glm4_moe_lite": ("glm4-moe-lite-defaults", {}),
    "qwen3_5": ("qwen3-5-tied", _HYBRID),
    "qwen3_5_moe": ("qwen3-5-moe-no-shared", _HYBRID | dict(shared_expert_intermediate_size=20)),
    "qwen3_next": ("qwen3-next-sparse-step", _HYBRID | dict(decoder_sparse_step=1, mlp_only_layers=None)),
    "qwen3": ("qwen3-default-head-dim", {}),
}
ROWS = ([5, 9, 60, 33, 7, 51, 2, 14, 40, 77, 30, 11], [8, 1, 61, 4, 23, 50, 6])
DRAFTS = 3


def hf_of(name: str) -> dict[str, Any]:
    """Returns config.json of a small model."""
    (case, changed) = _CHANGED[name]
    return copy.deepcopy(cases.CASES[case].hf | dict(num_hidden_layers=2) | changed)


def build(name: str, seed: int = 5) -> xj.Model:
    """Returns a model with a head. All norms and biases of its head are random, too."""
    config = xj.ModelConfig.from_hf(hf_of(name))
    config = dataclasses.replace(config, draft_head=mtp_spec(config))
    tensors = cases.random_tensors(config, seed)
    random = np.random.RandomState(seed)
    for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        if f"mtp.{part}.weight" in tensors:
            noise = 0.2 * random.standard_normal(config.hidden_size)
            tensors[f"mtp.{part}.weight"] = (1 - (config.norm_offset or 0) + noise).astype(np.float32)
    return xj.Model(cases.params_from(config, tensors), config)


class Drafts(NamedTuple):
    """The first drafts of each row, and the logits that they are of."""

    tokens_BT: np.ndarray  # int32 [B, DRAFTS]
    logits_BTV: np.ndarray


def read_prompts(model: xj.Model, rows: Any = ROWS, features_BTD: Any = None) -> UnreadTokens:
    """Returns the tokens of all rows, with the features that the target gives them. features_BTD: features in
    place of these.
    """
    tokens_BT, num_tokens_B = cases.pad_prompts([*map(list, rows)])
    if features_BTD is None:
        run = jax.jit(lambda params, *rest: run_model(params, model.config, *rest).hidden)
        features_BTD = run(model.params, tokens_BT, None, num_tokens_B)
    before_BTD = jnp.pad(features_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return UnreadTokens(jnp.asarray(tokens_BT), before_BTD, jnp.asarray(num_tokens_B))


def draft(model: xj.Model, unread: UnreadTokens, tokens: int = DRAFTS) -> Drafts:
    """Returns the greedy drafts after these tokens."""
    head = Mtp.of_model(model.config)
    cache = xj.init_cache(head.config, len(unread.tokens_BT), 32)

    @jax.jit
    def drafts(params: Any, unread: UnreadTokens, cache: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = HeadParams(params["draft_head"], params)
        call = DraftCall(unread, cache, None, jnp.zeros((len(unread.tokens_BT),)), _greedy, RunConfig())
        (drafted_BT, _) = head.draft(own, call, tokens)
        logits = []
        length_B = unread.num_tokens_B
        for _ in range(tokens):  # step by step, for the logits
            states_BTD, cache = head.run(own, unread, call)
            last_BD = states_BTD[jnp.arange(len(length_B)), unread.num_tokens_B - 1]
            logits.append(head.logits(own, last_BD))
            call = call._replace(cache=cache)
            unread = UnreadTokens(_best(logits[-1])[:, None], last_BD[:, None], jnp.ones_like(length_B))
        return drafted_BT, jnp.stack(logits, 1), cache.length_B

    drafted_BT, logits_BTV, length_B = drafts(model.params, unread, cache)
    np.testing.assert_array_equal(drafted_BT, _best(logits_BTV))
    np.testing.assert_array_equal(length_B, unread.num_tokens_B + tokens - 1)
    return Drafts(np.asarray(drafted_BT), np.asarray(logits_BTV))


def _best(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, -1).astype(jnp.int32)


def _greedy(logits_BV: jax.Array, context: Any) -> tuple[jax.Array, Any]:
    return _best(logits_BV), context
