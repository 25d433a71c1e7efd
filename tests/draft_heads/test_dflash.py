"""DFlash and DSpark heads: files, drafts against NumPy and transformers, and kinds of caches."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import small_models
from draft_oracles import features_before, paged_cache, run_rounds
from quick import full_except
from safetensors.numpy import load_file, save_file

import xinfer_jax as xj
from xinfer_jax import InputError
from xinfer_jax.cache.ring import Ring
from xinfer_jax.checkpoint.draft_loading import is_draft
from xinfer_jax.draft_heads.draft import bind_draft
from xinfer_jax.draft_heads.draft_head import HeadParams
from xinfer_jax.families.dflash_files import DFLASH_FILES

pytestmark = pytest.mark.oldest

SIZES = dict(
    model_type="qwen3", vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, block_size=5,
    rope_theta=1e4, rms_norm_eps=1e-5,
)  # fmt: skip
PLACES = dict(mask_token_id=119, target_layer_ids=[0, 2])
DFLASH = SIZES | dict(architectures=["DFlashDraftModel"], dflash_config=PLACES)
DSPARK = SIZES | PLACES | dict(architectures=["Qwen3DSparkModel"], markov_rank=8)
WINDOW = dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=True, sliding_window=6)
CUT = 40  # tokens of a cut vocabulary
LENGTHS = np.array([[9, 14], [10, 17], [14, 17], [15, 19]])  # certain tokens of two rows in four rounds
CASES = {
    "dflash": (DFLASH, ()),
    "dflash-causal-windows": (DFLASH | WINDOW, ()),
    "dflash-windows-on-both-sides": (DFLASH | WINDOW | dict(is_causal=False), ()),
    "dspark": (DSPARK | dict(final_logit_softcapping=20.0), ()),
    "dspark-own-cut-vocabulary": (DSPARK, ("embed_tokens.weight", "lm_head.weight", "d2t")),
}


class Shape:
    shape = (CUT,)


def make_draft(hf, tensors=(), seed=0):
    head = DFLASH_FILES.read(hf, dict.fromkeys(tensors, Shape))
    draws = np.random.RandomState(seed)

    def leaf(spec):
        if spec.dtype == "int32":
            return np.sort(draws.permutation(hf["vocab_size"])[:CUT]).astype(np.int32) - np.arange(
                CUT, dtype="i4"
            )
        if spec.init == "norm":
            return 1 + 0.3 * draws.standard_normal(spec.shape).astype(np.float32)
        return (1.5 * draws.standard_normal(spec.shape) / np.sqrt(spec.shape[-1])).astype(np.float32)

    return xj.Draft(jax.tree.map(leaf, head.param_specs()), head)


@pytest.fixture(scope="module")
def target():
    return small_models.build("qwen2", num_hidden_layers=4)


def bound(draft, target):
    params, config = target
    head, own = bind_draft(draft, params, config)
    return head, HeadParams(own, params)


# --- drafts -------------------------------------------------------------------------------------------------


def rms(x, weight, eps=1e-5):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


def rope(x_TKH, position_T, theta=1e4):
    half = x_TKH.shape[-1] // 2
    angle = position_T[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x_TKH[..., :half], x_TKH[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def reference_states(head, own, context_TD, x_TD):
    """Returns the normed outputs of a block, in NumPy. The context is of the tokens before it."""
    config = head.config
    n = len(context_TD)
    position = np.arange(n + len(x_TD))
    for spec, layer in zip(config.layers, own["layers"], strict=True):
        weight = {name: x["weight"] if isinstance(x, dict) else x for name, x in layer.items()}
        normed_TD = rms(x_TD, weight["attn_norm"])
        both_SD = np.concatenate([context_TD, normed_TD])
        q = (normed_TD @ weight["q"].T).reshape(len(x_TD), -1, config.head_dim)
        k, v = ((both_SD @ weight[name].T).reshape(len(both_SD), -1, config.head_dim) for name in "kv")
        q, k = rope(rms(q, weight["q_norm"]), position[n:]), rope(rms(k, weight["k_norm"]), position)
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
        distance = position[n:, None] - position
        window = spec.attention.window
        causal = window is not None if head.is_causal is None else head.is_causal
        visible = (distance >= 0) | (not causal)
        visible &= True if window is None else distance < window
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
        x_TD = x_TD + out.reshape(len(x_TD), -1) @ weight["o"].T
        normed_TD = rms(x_TD, weight["mlp_norm"])
        gate = normed_TD @ weight["gate"].T
        x_TD = x_TD + gate / (1 + np.exp(-gate)) * (normed_TD @ weight["up"].T) @ weight["down"].T
    return rms(x_TD, own["final_norm"])


def reference_draft(head, params, context_TD, last, count):
    """Returns the greedy draft tokens and their logits over the target's vocabulary, in NumPy."""
    own, of_target = (jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in params)
    embed = (own if head.has_embed else of_target)["embed"]["weight"]
    lm_head = own["lm_head"]["weight"] if head.has_lm_head else of_target["embed"]["weight"]  # it is tied
    masks = [head.mask_token_id] * (count - 1 if head.samples_anchor else count)
    states_TD = reference_states(head, own, context_TD, embed[[last, *masks]])[-count:]
    tokens, logits, before = [], [], last
    for state_D in states_TD:
        logits_V = lm_head @ state_D
        if cap := head.final_logit_softcapping:
            logits_V = cap * np.tanh(logits_V / cap)
        if head.markov_rank:
            logits_V = logits_V + own["markov_out"]["weight"] @ own["markov_in"]["weight"][before]
        if "d2t" in own:
            wide_V = np.full(head.config.vocab_size, -1e30)
            wide_V[np.arange(CUT) + own["d2t"].astype(int)] = logits_V
            logits_V = wide_V
        before = int(logits_V.argmax())
        tokens.append(before)
        logits.append(logits_V)
    return tokens, np.array(logits)


