"""Heads for multi-token prediction in the files of models: names, errors, formats, and drafts by the formula.
`test_mtp_live.py` compares drafts with transformers.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import mtp_cases
import numpy as np
import pytest
import tiny
from draft_cases import DraftCase, expected_accepted
from mtp_cases import DRAFTS, ROWS
from quick import full_except
from safetensors.numpy import load_file, save_file
from scaled_checkpoints import convert, fp8, fp8_settings, integers, published_tensors, w4, write

import xinfer_jax as xj
from xinfer_jax.adapters.peft_modules import norm_modules, peft_modules
from xinfer_jax.checkpoint.new_leaves import new_leaves
from xinfer_jax.draft_heads.draft_head import UnreadTokens
from xinfer_jax.families.draft_heads import mtp_spec
from xinfer_jax.families.writing import to_hf
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3")
DEEPSEEK_STYLE = FAMILIES[:3]
_ATTENTION = {f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
_LATENT = {
    f"self_attn.{name}.weight"
    for name in (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    )
}
_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
_MLP = {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_GROUPED = {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
LAYERS = {  # tensors of the layer in published files, without those of experts
    "deepseek_v3": _LATENT | _NORMS | _GROUPED,
    "glm4_moe_lite": _LATENT | _NORMS | _GROUPED,
    "glm4_moe": _ATTENTION | _NORMS | _GROUPED | {f"self_attn.{x}_proj.bias" for x in "qkv"},
    "qwen3_5": _ATTENTION | _NORMS | _MLP,
    "qwen3_5_moe": _ATTENTION
    | _NORMS
    | {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    | {f"self_attn.{x}_proj.bias" for x in "qkvo"},
    "qwen3_next": _ATTENTION | _NORMS | {"mlp.gate.weight", "mlp.shared_expert_gate.weight"},
    "qwen3": _ATTENTION | _NORMS | _MLP,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns models and their files, each made once."""
    made = {}

    def get(name):
        if name not in made:
            model = mtp_cases.build(name)
            path = tmp_path_factory.mktemp("mtp") / name
            xj.save_model(model.params, model.config, path)
            made[name] = model, path
        return made[name]

    return get


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def settings_of(path):
    return json.loads((path / "config.json").read_text())


def head_tensors(path, name):
    prefix = "model.layers.2." if name in DEEPSEEK_STYLE else "mtp."
    return {key for key in load_file(path / "model.safetensors") if key.startswith(prefix)}


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", full_except(("deepseek_v3", "qwen3_5", "qwen3"), FAMILIES))
def test_published_names_and_a_round_trip(saved, name):
    model, path = saved(name)
    is_last_layer = name in DEEPSEEK_STYLE
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    if not is_last_layer:
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    (prefix, of_layer) = ("model.layers.2.",) * 2 if is_last_layer else ("mtp.", "mtp.layers.0.")
    want = {f"{prefix}{part}.weight" for part in own} | {of_layer + part for part in LAYERS[name]}
    found = head_tensors(path, name)
    experts = {key for key in found if ".experts." in key or ".shared_expert." in key or "_experts." in key}
    assert found - experts == want
    assert bool(experts) == bool(model.config.experts)
    field = "num_nextn_predict_layers" if is_last_layer else "mtp_num_hidden_layers"
    assert settings_of(path)[field] == 1
    again = xj.load_model(path, "float32", draft_head=True)
    assert again.config == model.config and again.load_stats.skipped == ()
    assert_same(again.params, model.params)
    assert again.params["draft_head"]["layers"][0].keys() == again.params["layers"][-1].keys()


