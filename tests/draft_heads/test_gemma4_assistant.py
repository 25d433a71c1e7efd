"""Assistants of Gemma 4 against transformers, in its first round. Later its cut of shared keys keeps slots of
rejected draft tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.config.run_config import DEFAULT
from xinfer_jax.draft_heads.draft import bind_draft
from xinfer_jax.draft_heads.draft_head import DraftCall, HeadParams, UnreadTokens
from xinfer_jax.draft_heads.draft_vocabulary import NEVER
from xinfer_jax.errors import InputError
from xinfer_jax.families.gemma4_assistant_files import ASSISTANT_FILES

try:
    import torch
except ImportError:
    torch = None

STEPS = 3
LENGTHS = (21, 6)  # of prompts, longer than the windows, and shorter
SMALL = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3)
ORDERED = dict(use_ordered_embeddings=True, num_centroids=12, centroid_intermediate_top_k=3)
KINDS = {
    "gemma4-shared-kv": {},
    "gemma4-shared-kv-ordered": ORDERED,
    "gemma4-unified-shared-kv-ordered": ORDERED,
}


def settings(name):
    """The target's case, and config.json of its assistant."""
    case = cases.CASES[name.removesuffix("-ordered")]
    unified = "unified_" if "unified" in name else ""
    kept = (
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "sliding_window",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    text = {key: case.hf[key] for key in kept} | SMALL
    text |= dict(
        model_type=f"gemma4_{unified}text",
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=3,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    if unified:
        text = {key: x for key, x in text.items() if "per_layer" not in key and "moe" not in key}
    hf = dict(
        architectures=[f"Gemma4{'Unified' * bool(unified)}AssistantForCausalLM"],
        model_type=f"gemma4_{unified}assistant",
        backbone_hidden_size=case.config.hidden_size,
        text_config=text,
        tie_word_embeddings=True,
    )
    return case, hf | KINDS[name]


def random_draft(hf, seed=0):
    head = ASSISTANT_FILES.read(hf, {})
    draws = np.random.RandomState(seed)

    def leaf(path, spec):
        if spec.dtype == "int32":
            return draws.permutation(head.config.vocab_size).astype(np.int32)
        noise = draws.standard_normal(spec.shape)
        if len(spec.shape) == 1:  # scores are not divided: small queries keep them from enlarging errors
            size = 0.4 if "q_norm" in jax.tree_util.keystr(path) else 1
            return (size + 0.3 * size * noise).astype(np.float32)
        return (1.5 * noise / np.sqrt(spec.shape[-1])).astype(np.float32)

    return xj.Draft(jax.tree.map_with_path(leaf, head.param_specs()), head)


def after_prompts(params, config):
    """The prompts, the tokens after them, the features of each prompt's last token, and the cache."""
    draws = np.random.RandomState(5)
    token_BT = draws.randint(0, config.vocab_size, (2, max(LENGTHS)))
    cache = xj.init_cache(config, 2, 64, "float32")
    output = jax.jit(xj.run_model, static_argnums=1)(params, config, token_BT, cache, np.array(LENGTHS))
    features_BX = output.hidden[np.arange(2), np.array(LENGTHS) - 1]
    next_B = draws.randint(0, config.vocab_size, 2)
    return token_BT, next_B, features_BX, output.cache


def argmax(logits_BV, context):
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), context


def drafts(head, params, unread, target_cache):
    """The logits [B, STEPS, V] of drafts step by step, and the tokens that `draft` returns."""
    call = DraftCall(unread, None, target_cache, 0, argmax, DEFAULT)

    @jax.jit
    def step(params, unread, target_cache):
        states_BTX, cache = head.run(params, unread, call._replace(target_cache=target_cache))
        assert cache is None
        return head.logits(params, states_BTX[:, -1]), states_BTX[:, -1]

    @jax.jit
    def draft(params, unread, target_cache):
        now = call._replace(unread=unread, target_cache=target_cache)
        return head.draft(params, now, STEPS)

    token_BT, cache = draft(params, unread, target_cache)
    assert cache is None
    steps = []
    for _ in range(STEPS):
        logits_BV, states_BX = step(params, unread, target_cache)
        steps.append(logits_BV)
        next_BT = argmax(logits_BV, None)[0][:, None]
        unread = UnreadTokens(next_BT, states_BX[:, None], np.ones(2, np.int32))
    return np.stack(steps, 1), np.asarray(token_BT)


def transformers_drafts(assistant, target, prompt, token, steps):
    """The logits [steps, V] of drafts of transformers' classes, and the tokens."""
    ids = torch.tensor(prompt)[None]
    logits, tokens = [], []
    with torch.no_grad():
        out = target(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
        hidden, token = out.hidden_states[-1][:, -1:], torch.tensor([[token]])
        for _ in range(steps):
            joined = torch.cat([target.get_input_embeddings()(token), hidden], -1)
            step = assistant(
                inputs_embeds=joined,
                position_ids=torch.tensor([[len(prompt)]]),
                use_cache=False,
                attention_mask=torch.ones(1, len(prompt) + 1),
                shared_kv_states=out.shared_kv_states,
            )
            hidden, token = step.last_hidden_state, step.logits.argmax(-1)
            logits.append(step.logits[0, 0].numpy())
            tokens.append(int(token))
    return logits, tokens


@pytest.mark.full
@pytest.mark.oldest
@pytest.mark.parametrize(
    "name",
    full_except((), ("gemma4-shared-kv", "gemma4-unified-shared-kv-ordered"), soak=("gemma4-shared-kv",)),
)
@pytest.mark.skipif(torch is None, reason="the live comparison needs torch and transformers")
def test_drafts_are_those_of_transformers(name, tmp_path):
    """transformers computes in float64: in float32 its own errors are as large as the tolerance."""
    transformers = pytest.importorskip("transformers")
    case, hf = settings(name)
    draft = random_draft(hf)
    xj.save_draft(draft, tmp_path / "assistant")
    assistant = getattr(transformers, hf["architectures"][0])
    assistant = assistant.from_pretrained(tmp_path / "assistant", dtype=torch.float64)
    tensors = cases.random_tensors(case.config, 3)
    target = cases.hf_model(case.hf, tensors).to(torch.float64)
    params = cases.params_from(case.config, tensors)
    token_BT, next_B, features_BX, cache = after_prompts(params, case.config)
    head, own = bind_draft(draft, params, case.config)
    unread = UnreadTokens(next_B[:, None], np.asarray(features_BX)[:, None], np.ones(2, np.int32))
    logits_BTV, found_BT = drafts(head, HeadParams(own, params), unread, cache)
    for b, length in enumerate(LENGTHS):
        expected = transformers_drafts(assistant, target, token_BT[b, :length], next_B[b], STEPS)
        assert found_BT[b].tolist() == expected[1]
        for logits_V, expected_V in zip(logits_BTV[b], expected[0], strict=True):
            known_V = logits_V > NEVER
            np.testing.assert_allclose(logits_V[known_V], expected_V[known_V], atol=1e-4)
            assert 1 < np.abs(expected_V).max() < 30
            if head.num_centroids:
                assert known_V.sum() == len(known_V) // 4
                assert (expected_V[~known_V] < expected_V[known_V].min()).all()


def test_only_certain_keys_are_seen():
    """Slots after a row's length have keys of rejected draft tokens. A row may have no tokens yet."""
    case, hf = settings("gemma4-shared-kv-ordered")
    embed = dict(weight=np.random.RandomState(1).standard_normal((case.config.vocab_size, 48)).astype("f4"))
    target = dict(embed=embed, final_norm=np.ones(48, np.float32))
    draft = random_draft(hf)
    head, own = bind_draft(draft, target, case.config)
    assert not head.has_cache and head.taps == () and head.feature_size == 48
    length_B = np.array([LENGTHS[0], 0], np.int32)

    def cache(others):
        """A cache with random keys and values of `length_B` tokens, and others after them."""
        draws = np.random.RandomState(2)
        empty = xj.init_cache(case.config, 2, 32, "float32")
        is_certain = (np.arange(32) < length_B[:, None])[:, None, :, None]

        def fill(x):
            return np.where(is_certain, draws.standard_normal(x.shape).astype(np.float32), others)

        layers = tuple(dataclasses.replace(x, k=fill(x.k), v=fill(x.v)) for x in empty.layers)
        return dataclasses.replace(empty, layers=layers, length_B=length_B)

    # After a verification a row has several tokens that the head has not read. The last one counts.
    unread = UnreadTokens(
        np.array([[8, 0], [5, 9]]), np.full((2, 2, 48), 0.5, np.float32), np.array([1, 2], np.int32)
    )

    @jax.jit
    def states(params, unread, target_cache):
        return head.run(params, unread, DraftCall(unread, None, target_cache, 0, argmax, DEFAULT))[0]

    params = HeadParams(own, target)
    expected_BTX = states(params, unread, cache(0))
    np.testing.assert_array_equal(states(params, unread, cache(np.float32("nan"))), expected_BTX)
    other_BTX = states(params, unread._replace(tokens_BT=np.array([[8, 3], [6, 9]])), cache(0))
    np.testing.assert_array_equal(other_BTX, expected_BTX)
    assert head.read(params, unread, None, DEFAULT) is None
    assert np.isfinite(expected_BTX).all()


@pytest.mark.parametrize("name", KINDS)
def test_saved_assistants_load_as_they_were(name, tmp_path):
    draft = random_draft(settings(name)[1])
    xj.save_draft(draft, tmp_path / "assistant")
    again = xj.load_draft(tmp_path / "assistant")
    assert again.head == draft.head
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, draft.params))


