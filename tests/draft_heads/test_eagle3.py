"""EAGLE-3 heads against NumPy of the published source (vLLM's and SGLang's llama_eagle3.py), whose slots have
the token after the one of their features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_oracles import paged_cache, run_rounds
from eagle3_cases import D_TARGET, HEADS, TARGET, V, random_params

import xinfer_jax as xj
from xinfer_jax.config.run_config import DEFAULT
from xinfer_jax.draft_heads.draft_head import DraftCall, HeadParams, UnreadTokens
from xinfer_jax.draft_heads.draft_vocabulary import NEVER
from xinfer_jax.weights.param_specs import param_specs

STEPS = 3
LENGTHS = (70, 9)  # tokens of two rows, the first of which crosses a page


def case(name):
    """The head for the target, the parameters of both, tokens of each row and the three layers' outputs."""
    head = HEADS[name].bound(TARGET)
    draws = np.random.RandomState(1)
    matrices = {
        name: dict(weight=draws.standard_normal((V, D_TARGET)).astype(np.float32) / 6)
        for name in ("embed", "lm_head")
    }
    params = HeadParams(
        random_params(head.param_specs()), matrices | dict(final_norm=np.ones(D_TARGET, "f4"))
    )
    tokens = [draws.randint(0, V, n) for n in LENGTHS]
    reads = [3 * draws.standard_normal((3, n, D_TARGET)).astype(np.float32) for n in LENGTHS]
    return head, params, tokens, reads


# The reference.


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x_SNH, theta):
    half = x_SNH.shape[-1] // 2
    angles = np.arange(len(x_SNH))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x_SNH[..., :half], x_SNH[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )


def layer_output(layer, x_SI, residual, config):
    """The layer's output. x_SI: the input of its attention, after the norms."""
    S, H = len(x_SI), config.head_dim
    q, k, v = ((x_SI @ layer[name]["weight"].T).reshape(S, -1, H) for name in "qkv")
    if "q_norm" in layer:
        q, k = rms(q, layer["q_norm"], config.rms_norm_eps), rms(k, layer["k_norm"], config.rms_norm_eps)
    q, k = rotate(q, config.rope.rope_theta), rotate(k, config.rope.rope_theta)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
    scores = np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = residual + np.einsum("nts,snh->tnh", weights, v).reshape(S, -1) @ layer["o"]["weight"].T
    y = rms(x, layer["mlp_norm"], config.rms_norm_eps)
    gate, up = (y @ layer[name]["weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]["weight"].T


def reference(head, params, tokens, reads):
    """The logits of STEPS drafts after one row, [STEPS, V], NaN outside of the draft vocabulary."""
    own, target = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    eps = head.config.rms_norm_eps
    if head.feature_norm == "each":
        reads = [rms(x, weight, eps) for x, weight in zip(reads, own["feature_norms"], strict=True)]
    joined = np.concatenate([*reads], -1)
    joined = rms(joined, own["feature_norm"], eps) if head.feature_norm == "joint" else joined
    features = [*(joined @ own["fc"]["weight"].T)[:-1]]  # of each token but the last
    tokens = [*tokens[1:]]  # in the slot of the features before it
    table = (own if head.has_embed else target)["embed"]["weight"]
    matrix = (own if head.draft_vocab_size else target)["lm_head"]["weight"]
    ids = np.arange(len(matrix)) + (own["d2t"].astype(int) if head.has_offsets else 0)
    logits = np.full((STEPS, V), np.nan)
    for step in range(STEPS):
        first, *rest = own["layers"]
        h = np.stack(features)
        e, g = rms(table[np.array(tokens)], first["attn_norm"], eps), rms(h, first["hidden_norm"], eps)
        residual = g if head.norm_before_residual else h
        x = layer_output(first, np.concatenate([e, g], -1), residual, head.config)
        for layer in rest:
            x = layer_output(layer, rms(x, layer["attn_norm"], eps), x, head.config)
        normed = rms(x[-1], own["final_norm"], eps)
        logits[step, ids] = matrix @ normed
        tokens.append(int(np.nanargmax(logits[step])))
        features.append(normed if head.recycles_norm else x[-1])
    return logits


# The head.


def unread_tokens(head, params, tokens, reads, start, end):
    """Tokens start … end - 1 of each row, where it has them, with the features of the token before each."""
    padded = np.zeros((2, 3, max(LENGTHS), D_TARGET), np.float32)
    token_BT = np.zeros((2, max(LENGTHS)), np.int32)
    for b, (ids, outputs) in enumerate(zip(tokens, reads, strict=True)):
        padded[b, :, : len(ids)] = outputs
        token_BT[b, : len(ids)] = ids
    features_BTX = head.features(params, None, tuple(padded[:, i] for i in range(3)))
    features_BTX = jnp.pad(features_BTX, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    num_tokens_B = np.clip(np.array(LENGTHS) - start, 0, end - start)
    return UnreadTokens(token_BT[:, start:end], features_BTX[:, start:end], num_tokens_B)


def argmax(logits_BV, context):
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), context


@functools.partial(jax.jit, static_argnums=0)
def step(head, params, unread, cache):
    """The logits [B, V] after these tokens, the states of which they are, and the cache with the tokens."""
    states_BTX, cache = head.run(params, unread, DraftCall(unread, cache, None, 0, argmax, DEFAULT))
    states_BX = states_BTX[jnp.arange(2), unread.num_tokens_B - 1]
    return head.logits(params, states_BX), states_BX, cache


@functools.partial(jax.jit, static_argnums=0)
def draft(head, params, unread, cache):
    return head.draft(params, DraftCall(unread, cache, None, 0, argmax, DEFAULT), STEPS)


def chained(head, params, unread, cache):
    """The logits [B, STEPS, V] of drafts, step by step."""
    steps = []
    for _ in range(STEPS):
        logits_BV, states_BX, cache = step(head, params, unread, cache)
        steps.append(logits_BV)
        next_BT = argmax(logits_BV, None)[0][:, None]
        unread = UnreadTokens(next_BT, states_BX[:, None], np.ones(2, np.int32))
    return np.stack(steps, 1)


def check(logits_TV, token_T, expected_TV):
    known = ~np.isnan(expected_TV)
    assert 1 < np.nanmax(np.abs(expected_TV)) < 30
    np.testing.assert_allclose(logits_TV[known], expected_TV[known], atol=1e-4)
    assert (logits_TV[~known] == np.float32(NEVER)).all()
    np.testing.assert_array_equal(token_T, np.nanargmax(expected_TV, -1))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "speculators")) for name in HEADS]
)
def test_drafts_are_those_of_the_published_source(name):
    head, params, tokens, reads = case(name)
    # A chunk that is as wide as the rest, so that both are one program.
    chunk, unread = (unread_tokens(head, params, tokens, reads, start, start + 63) for start in (0, 7))
    cache = xj.init_cache(head.config, 2, 80, "float32")
    _, _, cache = step(head, params, chunk._replace(num_tokens_B=np.full(2, 7, np.int32)), cache)
    token_BT, after = draft(head, params, unread, cache)
    np.testing.assert_array_equal(after.length_B, LENGTHS)
    logits_BTV = chained(head, params, unread, cache)
    for b, row in enumerate(zip(tokens, reads, strict=True)):
        check(logits_BTV[b], token_BT[b], reference(head, params, *row))


@pytest.mark.full
def test_rounds_in_pages_with_the_layers_of_a_target():
    head = HEADS["llama"].bound(TARGET)
    params = HeadParams(random_params(head.param_specs()), random_params(param_specs(TARGET), 1))
    token_BT = np.random.RandomState(2).randint(0, V, (2, 72))
    lengths_RB = np.array([[63, 1], [66, 5], [70, 6]])
    rounds = run_rounds(head, params, token_BT, lengths_RB, STEPS, paged_cache(head.config, 2, 2))
    taps = {layer: xj.Tap(read=True) for layer in (1, 3, 4)}
    out = jax.jit(xj.run_model, static_argnums=1)(params.target, TARGET, token_BT, taps=taps)
    reads_3BTD = np.stack([out.reads[layer] for layer in taps])
    for r, lengths in enumerate(lengths_RB):
        for b, length in enumerate(lengths):
            if length > 1:  # the first token has no features before it
                expected_TV = reference(head, params, token_BT[b, :length], reads_3BTD[:, b, :length])
                check(rounds.logits[r, b], rounds.drafts[r, b], expected_TV)
