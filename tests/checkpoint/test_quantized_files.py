"""Quantized checkpoints: AWQ and GPTQ packed from known numbers, our own format saved and loaded, errors."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from quantized_checkpoints import AWQ, CASES, GPTQ, V2, convert, write
from quick import full_except
from safetensors.numpy import load_file, save_file

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.families.naming import file_specs
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.quantization import quantize_matrix
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

Q1 = "model.layers.1.self_attn.q_proj"
K1 = "model.layers.1.self_attn.k_proj"
AUTO_ROUND = dict(
    quant_method="auto-round", bits=4, group_size=16, sym=False, data_type="int", iters=200, backend="auto",
    packing_format="auto_round:auto_gptq", block_name_to_quantize="model.layers",
)  # fmt: skip


def leaves(model) -> dict:
    """The leaves of the parameter tree, by checkpoint name."""
    specs, tree = jax.tree.flatten(file_specs(model.config))
    return {spec.hf_name: leaf for spec, leaf in zip(specs, tree.flatten_up_to(model.params), strict=True)}


def logits(params, config):
    return np.asarray(
        jax.jit(xj.forward, static_argnums=1)(
            params, config, jnp.arange(24).reshape(2, 12) % config.vocab_size
        )[0]
    )


# --- AWQ and GPTQ -------------------------------------------------------------------------------------------


LOGITS = ("awq", "gptq-act-order", "gptq-8")  # a format of products each


@pytest.mark.parametrize("name", full_except(("awq-last-group-short", "gptq-8-v2-act-order"), CASES))
def test_every_layout_of_awq_and_gptq_loads(tmp_path, name):
    settings, how = CASES[name]
    path, equal = write(tmp_path, settings, **how)
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    has_logits = name in LOGITS
    for name, leaf in leaves(model).items():
        if equal[name].ndim == 2 and ("layers" in name or how.get("head") and name == tiny.HEAD):
            assert isinstance(leaf, GroupedWeight) and all(
                isinstance(field, jax.Array) for field in jax.tree.leaves(leaf)
            )
            assert leaf.values.dtype == (np.uint8 if settings["bits"] == 4 else np.int8)
            assert (leaf.zero is None) == (settings["bits"] == 8) and (leaf.order is None) == (
                not how.get("act_order")
            )
            assert leaf.scale.dtype == (np.float16 if "scale_type" not in how else np.float32)
            leaf = leaf.dequantize()
        np.testing.assert_array_equal(np.asarray(leaf), equal[name], err_msg=name)
    if not has_logits:
        return
    float_params = jax.tree.unflatten(
        jax.tree.structure(file_specs(model.config)), map(jnp.asarray, equal.values())
    )
    np.testing.assert_allclose(
        logits(model.params, model.config), logits(float_params, model.config), atol=1e-4, rtol=0
    )


def test_the_requested_dtype_is_that_of_biases_and_norms(tmp_path):
    path, _ = write(tmp_path, AWQ)
    model = xj.load_model(path, dtype="bfloat16")
    q = model.params["layers"][1]["q"]
    assert (
        q["bias"].dtype == model.params["final_norm"].dtype == jnp.bfloat16
        and q["weight"].scale.dtype == jnp.float16
    )


def test_modules_to_not_convert_stay_float(tmp_path):
    skipped = [Q1, "lm_head"]
    stored, equal = convert(AWQ | dict(modules_to_not_convert=skipped))
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(f"{Q1}.")}
    stored |= {f"{Q1}.weight": equal[f"{Q1}.weight"], f"{Q1}.bias": equal[f"{Q1}.bias"]}
    path, _ = write(tmp_path, AWQ | dict(modules_to_not_convert=skipped), weights=stored)
    layer = xj.load_model(path, dtype="float32").params["layers"][1]
    np.testing.assert_array_equal(layer["q"]["weight"], equal[f"{Q1}.weight"])
    assert is_quantized(layer["k"]["weight"])


@pytest.mark.parametrize(
    "file, settings, written",
    [("quantize_config.json", GPTQ,
     dict(bits=4, group_size=16, damp_percent=0.01, desc_act=False, sym=False, model_name_or_path=None)),
     ("quant_config.json", AWQ, dict(zero_point=True, q_group_size=16, w_bit=4, version="GEMM"))],
)  # fmt: skip
def test_quantization_settings_in_a_separate_file(tmp_path, file, settings, written):
    """AutoGPTQ and AutoAWQ wrote these files before config.json had the settings. Other such files are
    ignored.
    """
    stored, equal = convert(settings)
    path = tiny.write(tmp_path / "old", tiny.UNTIED, weights=stored)
    tiny.write_json(path / file, written)
    model = xj.load_model(path, dtype="float32")
    np.testing.assert_array_equal(leaves(model)[f"{Q1}.weight"].dequantize(), equal[f"{Q1}.weight"])
    assert model.load_stats.dtype == settings["quant_method"]
    path = tiny.write(tmp_path / "float", tiny.UNTIED)
    tiny.write_json(path / file, dict(per_channel=True))
    assert xj.load_model(path, dtype="float32", quantize="int8").load_stats.dtype == "int8"


def test_gptq_zeros_subtracted_from_whole_words(tmp_path):
    """GPTQModel subtracts one from whole words, so a zero of 0 borrows from the next number."""
    settings = GPTQ | dict(meta=dict(quantizer=["gptqmodel:2.0.0"]))
    stored, equal = convert(V2 | dict(checkpoint_format="v2"))
    for name, tensor in stored.items():
        if name.endswith("qzeros"):
            stored[name] = (tensor.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    path, _ = write(tmp_path, settings, weights=stored)
    loaded = leaves(xj.load_model(path))
    assert (np.asarray(loaded[f"{Q1}.weight"].zero) == 0).any()
    np.testing.assert_array_equal(loaded[f"{Q1}.weight"].dequantize(), equal[f"{Q1}.weight"])


@pytest.mark.parametrize("bits", full_except([4], [4, 8]))
@pytest.mark.parametrize("layout", full_except(["gptq"], ["gptq", "gptq_v2"]))
@pytest.mark.parametrize("stored_zero", [-1, 0], ids=["one-less", "middle"])
def test_the_zero_of_symmetric_gptq_is_known(tmp_path, bits, layout, stored_zero):
    """Programs have written it by either rule, whatever they say in checkpoint_format."""
    middle = 2 ** (bits - 1)
    settings = V2 | dict(bits=bits, sym=True)
    stored, _ = convert(settings, zeros=middle + stored_zero)
    _, equal = convert(settings, zeros=middle)
    path, _ = write(tmp_path, settings | dict(checkpoint_format=layout), weights=stored)
    loaded = leaves(xj.load_model(path))
    np.testing.assert_array_equal(loaded[f"{Q1}.weight"].dequantize(), equal[f"{Q1}.weight"])


@pytest.mark.parametrize("zeros, shown", [(None, "0, 1, 2 and 13 more"), (9, "9")])
def test_other_zeros_of_symmetric_gptq_are_rejected(tmp_path, zeros, shown):
    path, _ = write(tmp_path, V2 | dict(sym=True), zeros=zeros)
    assert f"must all be 7 or all 8, got {shown}: correct sym" in tiny.load_error(path)


def test_g_idx_in_natural_order_needs_no_order(tmp_path):
    stored, equal = convert(GPTQ)
    for name in [name for name in stored if name.endswith("qweight")]:
        K = stored[name].shape[0] * 8
        stored[name.replace("qweight", "g_idx")] = np.arange(K, dtype=np.int32) // 16
    path, _ = write(tmp_path, GPTQ, weights=stored)
    opened = open_checkpoint(path)
    tiny.assert_same_shapes(opened)
    assert leaves(opened.model)[f"{Q1}.weight"].order is None


def test_zero_biases_that_the_model_lacks_are_ignored(tmp_path):
    stored, _ = convert(GPTQ)
    name = "model.layers.0.self_attn.o_proj.bias"
    path, _ = write(tmp_path / "zeros", GPTQ, weights=stored | {name: np.zeros(32, np.float16)})
    assert "bias" not in xj.load_model(path).params["layers"][0]["o"]
    path, _ = write(tmp_path / "others", GPTQ, weights=stored | {name: np.eye(1, 32, dtype=np.float16)[0]})
    assert f"unexpected {name}" in tiny.load_error(path)


@pytest.mark.parametrize(
    "packing, like",
    [("auto_round:auto_gptq", GPTQ), ("auto_round", V2), ("auto_round:auto_awq", AWQ)],
    ids=["gptq", "gptq-v2", "awq"],
)
def test_auto_round_packs_as_gptq_or_awq(tmp_path, packing, like):
    """A module in 16 bits has a float matrix. Saved, it has the bytes of its files."""
    stored, equal = convert(like)
    stored = {name: x for name, x in stored.items() if not name.startswith(f"{Q1}.")}
    stored |= {name: x for name, x in equal.items() if name.startswith(f"{Q1}.")}
    settings = AUTO_ROUND | dict(packing_format=packing, extra_config={Q1: dict(bits=16, data_type="fp")})
    path, _ = write(tmp_path / "from", settings, weights=stored)
    for name, leaf in leaves(xj.load_model(path, "float32")).items():
        assert is_quantized(leaf) == (f"{name.removesuffix('weight')}qweight" in stored)
        leaf = leaf.dequantize() if is_quantized(leaf) else leaf
        np.testing.assert_array_equal(leaf, equal[name], err_msg=name)
    assert save_and_compare(path, tmp_path / "to") == settings
    model = xj.load_model(path, "float32")
    model.params["layers"][1]["k"]["weight"] = jnp.asarray(equal[f"{K1}.weight"])
    xj.save_model(model.params, model.config, tmp_path / "float")
    again = xj.load_model(tmp_path / "float", "float32").config.quantization_config
    assert again["extra_config"] == settings["extra_config"] | {K1: dict(bits=16)}


def test_some_modules_of_gptq_and_auto_round_are_stored_otherwise(tmp_path):
    """The first expression that matches decides: the projections of layer 0 have 8 bits, and its gate is as
    the others.
    """
    (stored, equal) = convert(GPTQ)
    eight = GPTQ | dict(bits=8, sym=True, group_size=8)
    (others, equal_others) = convert(eight, zeros=128)
    mlp = [f"model.layers.0.mlp.{x}_proj." for x in ("gate", "up", "down")]
    packed = {name: x for name, x in stored.items() if not name.startswith((mlp[1], mlp[2]))}
    packed |= {name: x for name, x in others.items() if name.startswith((mlp[1], mlp[2]))}
    equal |= {name: x for name, x in equal_others.items() if name.startswith((mlp[1], mlp[2]))}
    changes = dict(bits=8, sym=True, group_size=8)
    rules = {"-:.*vision": {}, "+:.*gate_proj": dict(bits=4, damp_percent=0.1), r".*layers\.0\.mlp": changes}
    extra = {mlp[0][:-1]: dict(bits=4), r".*layers\.0\.mlp.*": changes}
    for i, settings in enumerate((GPTQ | dict(dynamic=rules), AUTO_ROUND | dict(extra_config=extra))):
        path, _ = write(tmp_path / f"from{i}", settings, weights=packed)
        found = leaves(xj.load_model(path, "float32"))
        for name in (f"{x}weight" for x in (*mlp, f"{Q1}.")):
            np.testing.assert_array_equal(found[name].dequantize(), equal[name], err_msg=name)
        assert found[f"{mlp[1]}weight"].group == 8
        save_and_compare(path, tmp_path / f"to{i}")


def test_rules_of_gptq_by_names_of_the_whole_model(tmp_path):
    """A model that sees has such names. They are there again if it is saved next to the whole."""
    (stored, _) = convert(GPTQ)
    (others, equal) = convert(GPTQ | dict(bits=8, sym=True), zeros=128)
    mlp = "model.layers.0.mlp."
    packed = {name: others[name] if name.startswith(mlp) else x for name, x in stored.items()}
    whole = {name.replace("model.", "model.language_model.", 1): x for name, x in packed.items()}
    rules = {r"+:model\.language_model\.layers\.0\.mlp": dict(bits=8, sym=True)}
    hf = dict(
        model_type="mistral3", text_config=tiny.UNTIED, vision_config={}, tie_word_embeddings=False,
        quantization_config=GPTQ | dict(dynamic=rules),
    )  # fmt: skip
    path = tiny.write(tmp_path / "from", hf, weights=whole)
    found = leaves(xj.load_model(path, "float32"))[f"{mlp}up_proj.weight"]
    np.testing.assert_array_equal(found.dequantize(), equal[f"{mlp}up_proj.weight"])
    assert save_and_compare(path, tmp_path / "to", like=path)["dynamic"] == rules


def test_rules_of_gptq_that_change_nothing(tmp_path):
    """Their expressions are not looked at."""
    rules = {"+:(a+)+": dict(bits=4, group_size=16, desc_act=False), "lm_head": {}, "-:.*mtp.*": {}}
    path, _ = write(tmp_path / "from", GPTQ | dict(dynamic=rules))
    assert save_and_compare(path, tmp_path / "to", like=path)["dynamic"] == rules


# --- errors -------------------------------------------------------------------------------------------------


_MLP = "model.layers.0.mlp"


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({f"{Q1}.scales": None}, f"missing {Q1}.scales [2, 32]"),
        ({f"{_MLP}.up_proj.g_idx": None}, f"missing {_MLP}.up_proj.g_idx [32]"),
        (
            {f"{_MLP}.gate_proj.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")},
            f"missing {_MLP}.gate_proj.weight [48, 32]",
        ),
        ({"model.norm.weight": None}, "missing model.norm.weight [32]"),
        ({f"{Q1}.qweight": (4, 31)}, f"{Q1}.qweight has shape [4, 31], the config asks for [4, 32]"),
        ({f"{_MLP}.down_proj.qzeros": np.int16}, f"{_MLP}.down_proj.qzeros has type I16, only I32"),
        ({"lm_head.qweight": (4, 288)}, "unexpected lm_head.qweight"),
    ],
)
def test_a_tensor_that_does_not_fit(tmp_path, changed, fault):
    """changed: by tensor, None to leave it out, a shape of zeros, or a type to convert to."""
    stored, _ = convert(GPTQ | dict(desc_act=True), act_order=True)
    for name, change in changed.items():
        if change is None:
            del stored[name]
        else:
            stored[name] = (
                np.zeros(change, np.int32) if isinstance(change, tuple) else stored[name].astype(change)
            )
    message = tiny.load_error(write(tmp_path, GPTQ | dict(desc_act=True), weights=stored)[0])
    assert fault in message and ", missing" not in message and "more" not in message  # the only fault


def test_invalid_g_idx(tmp_path):
    stored, _ = convert(GPTQ | dict(desc_act=True), act_order=True)
    stored[f"{Q1}.g_idx"][:] = 0
    assert f"{Q1}.weight: g_idx does not give every group its 16 inputs" in tiny.load_error(
        write(tmp_path, GPTQ, weights=stored)[0]
    )


def test_asymmetric_gptq_with_8_bits(tmp_path):
    path, _ = write(tmp_path, GPTQ | dict(bits=8), zeros=127)
    assert "only supported if symmetric, with all zeros 128, got 127" in tiny.load_error(path)


UNSUPPORTED = {
    "torchao": (dict(quant_method="torchao", quant_type="int4"), "quant_method 'torchao'"),
    "bitsandbytes": (
        dict(quant_method="bitsandbytes", load_in_8bit=8),
        "bitsandbytes with load_in_8bit 8",
    ),
    "fp8": (dict(quant_method="fp8", activation_scheme="block"), "fp8 with activation_scheme 'block'"),
    "no-method": (dict(bits=4), "quant_method None"),
    "no-object": ("int8", "quant_method 'int8'"),
    "a-list": (dict(quant_method=["awq"]), "quant_method ['awq']"),
    "awq-gemv": (AWQ | dict(version="GEMV"), "awq with version 'GEMV'"),
    "awq-marlin": (
        AWQ | dict(version=None, checkpoint_format="marlin"),
        "awq with checkpoint_format 'marlin'",
    ),
    "awq-symmetric": (AWQ | dict(zero_point=False), "awq with zero_point False"),
    "awq-8": (AWQ | dict(bits=8), "awq with bits 8"),
    "awq-other-packing": (AWQ | dict(backend="llm-awq"), "awq with backend 'llm-awq'"),
    "gptq-3": (GPTQ | dict(bits=3), "gptq with bits 3"),
    "gptq-no-bits": (dict(quant_method="gptq"), "gptq with bits None"),
    "gptq-group-0": (GPTQ | dict(group_size=0), "gptq with group_size 0"),
    "gptq-marlin": (GPTQ | dict(checkpoint_format="marlin"), "gptq with checkpoint_format 'marlin'"),
    "gptq-words-of-16": (GPTQ | dict(pack_dtype="int16"), "gptq with pack_dtype 'int16'"),
    "gptq-dynamic-3": (GPTQ | dict(dynamic={"+:.*mlp.*": dict(bits=3)}), "gptq with dynamic"),
    "gptq-dynamic-slow": (GPTQ | dict(dynamic={"(a+)+b": dict(bits=8)}), "gptq with dynamic"),
    "auto-round-mxfp4": (AUTO_ROUND | dict(data_type="mx_fp"), "auto-round with data_type 'mx_fp'"),
    "auto-round-activations": (AUTO_ROUND | dict(act_bits=8), "auto-round with act_bits 8"),
    "auto-round-backend": (
        {key: x for key, x in AUTO_ROUND.items() if key != "packing_format"}
        | dict(backend="auto_round:exllamav2"),
        "auto-round with backend 'auto_round:exllamav2'",
    ),
    "auto-round-packing": (
        AUTO_ROUND | dict(packing_format="auto_round:fp8_static"),
        "auto-round with packing_format 'auto_rou",
    ),
    "auto-round-module": (AUTO_ROUND | dict(extra_config={Q1: dict(bits=2)}), "auto-round with extra_config"),
    "ours-of-the-future": (dict(quant_method="xinfer_jax", version=6), "xinfer_jax with version 6"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_quantized_formats_are_rejected_by_name(tmp_path, name):
    settings, words = UNSUPPORTED[name]
    message = tiny.load_error(tiny.write(tmp_path, tiny.CONFIG | dict(quantization_config=settings)))
    assert f"{words}" in message and "is not supported: " in message and "unquantized" in message


def test_older_versions_of_our_format_are_rejected_with_the_command(tmp_path):
    for version, flags, options in (
        (1, {}, "int8`"),
        (2, dict(rotated=True, once=True), "int8 --activations=int8`"),
    ):
        settings = dict(quant_method="xinfer_jax", version=version, **flags)
        path = tiny.write(tmp_path / str(version), tiny.CONFIG | dict(quantization_config=settings))
        command = f"`xinfer-jax quantize --model=CHECKPOINT --output=DIR --quantize={options}"
        assert command in tiny.load_error(path)


@pytest.mark.parametrize(
    "settings", [AWQ, GPTQ, dict(quant_method="xinfer_jax", version=5)], ids=["awq", "gptq", "ours"]
)
def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path, settings):
    path = tiny.write(tmp_path, tiny.CONFIG | dict(quantization_config=settings))
    message = tiny.load_error(path, quantize="int8")
    assert f"already quantized ({settings['quant_method']})" in message and "without quantize" in message


# --- saved as they were -------------------------------------------------------------------------------------


def save_and_compare(path, to, dtype="float32", **how) -> dict:
    """Saves what a checkpoint loads as, which gives its tensors again, and its tree: the quantization_config
    that was written.
    """
    model = xj.load_model(path, dtype=dtype)
    xj.save_model(model.params, model.config, to, **how)
    (source, saved) = (load_file(folder / "model.safetensors") for folder in (path, to))
    assert all(name.endswith("g_idx") for name in saved.keys() - source.keys())
    same_bits(source, {name: saved[name] for name in source})
    again = xj.load_model(to, dtype=dtype)
    same_bits(model.params, again.params)
    settings = json.loads((to / "config.json").read_text())["quantization_config"]
    assert again.config.quantization_config == settings
    return settings


BORROWED = GPTQ | dict(meta=dict(quantizer=["gptqmodel:2.0.0"]))
KEPT = ("awq-head", "awq-last-group-short", "gptq", "gptq-v2", "gptq-act-order", "gptq-8", "borrowed")


@pytest.mark.parametrize("name", full_except(KEPT, [*(x for x in CASES if "bfloat16" not in x), "borrowed"]))
def test_awq_and_gptq_are_saved_with_the_bytes_of_their_files(tmp_path, name):
    settings, how = (BORROWED, dict(zeros=3)) if name == "borrowed" else CASES[name]
    path, _ = write(tmp_path / "from", settings, **how)
    assert save_and_compare(path, tmp_path / "to", like=path if "head" in name else None) == settings


def test_settings_of_a_separate_file_are_in_the_saved_config(tmp_path):
    stored, _ = convert(GPTQ)
    path = tiny.write(tmp_path / "old", tiny.UNTIED, weights=stored)
    tiny.write_json(path / "quantize_config.json", {k: v for k, v in GPTQ.items() if k != "quant_method"})
    assert save_and_compare(path, tmp_path / "to", like=path) == GPTQ
    assert not (tmp_path / "to" / "quantize_config.json").exists()


@pytest.mark.parametrize(
    "settings, listed",
    [
        (AWQ, dict(modules_to_not_convert=["lm_head", Q1])),
        (AWQ | dict(modules_to_not_convert=["q_proj", "lm_head"]), {}),
        (GPTQ, dict(dynamic={f"-:^{re.escape(Q1)}$": {}})),
    ],
    ids=["awq", "awq-listed", "gptq"],
)
def test_a_matrix_that_became_float_is_listed(tmp_path, settings, listed):
    """It is saved next to the checkpoint to which the tensors belong: only its other tensors stay."""
    path, equal = write(tmp_path / "from", settings)
    model = xj.load_model(path, dtype="float32")
    model.params["layers"][1]["q"]["weight"] = jnp.asarray(equal[f"{Q1}.weight"])
    for how in ({}, dict(like=path)):
        xj.save_model(model.params, model.config, tmp_path / f"to{len(how)}", **how)
        again = xj.load_model(tmp_path / f"to{len(how)}", dtype="float32")
        same_bits(model.params, again.params)
        assert again.config.quantization_config == settings | listed
    floats = jax.tree.map(
        lambda x: x.dequantize() if is_quantized(x) else x, model.params, is_leaf=is_quantized
    )
    xj.save_model(floats, model.config, tmp_path / "floats", like=path)
    again = xj.load_model(tmp_path / "floats", dtype="float32")
    same_bits(floats, again.params)
    assert again.config.quantization_config is None


def test_matrices_that_a_format_cannot_have_are_rejected_by_name(tmp_path):
    model = xj.load_model(write(tmp_path / "from", AWQ)[0], dtype="float32")
    layer = model.params["layers"][1]["q"]
    matrix = np.asarray(layer["weight"].dequantize())
    for bits, group in ((8, 16), (4, 32)):
        layer["weight"] = quantize_matrix(matrix, bits, group)
        with pytest.raises(xj.InputError, match=f"{Q1}.weight cannot be written in the format awq.*=None"):
            xj.save_model(model.params, model.config, tmp_path / "to")
    symmetric = GPTQ | dict(sym=True)
    model = xj.load_model(write(tmp_path / "symmetric", symmetric, zeros=8)[0], dtype="float32")
    leaf = model.params["layers"][1]["q"]["weight"]
    model.params["layers"][1]["q"]["weight"] = dataclasses.replace(leaf, zero=leaf.zero.at[0, 0].set(7))
    with pytest.raises(xj.InputError, match=f"{Q1}.weight cannot be written in the format gptq"):
        xj.save_model(model.params, model.config, tmp_path / "to")
    assert not (tmp_path / "to").exists()


# --- our own format -----------------------------------------------------------------------------------------


def same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", full_except(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("hf", [tiny.CONFIG, tiny.UNTIED], ids=["tied", "untied"])
def test_our_own_format_saved_and_loaded_has_the_same_bits(tmp_path, quantize, dtype, hf):
    source = tiny.write(tmp_path / "from", hf, generation_config=dict(temperature=0.5))
    model = xj.load_model(source, dtype=dtype, quantize=quantize)
    xj.save_model(model.params, model.config, tmp_path / "to" / "there", tokenizer=model.tokenizer)
    opened = open_checkpoint(tmp_path / "to" / "there", dtype=dtype)
    tiny.assert_same_shapes(opened)
    again = opened.read()
    same_bits(model.params, again.params)
    assert again.config == model.config and again.generation_config == dict(temperature=0.5)
    settings = json.loads((tmp_path / "to" / "there" / "config.json").read_text())
    assert settings.get("quantization_config") == (
        None if quantize is None else dict(quant_method="xinfer_jax", version=5)
    )


@pytest.mark.parametrize("name", ["awq", "gptq-act-order-last-group-short"])
def test_awq_and_gptq_saved_in_our_format(tmp_path, name):
    settings, how = CASES[name]
    model = xj.load_model(write(tmp_path / "from", settings, **how)[0], dtype="float32")
    config = dataclasses.replace(model.config, quantization_config=None)
    xj.save_model(model.params, config, tmp_path / "to")
    opened = open_checkpoint(tmp_path / "to", dtype="float32")
    tiny.assert_same_shapes(opened)
    again = opened.read()
    same_bits(model.params, again.params)
    assert again.tokenizer is None and again.load_stats.dtype == "xinfer_jax"


def test_shape_errors_in_our_own_format(tmp_path):
    model = xj.load_model(tiny.write(tmp_path / "from", tiny.UNTIED), dtype="float32", quantize="int4")
    assert model.params["lm_head"]["weight"].values.dtype == np.int8
    xj.save_model(model.params, model.config, tmp_path / "to")
    stored = load_file(tmp_path / "to" / "model.safetensors")
    gate = "model.layers.0.mlp.gate_proj.weight"
    for part, shape in (("values", (1, 16, 48)), ("zero", (1, 48))):
        changed = {f"{gate}.{part}": stored[f"{gate}.{part}"][..., 1:].copy()}
        save_file(stored | changed, tmp_path / "to" / "model.safetensors")
        fault = f"{gate}.{part} has shape {[*shape[:-1], 47]}, the config asks for {list(shape)}"
        assert tiny.load_error(tmp_path / "to").endswith(fault)  # the only fault
    tiny.write_json(tmp_path / "to" / "config.json", tiny.UNTIED)  # without quantization_config
    assert re.search(r"missing lm_head.weight \[288, 32\].* more$", tiny.load_error(tmp_path / "to"))


def test_invalid_order_in_our_own_format(tmp_path):
    stored, _ = convert(GPTQ | dict(desc_act=True), act_order=True)
    model = xj.load_model(write(tmp_path / "from", GPTQ | dict(desc_act=True), weights=stored)[0])
    config = dataclasses.replace(model.config, quantization_config=None)
    xj.save_model(model.params, config, tmp_path / "to")
    file = tmp_path / "to" / "model.safetensors"
    order = f"{Q1}.weight.order"
    for wrong in (np.full(32, 10**6, np.int32), np.full(32, -1, np.int32), np.zeros(32, np.int32)):
        save_file(load_file(file) | {order: wrong}, file)
        assert f"{Q1}.weight: order does not name every input once" in tiny.load_error(tmp_path / "to")