@pytest.mark.parametrize("name", full_except(("deepseek_v3", "qwen3_5"), FAMILIES))
def test_without_the_head(saved, tmp_path, name):
    """Nothing is read or written of it."""
    model, path = saved(name)
    plain = xj.load_model(path, "float32")
    assert plain.config == dataclasses.replace(model.config, draft_head=None)
    assert_same(plain.params, {key: x for key, x in model.params.items() if key != "draft_head"})
    pattern = "model.layers.2.*" if name in DEEPSEEK_STYLE else "mtp.*"
    assert plain.load_stats.skipped == (f"{pattern} ({len(head_tensors(path, name))})",)
    xj.save_model(plain.params, plain.config, tmp_path / "out")
    assert not head_tensors(tmp_path / "out", name)
    assert settings_of(tmp_path / "out").get("mtp_num_hidden_layers") is None
    assert not settings_of(tmp_path / "out").get("num_nextn_predict_layers")


@pytest.mark.parametrize("name", full_except(("qwen3_5",), ("qwen3_5", "deepseek_v3")))
def test_tensors_by_name_and_new_weights(saved, name):
    """Trees as tensors and back, and new weights of a directory and of a stream, for an engine's update."""
    model, path = saved(name)
    tensors = xj.params.params_to_tensors(model.params, model.config)
    assert tensors.keys() == load_file(path / "model.safetensors").keys()
    assert_same(xj.params.params_from_tensors(model.config, tensors), model.params)
    paths = {leaf.path for leaf in xj.params.param_names(model.config)}
    for source in (path, tensors.items()):
        leaves = dict(new_leaves(source, model.params, model.config))
        assert leaves.keys() == paths
        np.testing.assert_array_equal(
            leaves["draft_head.proj.weight"], model.params["draft_head"]["proj"]["weight"]
        )
    without = {key: x for key, x in tensors.items() if not key.endswith(("fc.weight", "eh_proj.weight"))}
    with pytest.raises(xj.InputError, match=r"missing (mtp\.fc|model\.layers\.2\.eh_proj)\.weight"):
        xj.params.params_from_tensors(model.config, without)


def test_a_head_in_a_file_of_its_own(saved, tmp_path):
    model, path = saved("qwen3")
    tensors = load_file(path / "model.safetensors")
    own = {key: tensors.pop(key) for key in head_tensors(path, "qwen3")}
    target = tiny.write(tmp_path / "m", settings_of(path), weights=tensors, with_tokenizer=False)
    save_file(own, target / "mtp.safetensors")
    assert_same(xj.load_model(target, "float32", draft_head=True).params, model.params)
    plain = xj.load_model(target, "float32")
    assert plain.config.draft_head is None and plain.load_stats.skipped == ()
    xj.save_model(model.params, model.config, tmp_path / "like", like=target)
    assert load_file(tmp_path / "like" / "model.safetensors").keys() == tensors.keys() | own.keys()


def test_like_a_model_that_sees(saved, tmp_path):
    """With the names of the whole model, and without a head there, the names of published files."""
    model, path = saved("qwen3_5")
    tensors = load_file(path / "model.safetensors")
    whole = {key.replace("model.", "model.language_model.", 1): x for key, x in tensors.items()}
    whole |= {"model.visual.a": np.ones(3, np.float32), "mtp.embed_tokens.weight": np.ones(2, np.float32)}
    text = settings_of(path) | dict(mtp_num_hidden_layers=1)
    hf = dict(model_type="qwen3_5", text_config=text, vision_config={}, tie_word_embeddings=True)
    source = tiny.write(tmp_path / "whole", hf, weights=whole, with_tokenizer=False)
    loaded = xj.load_model(source, "float32", draft_head=True)
    assert loaded.load_stats.skipped == ("model.visual.* (1)", "mtp.embed_tokens.* (1)")
    assert_same(loaded.params, model.params)
    xj.save_model(loaded.params, loaded.config, tmp_path / "again", like=source)
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), whole)
    without = {key: x for key, x in whole.items() if not key.startswith("mtp.")}
    del text["mtp_num_hidden_layers"]
    bare = tiny.write(tmp_path / "bare", hf, weights=without, with_tokenizer=False)
    xj.save_model(loaded.params, loaded.config, tmp_path / "added", like=bare)
    del whole["mtp.embed_tokens.weight"]
    assert_same(load_file(tmp_path / "added" / "model.safetensors"), whole)
    assert settings_of(tmp_path / "added")["text_config"]["mtp_num_hidden_layers"] == 1