def test_errors(tmp_path):
    case, hf = settings("gemma4-shared-kv")
    head = ASSISTANT_FILES.read(hf, {})
    with pytest.raises(InputError, match="drafts for Gemma 4 only, and the model is 'qwen2': use another"):
        head.bound(cases.CASES["qwen2-gqa-tied-old"].config)
    wider = dataclasses.replace(head, target_hidden_size=64)
    with pytest.raises(InputError, match="hidden_size 64, and the model has 48: use the head of this model"):
        wider.bound(case.config)
    text = hf["text_config"] | dict(sliding_window=4)
    with pytest.raises(
        InputError, match="window 4, and the model's keys have 2 heads of width 16 and window 8"
    ):
        ASSISTANT_FILES.read(hf | dict(text_config=text), {}).bound(case.config)
    with pytest.raises(InputError, match="num_centroids 7 must divide vocab_size 96"):
        ASSISTANT_FILES.read(hf | ORDERED | dict(num_centroids=7), {})
    draft = random_draft(hf | ORDERED)
    twice = draft.params | dict(token_ordering=np.zeros(96, np.int32))
    xj.save_draft(dataclasses.replace(draft, params=twice), tmp_path / "assistant")
    with pytest.raises(InputError, match="token_ordering names ids from 0 to 0, or one twice"):
        xj.load_draft(tmp_path / "assistant")