def empty_cache(head, kind):
    if kind == "paged":
        return paged_cache(head.config, 2, 1)
    capacity = 1024 if kind == "ring" else LENGTHS.max()
    cache = xj.init_cache(head.config, 2, capacity, "float32")
    assert isinstance(cache.layers[0], Ring) == (kind == "ring")
    return cache


@pytest.mark.parametrize(
    "name, kind",
    full_except(
        [("dflash-causal-windows", "paged"), ("dspark-own-cut-vocabulary", "contiguous")],
        [(name, kind) for name in CASES for kind in ("contiguous", "paged")]
        + [("dflash-causal-windows", "ring"), ("dflash-windows-on-both-sides", "ring")],
    ),
)
def test_drafts_are_those_of_the_reference(name, kind, target):
    head, params = bound(make_draft(*CASES[name]), target)
    tokens_BT = np.random.RandomState(1).randint(0, 119, (2, LENGTHS.max()))
    count = head.max_draft_tokens
    got = run_rounds(head, params, tokens_BT, LENGTHS, count, empty_cache(head, kind))
    before_BTX = features_before(head, params, tokens_BT)
    for r, lengths_B in enumerate(LENGTHS):
        for b, n in enumerate(lengths_B):
            if r and n == LENGTHS[r - 1, b]:  # a row without unread tokens
                continue
            context_TD = before_BTX[b, 1:n]
            tokens, logits = reference_draft(head, params, context_TD, tokens_BT[b, n - 1], count)
            assert got.drafts[r, b].tolist() == tokens
            np.testing.assert_allclose(got.logits[r, b], logits, rtol=1e-5, atol=1e-4)


@pytest.mark.full
def test_a_shorter_block_has_fewer_masks(target):
    head, params = bound(make_draft(DFLASH), target)
    tokens_BT = np.random.RandomState(1).randint(0, 119, (1, 9))
    cache = xj.init_cache(head.config, 1, 16, "float32")
    got = run_rounds(head, params, tokens_BT, np.array([[9]]), 2, cache)
    context_TD = features_before(head, params, tokens_BT)[0, 1:]
    assert got.drafts[0, 0].tolist() == reference_draft(head, params, context_TD, tokens_BT[0, -1], 2)[0]