FORMATS = {"fp8": (fp8_settings([24, 40]), fp8((24, 40))), "w4a16": (w4(16), integers(4, 16))}


@pytest.mark.parametrize("stored_as", full_except(("fp8",), FORMATS))
def test_quantized_files(tmp_path, stored_as):
    """The matrices of the head's layer are quantized as the model's, and copies are left out."""
    hf = mtp_cases.hf_of("deepseek_v3")
    (settings, encode) = FORMATS[stored_as]
    tensors = published_tensors(hf)
    last = {key: x for key, x in tensors.items() if key.startswith("model.layers.1.")}
    head = {key.replace("layers.1.", "layers.2."): 0.5 * x for key, x in last.items()}
    own = ("enorm", "hnorm", "shared_head.norm")
    head |= {f"model.layers.2.{part}.weight": np.ones(hf["hidden_size"], np.float32) for part in own}
    stored, equal = convert(tensors | head, encode)
    proj = np.random.RandomState(0).standard_normal((hf["hidden_size"], 2 * hf["hidden_size"]))
    floats = {"model.layers.2.eh_proj.weight": proj.astype(np.float32)}
    copies = {
        f"model.layers.2.{part}.weight": np.ones(2, np.float32)
        for part in ("embed_tokens", "shared_head.head")
    }
    path = write(tmp_path / "a", hf | dict(quantization_config=settings), stored | floats | copies)
    model = xj.load_model(path, "float32", draft_head=True, dequantize=True)
    assert model.load_stats.skipped == ("model.layers.2.* (2)",)
    wanted = xj.params.params_from_tensors(model.config, equal | floats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), model.params, wanted)
    kept = xj.load_model(path, "float32", "fp8" if stored_as == "fp8" else None, draft_head=True)
    assert is_quantized(kept.params["draft_head"]["layers"][0]["o"]["weight"])
    to_save = model if stored_as == "fp8" else kept  # these blocks of FP8 have leaves, and are not written
    xj.save_model(to_save.params, to_save.config, tmp_path / "b", like=path)
    again = xj.load_model(tmp_path / "b", "float32", draft_head=True, dequantize=to_save is kept)
    assert_same(again.params, model.params)


def test_quantized_while_it_is_loaded(saved, tmp_path):
    model, path = saved("qwen3")
    small = xj.load_model(path, "float32", "int8", draft_head=True)
    head = small.params["draft_head"]
    assert is_quantized(head["proj"]["weight"]) and is_quantized(head["layers"][0]["q"]["weight"])
    xj.save_model(small.params, small.config, tmp_path / "b")
    assert_same(xj.load_model(tmp_path / "b", "float32", draft_head=True).params, small.params)
    assert is_quantized(
        xj.load_model(path, quantize="int4", draft_head=True).params["draft_head"]["proj"]["weight"]
    )


@pytest.mark.full
def test_drafts_of_a_quantized_model(saved):
    model, path = saved("qwen3")
    small = xj.load_model(path, "float32", "int8", draft_head=True)
    unread = mtp_cases.read_prompts(model)
    (found, want) = (mtp_cases.draft(x, unread, 1).logits_BTV for x in (small, model))
    assert np.abs(found - want).max() < 0.1 * np.abs(want).max()


def test_over_a_mesh_of_one_device_and_adapters(saved):
    model, path = saved("qwen3")
    mesh = jax.make_mesh((1,), ("model",))
    over = xj.load_model(path, "float32", mesh=mesh, draft_head=True)
    assert_same(over.params, model.params)
    shardings = xj.params.shardings(model.config, mesh)
    assert shardings["draft_head"]["layers"][0]["q"]["weight"].spec[0] == "model"
    modules = [*peft_modules(model.config), *norm_modules(model.config)]
    assert modules and not any("mtp" in module for module in modules)


