"""Files of EAGLE-3 heads: the published forms of config.json, names of tensors, and errors."""

import json

import jax
import numpy as np
import pytest
from eagle3_cases import D_TARGET, HEADS, LAYER, TARGET, C, D, V, random_params
from safetensors.numpy import save_file

import xinfer_jax as xj
from xinfer_jax.checkpoint.draft_loading import is_draft
from xinfer_jax.errors import InputError
from xinfer_jax.families.eagle3_files import EAGLE3_FILES

IDS = "eagle_aux_hidden_state_layer_ids"
FLAT = LAYER | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=C, target_hidden_size=D_TARGET)
SPECULATORS = dict(
    architectures=["Eagle3Speculator"],
    speculators_model_type="eagle3",
    draft_vocab_size=C,
    target_hidden_size=D_TARGET,
    transformer_layer_config=LAYER,
    norm_before_fc=True,
)


def write(path, hf, prefix, **changes):
    """Writes a head with published names, and returns its tensors. changes: tensors; None leaves one out."""
    draws = np.random.RandomState(0)
    (n, k), f = (48, 24), 48
    shapes = {
        f"{prefix}self_attn.{x}_proj.weight": (rows, 2 * D) for x, rows in (("q", n), ("k", k), ("v", k))
    }
    shapes |= {f"{prefix}self_attn.o_proj.weight": (D, n), f"{prefix}mlp.down_proj.weight": (D, f)}
    shapes |= {f"{prefix}mlp.{x}_proj.weight": (f, D) for x in ("gate", "up")}
    norms = ("input_layernorm", "post_attention_layernorm", "hidden_norm")
    shapes |= {f"{prefix}{name}.weight": (D,) for name in norms}
    shapes |= {"fc.weight": (D, 3 * D_TARGET), "norm.weight": (D,), "lm_head.weight": (C, D)}
    tensors = {name: draws.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    known = np.sort(draws.permutation(V)[:C])
    tensors |= {"d2t": known - np.arange(C), "t2d": np.isin(np.arange(V), known)}
    tensors = {name: x for name, x in (tensors | changes).items() if x is not None}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, path / "model.safetensors")
    return tensors


def test_files_of_sglang_load(tmp_path):
    path = tmp_path / "head"
    table = np.ones((V, D), np.float32)
    tensors = write(
        path, FLAT | dict(eagle_config={IDS: [1, 3, 5]}), "midlayer.", **{"embed_tokens.weight": table}
    )
    draft = xj.load_draft(path)
    assert is_draft(path) and draft.head.bound(TARGET).taps == (1, 3, 5)
    assert draft.head.has_embed and draft.head.has_offsets and not draft.head.norm_before_residual
    layer = draft.params["layers"][0]
    for leaf, name in dict(hidden_norm="hidden_norm", attn_norm="input_layernorm").items():
        np.testing.assert_array_equal(layer[leaf], tensors[f"midlayer.{name}.weight"])
    np.testing.assert_array_equal(layer["q"]["weight"], tensors["midlayer.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(draft.params["d2t"], tensors["d2t"])
    assert draft.params["d2t"].dtype == "int32"
    half = xj.load_draft(path, "bfloat16").params
    assert half["d2t"].dtype == "int32" and half["fc"]["weight"].dtype == "bfloat16"


def test_files_of_speculators_load(tmp_path):
    norm = np.full(3 * D_TARGET, 2, np.float32)
    write(tmp_path / "head", SPECULATORS | {IDS: [0, 4, 8]}, "layers.0.", **{"input_norm.weight": norm})
    draft = xj.load_draft(tmp_path / "head")
    head = draft.head
    assert head.layer_ids == (-1, 3, 7) and head.norm_before_residual and head.feature_norm == "joint"
    assert not head.has_embed and draft.params["feature_norm"][0] == 2
    with pytest.raises(InputError, match=f"hidden_size {D}, and the model has {D_TARGET}"):
        head.bound(TARGET)  # it has no embeddings, and those of the target are wider


def test_settings_that_speculators_leaves_out_are_those_of_llama():
    given = ("model_type", "num_hidden_layers", "num_key_value_heads", "rope_theta")
    layer = {name: LAYER[name] for name in given}
    head = EAGLE3_FILES.read(
        SPECULATORS | dict(transformer_layer_config=layer), {"d2t": 0, "lm_head.weight": 0}
    )
    config = head.config
    assert (config.hidden_size, config.head_dim, config.vocab_size, config.rms_norm_eps) == (
        4096,
        128,
        32000,
        1e-6,
    )


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({}, (1, 3, 4)),
        ({IDS: [2, 4, 5]}, (1, 3, 4)),
        ({"aux_hidden_states_layer_ids": [0, 2, 7]}, (0, 2, 7)),
        ({IDS: [1, 3, 8], "eagle_config": {IDS: [2, 4, 5]}}, (0, 2, 7)),
    ],
)
def test_each_form_names_layers_in_its_own_way(changes, taps):
    names = dict.fromkeys(["lm_head.weight", "d2t", "embed_tokens.weight"])
    assert EAGLE3_FILES.read(FLAT | changes, names).bound(TARGET).taps == taps