@pytest.mark.full
@pytest.mark.parametrize("name", ["dflash", "dflash-windows-on-both-sides"])
def test_drafts_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.cache_utils import DFlashCache

    transformers.logging.set_verbosity_error()
    draft = make_draft(*CASES[name])
    torch.manual_seed(0)
    sizes = {key: x for key, x in SIZES.items() if key not in ("model_type", "block_size", "rope_theta")}
    config = transformers.Qwen3Config(**sizes | dict(num_hidden_layers=4, initializer_range=0.3))
    of_torch = transformers.Qwen3ForCausalLM(config).eval()
    of_torch.save_pretrained(tmp_path / "target")
    model = xj.load_model(tmp_path / "target")
    xj.save_draft(draft, tmp_path / "head")
    assistant = dict(sizes, **PLACES, block_size=5, rope_parameters=dict(rope_type="default", rope_theta=1e4))
    # There a window has one token more on each side.
    types = CASES[name][0].get("layer_types") or ["full_attention"] * 2
    assistant |= dict(layer_types=types, sliding_window=WINDOW["sliding_window"] - 1)
    del assistant["vocab_size"]
    other = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(**assistant)
    ).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = load_file(tmp_path / "head/model.safetensors")
    other.load_state_dict({names.get(key, key): torch.from_numpy(x) for key, x in tensors.items()})

    lengths = LENGTHS[:, :1]
    tokens_BT = np.random.RandomState(1).randint(0, 119, (1, lengths.max()))
    head, params = bound(draft, (model.params, model.config))
    cache = xj.init_cache(head.config, 1, 16, "float32")
    got = run_rounds(head, params, tokens_BT, lengths, 4, cache)
    their_cache = DFlashCache(config=other.config)
    their_cache.activate_past_recording()
    with torch.no_grad():
        states = of_torch(torch.from_numpy(tokens_BT), output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1] for layer in PLACES["target_layer_ids"]], -1)
        start = 0
        for r, (n,) in enumerate(lengths):
            their_cache.set_previous_accepted_tokens(int(n - 1 - start))
            if r:
                their_cache.crop(-5)
            block = torch.tensor([[tokens_BT[0, n - 1], *[PLACES["mask_token_id"]] * 4]])
            out = other(
                noise_embeds=of_torch.get_input_embeddings()(block),
                context_hidden_states=taps[:, start : n - 1],
                position_ids=torch.arange(start, n + 4)[None],
                cache=their_cache,
            )
            logits = of_torch.lm_head(out.last_hidden_state[:, 1:])[0].numpy()
            np.testing.assert_allclose(got.logits[r, 0], logits, rtol=0, atol=1e-4)
            assert got.drafts[r, 0].tolist() == logits.argmax(-1).tolist()
            start = n - 1


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_saved_heads_load_as_they_were(name, tmp_path):
    draft = make_draft(*CASES[name])
    xj.save_draft(draft, tmp_path / "head")
    again = xj.load_draft(tmp_path / "head")
    assert again.head == draft.head and is_draft(tmp_path / "head")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, draft.params))
    narrow = xj.load_draft(tmp_path / "head", dtype="bfloat16").params
    assert narrow["final_norm"].dtype == "bfloat16"
    if "d2t" in narrow:
        assert narrow["d2t"].dtype == "int32"


def change_files(path, settings=None, tensors=None):
    """Changes config.json and tensors of a directory. A value of None removes one."""
    for file, read, write, changes in (
        (
            path / "config.json",
            lambda f: json.loads(f.read_text()),
            lambda x, f: f.write_text(json.dumps(x)),
            settings,
        ),
        (path / "model.safetensors", load_file, save_file, tensors),
    ):
        if changes:
            changed = read(file) | changes
            write({name: x for name, x in changed.items() if x is not None}, file)