# --- errors -------------------------------------------------------------------------------------------------

REMEDY = "load the model without draft_head"


@pytest.mark.parametrize(
    "name, changed, tensor, fault",
    [
        ("qwen3", {}, None, "the files have no draft head, which has the tensor mtp.fc.weight"),
        ("glm4_moe", {}, None, "the files have no draft head, which has the tensor model.layers.2.eh_proj"),
        ("qwen3", dict(mtp_num_hidden_layers=2), "mtp.fc.weight", "mtp_num_hidden_layers 2"),
        ("qwen3", {}, "mtp.layers.1.mlp.up_proj.weight", "a draft head with several layers"),
        ("glm4_moe", dict(num_nextn_predict_layers=3), None, "num_nextn_predict_layers 3"),
        ("qwen3", dict(mtp_use_dedicated_embeddings=True), "mtp.fc.weight", "mtp_use_dedicated_embeddings"),
        ("qwen3", {}, "model.mtp_layers.0.input_proj.weight", "the tensor model.mtp_layers.0.input_proj"),
        ("qwen3", {}, "model.mtp_block.0.mlp.up_proj.weight", "the tensor model.mtp_block.0.mlp.up_proj"),
    ],
)
def test_heads_that_are_not_read(tmp_path, name, changed, tensor, fault):
    hf = mtp_cases.hf_of(name) | changed
    weights = {"model.norm.weight": np.ones(3, np.float32)}
    weights |= {tensor: np.ones(3, np.float32)} if tensor else {}
    path = tiny.write(tmp_path / "m", hf, weights=weights, with_tokenizer=False)
    with pytest.raises(xj.InputError) as error:
        xj.load_model(path, draft_head=True)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and message.endswith(REMEDY) and fault in message


def test_a_head_that_lacks_a_tensor(saved, tmp_path):
    _, path = saved("qwen3")
    tensors = load_file(path / "model.safetensors")
    del tensors["mtp.norm.weight"]
    target = tiny.write(tmp_path / "m", settings_of(path), weights=tensors, with_tokenizer=False)
    with pytest.raises(xj.InputError, match="missing mtp.norm.weight"):
        xj.load_model(target, draft_head=True)


def test_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(xj.InputError, match=f"draft heads of GGUF files are not supported: {REMEDY}"):
        xj.load_model(path, draft_head=True)


def test_models_without_a_place_for_a_head():
    config = mtp_cases.build("qwen3_5").config
    linear = dataclasses.replace(config, num_hidden_layers=1)
    with pytest.raises(xj.InputError, match=f"no layer with attention, which its draft head needs: {REMEDY}"):
        mtp_spec(linear)
    other = dataclasses.replace(config.draft_head, layer=linear.layers[0])
    with pytest.raises(xj.InputError, match="has no place for its draft_head"):
        to_hf(dataclasses.replace(config, draft_head=other))


# --- drafts -------------------------------------------------------------------------------------------------


