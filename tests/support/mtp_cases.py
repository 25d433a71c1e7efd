"""Models with a head for multi-token prediction: their configs and weights, and the logits of its drafts."""

import copy
import dataclasses
from functools import partial
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
LOGITS: list[list[np.ndarray]] = []  # of the drafts of this call


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


def with_a_good_head(model: xj.Model, factor: float) -> xj.Model:
    """Returns a model whose next token depends mostly on the last one, and a head that computes just that
    part. So the model accepts many drafts, and not all. factor: of the outputs of the model's mixers and
    feed-forwards.
    """

    def weaker(layer: Any, factor: float) -> Any:
        def scaled(path: Any, x: Any) -> Any:
            return factor * x if {"o", "down"} & {key.key for key in path} else x

        return jax.tree_util.tree_map_with_path(scaled, layer)

    head = model.params["draft_head"]
    D = model.config.hidden_size
    proj = {"weight": jnp.concatenate([jnp.eye(D), jnp.zeros((D, D))], 1)}
    ones = jnp.full(D, 1.0 - (model.config.norm_offset or 0))
    head = head | dict(
        proj=proj,
        embed_norm=ones,
        layers=(weaker(head["layers"][0], 0.1),),
        final_norm=model.params["final_norm"],
    )
    layers = tuple(weaker(layer, factor) for layer in model.params["layers"])
    return dataclasses.replace(model, params=model.params | dict(draft_head=head, layers=layers))


def read_prompts(model: xj.Model, rows: Any = ROWS, width: int = 0) -> UnreadTokens:
    """Returns the tokens of all rows, with the features that the target gives them. width: the least number
    of tokens of a row, with padding.
    """
    tokens_BT, num_tokens_B = cases.pad_prompts([*map(list, rows)])
    tokens_BT = np.pad(tokens_BT, ((0, 0), (0, max(0, width - tokens_BT.shape[1]))))
    features_BTD = _hidden(model.params, model.config, tokens_BT, num_tokens_B)
    before_BTD = jnp.pad(features_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return UnreadTokens(jnp.asarray(tokens_BT), before_BTD, jnp.asarray(num_tokens_B))


@jax.jit
def _hidden(params: Any, config: Any, tokens_BT: Any, num_tokens_B: Any) -> jax.Array:
    return run_model(params, config, tokens_BT, num_tokens_B=num_tokens_B).hidden


def draft(
    model: xj.Model,
    unread: UnreadTokens,
    tokens: int = DRAFTS,
    mesh: Any = None,
    read_before: UnreadTokens | None = None,
) -> Drafts:
    """Returns the greedy drafts after these tokens, over a mesh without their logits. read_before: tokens
    before them that the head reads.
    """
    head = Mtp.of_model(model.config)
    cache = xj.init_cache(head.config, len(unread.tokens_BT), 64, mesh=mesh)
    if read_before is not None:
        own = HeadParams(model.params["draft_head"], model.params)
        cache = jax.jit(head.read, static_argnums=3)(own, read_before, cache, RunConfig())
    before_B = np.asarray(cache.length_B)
    seen: list[np.ndarray] = []
    LOGITS[:] = [seen]
    sample = _greedy if mesh is None else _best
    drafted_BT, length_B = _draft(head, tokens, sample, model.params, unread, cache)
    np.testing.assert_array_equal(length_B, before_B + unread.num_tokens_B)
    if mesh is not None:
        return Drafts(np.asarray(drafted_BT), np.zeros(0))
    jax.effects_barrier()
    assert len(seen) == tokens
    logits_BTV = np.stack(seen, 1)
    np.testing.assert_array_equal(drafted_BT, logits_BTV.argmax(-1))
    return Drafts(np.asarray(drafted_BT), logits_BTV)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draft(
    head: Mtp, tokens: int, sample: Any, params: Any, unread: UnreadTokens, cache: Any
) -> tuple[jax.Array, jax.Array]:
    own = HeadParams(params["draft_head"], params)
    call = DraftCall(unread, cache, None, (), sample, RunConfig())  # type: ignore[arg-type]
    drafted_BT, cache = head.draft(own, call, tokens)
    return drafted_BT, cache.length_B


def _greedy(logits_BV: jax.Array, context: Any) -> tuple[jax.Array, Any]:
    """Chooses the best token, and gives the logits to the host."""
    jax.debug.callback(lambda x_BV: LOGITS[0].append(np.array(x_BV)), logits_BV, ordered=True)
    return _best(logits_BV, context)


def _best(logits_BV: jax.Array, context: Any) -> tuple[jax.Array, Any]:
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), context