def test_a_part_of_each_head_may_be_rotated_and_layers_may_have_biases():
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.5, mrope_section=[2, 1, 0])
    layer = {name: x for name, x in LAYER.items() if name != "rope_theta"} | dict(rope_parameters=rope)
    names = dict.fromkeys(["layers.0.self_attn.q_proj.bias", "layers.0.self_attn.q_norm.weight"])
    head = EAGLE3_FILES.read(layer, names)
    (spec,) = head.config.mixer_specs
    assert spec.qk_norm == "head" and spec.qkv_bias and not spec.o_bias
    assert head.config.rope.partial_rotary_factor == 0.5 and head.config.rope.rope_theta == 1e7
    assert EAGLE3_FILES.read(EAGLE3_FILES.write(head), names) == head


@pytest.mark.parametrize("name", HEADS)
def test_saved_heads_load_as_they_were(name, tmp_path):
    draft = xj.Draft(random_params(HEADS[name].param_specs()), HEADS[name])
    xj.save_draft(draft, tmp_path / "head")
    again = xj.load_draft(tmp_path / "head")
    assert again.head == draft.head
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, draft.params))


def test_errors(tmp_path):
    head = HEADS["llama"]
    with pytest.raises(InputError, match="hidden_size 40, and the model has 32: use the head of this model"):
        head.bound(xj.ModelConfig.from_hf(LAYER))
    other = xj.ModelConfig.from_hf(LAYER | dict(hidden_size=D_TARGET, vocab_size=100))
    with pytest.raises(InputError, match="vocab_size 72, and the model has 100: use the head of this model"):
        head.bound(other)
    names = dict.fromkeys(["lm_head.weight", "d2t", "embed_tokens.weight"])
    with pytest.raises(InputError, match="output of layer 8, and the layers of the model are 0 to 7"):
        EAGLE3_FILES.read(FLAT | {IDS: [2, 4, 9]}, names).bound(TARGET)
    with pytest.raises(InputError, match="must list 3 layers of the target, got 'all'"):
        EAGLE3_FILES.read(FLAT | {IDS: "all"}, names)
    with pytest.raises(InputError, match="needs the tensors d2t and lm_head.weight"):
        EAGLE3_FILES.read(FLAT, {"lm_head.weight": None})
    with pytest.raises(InputError, match="use_aux_hidden_state false is not supported"):
        EAGLE3_FILES.read(FLAT | dict(eagle_config=dict(use_aux_hidden_state=False)), names)
    for path, ids in (("far", np.arange(C) + V), ("twice", -np.arange(C))):
        write(tmp_path / path, FLAT, "midlayer.", d2t=ids)
        with pytest.raises(InputError, match=f"d2t names ids from .* in a vocabulary of {V}"):
            xj.load_draft(tmp_path / path)
    write(tmp_path / "short", FLAT, "midlayer.", d2t=np.arange(3))
    with pytest.raises(InputError, match="d2t"):
        xj.load_draft(tmp_path / "short")
    write(tmp_path / "norm", FLAT, "midlayer.", **{"norm.weight": None})
    with pytest.raises(InputError, match=r"missing norm.weight \[32\]"):
        xj.load_draft(tmp_path / "norm")