def test_drafts_by_the_formula(saved):
    """The published formula in NumPy, for a layer of Qwen3, without a cache."""
    model, _ = saved("qwen3")
    unread = mtp_cases.read_prompts(model)
    found = mtp_cases.draft(model, unread)
    for row, ids in enumerate(ROWS):
        states_TD = np.asarray(unread.features_BTX)[row, 1 : len(ids)]  # of tokens 0 to the last but one
        tokens = list(ids[1:])
        for i in range(DRAFTS):
            own_D = states_by_formula(model, tokens, states_TD)[-1]
            logits_V = np.asarray(model.params["lm_head"]["weight"]) @ own_D
            np.testing.assert_allclose(found.logits_BTV[row, i], logits_V, rtol=0, atol=1e-4)
            tokens.append(int(found.tokens_BT[row, i]))
            states_TD = np.concatenate([states_TD, own_D[None]])


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def states_by_formula(model, tokens, states_TD):
    """The head's states of tokens 1, 2, … and the states of the tokens before them."""
    config = model.config
    head = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params["draft_head"])
    embed = np.asarray(model.params["embed"]["weight"], np.float64)
    norm = lambda x, w: rms(x, w, config.rms_norm_eps)  # noqa: E731
    joined = [norm(embed[tokens], head["embed_norm"]), norm(states_TD, head["hidden_norm"])]
    x = np.concatenate(joined, -1) @ head["proj"]["weight"].T
    layer = head["layers"][0]
    (T, H) = (len(tokens), config.head_dim)
    inputs = norm(x, layer["attn_norm"])
    q, k, v = ((inputs @ layer[name]["weight"].T).reshape(T, -1, H) for name in "qkv")
    angles = np.arange(1, T + 1)[:, None] / config.rope.rope_theta ** (np.arange(0, H, 2) / H)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotate(norm(q, layer["q_norm"])), rotate(norm(k, layer["k_norm"]))
    k, v = (np.repeat(x, config.num_attention_heads // config.num_key_value_heads, 1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
    scores = np.where(np.tril(np.ones((T, T))), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("nts,snh->tnh", weights, v).reshape(T, -1) @ layer["o"]["weight"].T
    inputs = norm(x, layer["mlp_norm"])
    gate = inputs @ layer["gate"]["weight"].T
    up = inputs @ layer["up"]["weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]["weight"].T
    return norm(x, head["final_norm"])


@pytest.mark.full
def test_a_prompt_that_is_read_in_parts(saved):
    """Reading a prompt in two parts, then drafting, is drafting after all of it."""
    model, _ = saved("qwen3")
    unread = mtp_cases.read_prompts(model)
    want = mtp_cases.draft(model, unread, 1)
    tokens_BT, features_BTX, num_tokens_B = unread
    first = UnreadTokens(tokens_BT[:, :5], features_BTX[:, :5], jnp.array([5, 5]))
    rest = UnreadTokens(tokens_BT[:, 5:], features_BTX[:, 5:], num_tokens_B - 5)
    found = mtp_cases.draft(model, rest, 1, read_before=first)
    np.testing.assert_allclose(found.logits_BTV, want.logits_BTV, rtol=0, atol=1e-5)


GOOD_HEADS = dict(qwen3=0.3, qwen3_next=0.2, deepseek_v3=0.1)  # factors by which a part is accepted


@pytest.mark.parametrize("name", full_except((), GOOD_HEADS, soak=GOOD_HEADS))
def test_generation_accepts_the_drafts_of_the_head(saved, tmp_path, name):
    """Tokens are those of the model alone. Each pass accepts as many drafts as a head whose cache is new, so
    its cache has no entry of a rejected draft.
    """
    model = mtp_cases.with_a_good_head(saved(name)[0], GOOD_HEADS[name])
    xj.save_model(model.params, model.config, tmp_path / "m")
    model = xj.load_model(tmp_path / "m", "float32", draft_head=True)
    ids = list(ROWS[0])
    options = xj.GenerateOptions(max_tokens=24, eos_token_ids=())
    want = list(xj.generate(model.params, model.config, [ids], options).tokens[0])
    drafting = dataclasses.replace(options, draft="mtp", draft_tokens=DRAFTS)
    found = xj.generate(model.params, model.config, [ids], drafting)
    assert list(found.tokens[0]) == want
    accepted = expected_accepted(DraftCase(model, "mtp"), ids, want, DRAFTS)
    print(f"{name}: accepted {accepted} of 24 tokens")
    assert accepted[0] > 3 and accepted[1] and sum(accepted) < 16 and found.stats.accepted == [accepted]