def test_other_forms_of_published_files(tmp_path):
    draft = make_draft(DSPARK)
    xj.save_draft(draft, tmp_path / "head")
    tensors = load_file(tmp_path / "head/model.safetensors")
    renamed = {f"model.{name}": x for name, x in tensors.items()} | dict.fromkeys(tensors)
    extra = {"confidence_head.proj.weight": np.ones((1, 56), np.float32), "t2d": np.ones(120, bool)}
    change_files(tmp_path / "head", tensors=renamed | extra)
    assert xj.load_draft(tmp_path / "head").head == draft.head
    noise = dict(partial_rotary_factor=0.25, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.25))
    change_files(tmp_path / "head", DSPARK | noise | dict(sample_from_anchor=None, dflash_config=None))
    assert xj.load_draft(tmp_path / "head").head == draft.head
    speculators = dict(
        architectures=["DSparkDraftModel"], transformer_layer_config=SIZES, block_size=5, mask_token_id=119,
        aux_hidden_state_layer_ids=[1, 3], markov_rank=8, target_layer_ids=None, model_type=None,
    )  # fmt: skip
    change_files(tmp_path / "head", speculators)
    assert xj.load_draft(tmp_path / "head").head == draft.head


MISFITS = [
    (
        dict(architectures=["LlamaModel"]),
        None,
        "holds no draft head: architectures is ['LlamaModel']: use",
    ),
    (dict(markov_rank=8, sample_from_anchor=None), None, "set sample_from_anchor to true if it is"),
    (dict(markov_head_type="gated"), None, "markov_head_type 'gated' is not supported: only vanilla is"),
    (dict(dflash_config=dict(target_layer_ids=[])), None, "target_layer_ids must list layers of the target"),
    (dict(quantization_config=dict(quant_method="fp8")), None, "is a quantized draft head"),
    (None, {"fc.weight": None}, "missing fc.weight [48, 96]"),
    (None, {"other.weight": np.ones(2)}, "unexpected other.weight"),
    (None, {"norm.weight": np.ones(2, "f4")}, "norm.weight has shape [2], the config asks for [48]"),
    (None, {"norm.weight": np.ones(48, "i4")}, "norm.weight has type I32, only BF16, F16, F32 are"),
    (None, {"d2t": np.full(120, 1), "lm_head.weight": np.ones((120, 48), "f4")}, "d2t names ids from 1 to"),
    (None, {"d2t": np.zeros(40, "i8")}, "the draft head has d2t for fewer tokens, and no lm_head for them"),
]


@pytest.mark.parametrize("settings, tensors, message", MISFITS)
def test_files_that_do_not_fit(settings, tensors, message, tmp_path):
    xj.save_draft(make_draft(DFLASH), tmp_path / "head")
    change_files(tmp_path / "head", settings, tensors)
    with pytest.raises(InputError) as raised:
        xj.load_draft(tmp_path / "head")
    assert message in str(raised.value)


def test_directories_that_are_no_heads(good):
    assert not is_draft(good)
    with pytest.raises(InputError, match="holds no draft head"):
        xj.load_draft(good)
    with pytest.raises(InputError, match="a draft head must be a directory or a hub name, got None"):
        xj.load_draft(None)
    with pytest.raises(InputError, match="draft must be a Draft, as load_draft returns"):
        xj.save_draft({}, good)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(hidden_size=64),
            "the draft head has hidden_size 48, and the model 64: use the head of this model",
        ),
        (
            dict(vocab_size=128),
            "the draft head has vocab_size 120, and the model 128: use the head of this model",
        ),
        (dict(num_hidden_layers=2), "reads layer 2, counted from 0, and the model has 2 layers"),
    ],
)
def test_models_of_another_head(changes, message):
    config = xj.ModelConfig.from_hf(small_models.QWEN | dict(num_hidden_layers=4) | changes)
    with pytest.raises(InputError, match=message):
        make_draft(DFLASH).head.bound(config)
    head = dataclasses.replace(make_draft(DFLASH).head, mask_token_id=120)
    with pytest.raises(InputError, match="mask_token_id 120 of the draft head is not below"):
        head.bound(xj.ModelConfig.from_hf(small_models.QWEN | dict(num_hidden_layers=4)))
