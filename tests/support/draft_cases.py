"""A small model for each kind of draft head, with random parameters and a small vocabulary, so that some
of the draft tokens are right by chance.
"""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
from small_models import build

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import init_cache
from xinfer_jax.config.run_config import PLAIN
from xinfer_jax.draft_heads.draft_head import DraftCall, DraftHead, HeadParams, UnreadTokens
from xinfer_jax.families.dflash_files import DFLASH_FILES
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.families.eagle3_files import EAGLE3_FILES
from xinfer_jax.families.gemma4_assistant_files import ASSISTANT_FILES
from xinfer_jax.generation.head_prefill import bound_head
from xinfer_jax.weights.param_specs import param_specs

V = 24  # tokens
_DENSE = dict(vocab_size=V, num_hidden_layers=3)
_HEAD = dict(
    model_type="qwen3", vocab_size=V, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, block_size=6,
    rms_norm_eps=1e-5, mask_token_id=V - 1, target_layer_ids=[0, 2], dflash_config=dict(),
)  # fmt: skip
_WINDOW = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=9)
_EAGLE3 = dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", vocab_size=V, draft_vocab_size=V,
    hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, max_position_embeddings=4096, eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
)  # fmt: skip
MTP = ("mtp", "mtp-latent", "mtp-hybrid")
HEADS = (*MTP, "dflash", "dspark", "eagle3", "gemma4")


class DraftCase(NamedTuple):
    """A model, and what its calls get for `draft`."""

    model: xj.Model
    draft: Any


def random_params(specs: Any, seed: int = 0) -> Any:
    """Returns random parameters, among which norms differ from 1."""
    draws = np.random.RandomState(seed)

    def leaf(spec):
        if spec.dtype == "int32":
            return jnp.zeros(spec.shape, jnp.int32)
        noise = draws.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            return jnp.asarray(1 + 0.3 * noise, jnp.float32)
        return jnp.asarray(1.5 * noise / np.sqrt(spec.shape[-1]), jnp.float32)

    return jax.tree.map(leaf, specs, is_leaf=lambda x: hasattr(x, "axes"))


@functools.cache
def draft_case(name: str) -> DraftCase:
    """Returns the case of a kind of head."""
    if name in MTP:
        return DraftCase(_mtp_model(name), "mtp")
    if name == "gemma4":
        return _gemma4()
    params, config = build("qwen2", **_DENSE)
    if name == "eagle3":
        head = EAGLE3_FILES.read(_EAGLE3, {"lm_head.weight": None})
    else:
        kind = dict(dflash=dict(architectures=["DFlashDraftModel"]) | _WINDOW)
        hf = _HEAD | kind.get(name, dict(architectures=["Qwen3DSparkModel"], markov_rank=8))
        hf["dflash_config"] = {key: hf[key] for key in ("mask_token_id", "target_layer_ids")}
        head = DFLASH_FILES.read(hf, {})
    return DraftCase(xj.Model(params, config), xj.Draft(random_params(head.param_specs()), head))


def _mtp_model(name: str) -> xj.Model:
    case = {"mtp-latent": "deepseek-v3-yarn-groups", "mtp-hybrid": "qwen3-5-tied"}.get(name)
    if case is None:
        params, config = build("qwen2", **_DENSE)
    else:
        hf = copy.deepcopy(parity_cases.CASES[case].hf)
        hybrid = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
        config = xj.ModelConfig.from_hf(hf | (hybrid if name == "mtp-hybrid" else {}))
        params = parity_cases.params_from(config, parity_cases.random_tensors(config, 3))
    config = dataclasses.replace(config, draft_head=mtp_spec(config))
    specs = param_specs(config)["draft_head"]
    return xj.Model(params | dict(draft_head=random_params(specs)), config)


def _gemma4() -> DraftCase:
    case = parity_cases.CASES["gemma4-shared-kv"]
    names = (
        "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim",
        "sliding_window", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    text = {name: case.hf[name] for name in names}
    text |= dict(
        model_type="gemma4_text", hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=3,
        enable_moe_block=False, use_double_wide_mlp=False,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    hf = dict(
        architectures=["Gemma4AssistantForCausalLM"], model_type="gemma4_assistant",
        backbone_hidden_size=case.config.hidden_size, text_config=text, tie_word_embeddings=True,
    )  # fmt: skip
    head = ASSISTANT_FILES.read(hf, {})
    params = parity_cases.params_from(case.config, parity_cases.random_tensors(case.config, 3))
    model = xj.Model(params, case.config)
    return DraftCase(model, xj.Draft(random_params(head.param_specs()), head))


def prompts(count: int, vocab_size: int, longest: int = 90, seed: int = 0) -> list[list[int]]:
    """Returns random prompts, of which every third begins like one before, over a page or more."""
    draws = np.random.RandomState(seed)
    common = draws.randint(0, vocab_size, 70).tolist()
    made = []
    for i in range(count):
        ids = draws.randint(0, vocab_size, draws.randint(1, longest)).tolist()
        made.append(common + ids[:20] if i % 3 == 2 else ids)
    return made


def expected_accepted(case: DraftCase, prompt: list[int], tokens: list[int], count: int) -> list[int]:
    """Returns how often the draft at each place of a step is accepted in greedy decoding: each step drafts
    anew, from an empty cache of the head, after the certain tokens. tokens: the answer.
    """
    model = case.model
    head, own = bound_head(case.draft, model.params, model.config, count)
    params = HeadParams(own, model.params)
    row = prompt + tokens
    accepted = [0] * count
    length = len(prompt) + 1
    limit = len(row)
    while length < limit:
        draft = _drafts(head, params, row[:length], count)
        real = row[length : length + count]
        same = [a == b for a, b in zip(draft, real, strict=False)]
        # The token after the last accepted one is the model's own, and the answer may end before it.
        right = min((same + [False]).index(False), limit - length - 1)
        for place in range(right):
            accepted[place] += 1
        length += right + 1
    return accepted


_SIZE = 192


def _drafts(head: DraftHead, params: HeadParams, row: list[int], count: int) -> list[int]:
    tokens_1T = np.zeros((1, _SIZE), np.int32)
    tokens_1T[0, : len(row)] = row
    return np.asarray(_draft_row(head, params, tokens_1T, np.array([len(row)], np.int32), count))[0].tolist()


@functools.partial(jax.jit, static_argnums=(0, 4))
def _draft_row(head, params, tokens_1T, length_1, count):
    taps = {layer: xj.Tap(read=True) for layer in head.taps} or None
    cache = init_cache(head.target, 1, _SIZE, "float32")
    out = xj.run_model(params.target, head.target, tokens_1T, cache, length_1 - 1, taps=taps)
    features_1TX = head.features(params, out.hidden, tuple(out.reads[layer] for layer in head.taps))
    features_1TX = jnp.pad(features_1TX, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    own = init_cache(head.config, 1, _SIZE, "float32") if head.has_cache else None
    call = DraftCall(
        UnreadTokens(tokens_1T, features_1TX, length_1),
        own,
        out.cache,
        0,
        lambda logits_BV, context: (jnp.argmax(logits_BV, -1).astype(jnp.int32), context),
        PLAIN,
    )
    return head.draft(params, call, count)[0]
