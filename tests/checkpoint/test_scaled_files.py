"""Files in FP8, NVFP4, MXFP4 and compressed-tensors' formats: equal to the weights that NumPy dequantizes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import parity_cases as cases
import pytest
import run_script
import tiny
from quantized_checkpoints import AWQ, GPTQ, pack_matrix
from quick import full_except
from safetensors.numpy import load_file
from scaled_checkpoints import (
    BF16,
    E4M3,
    assert_equal,
    checkpoint,
    compressed,
    convert,
    equal_model,
    float_tensors,
    fp8,
    fp8_settings,
    integers,
    mxfp4,
    nvfp4,
    nvfp4_packed,
    published_tensors,
    w4,
    write,
)

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.formats.tensors import open_tensors
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.int8_weight import Int8Weight
from xinfer_jax.weights.mxfp4 import Mxfp4Weight

pytestmark = pytest.mark.oldest

HF = tiny.UNTIED | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
Q0 = "model.layers.0.self_attn.q_proj.weight"


_FP4 = partial(compressed, bits=4, kind="float")
_FP8 = partial(compressed, bits=8, kind="float")
_E8M0 = ml_dtypes.float8_e8m0fnu
CASES = {  # settings, how matrices are stored, and the leaf that they become; None: floats
    "fp8-blocks": (fp8_settings([24, 40]), fp8((24, 40)), None),
    "fp8-blocks-by-default": (dict(quant_method="fp8"), fp8((128, 128)), None),
    "fp8-tensor": (fp8_settings(activation_scheme="static"), fp8(), None),
    "fp8-rows": (fp8_settings(), fp8("row", end="_scale", scale_dtype=BF16), None),
    "fp8-e5m2": (fp8_settings([16, 16], fmt="e5m2"), fp8((16, 16), ml_dtypes.float8_e5m2), None),
    "fp8-ue8m0": (fp8_settings([32, 32], scale_fmt="ue8m0"), fp8((32, 32), scale_dtype=_E8M0), None),
    "modelopt-fp8": (dict(quant_method="modelopt", quant_algo="FP8"), fp8(end="_scale"), None),
    "modelopt-nvfp4": (dict(quant_method="modelopt_fp4", quant_algo="NVFP4", group_size=16), nvfp4, None),
    "nvfp4-packed": (
        _FP4("nvfp4-pack-quantized", strategy="tensor_group", group_size=16), nvfp4_packed, None,
    ),
    "mxfp4-packed": (_FP4("mxfp4-pack-quantized", strategy="group", group_size=32), mxfp4, Mxfp4Weight),
    "float-quantized": (_FP8("float-quantized"), fp8("row", end="_scale"), None),
    "float-blocks": (
        _FP8("naive-quantized", strategy="block", block_structure=[32, 48]), fp8((32, 48), end="_scale"),
        None,
    ),
    "int-quantized": (compressed("int-quantized", 8), integers(8, packed=False), GroupedWeight),
    "int-zeros": (compressed("int-quantized", 8, symmetric=False), integers(8, None, False, False), None),
    "int-groups": (
        compressed("naive-quantized", 8, strategy="group", group_size=32), integers(8, 32, packed=False),
        GroupedWeight,
    ),
    "w4a16": (w4(), integers(4, 32), GroupedWeight),
    "w4a16-zeros": (w4(symmetric=False), integers(4, 32, False, scale_dtype=np.float16), GroupedWeight),
    "w4a16-last-group-short": (w4(48), integers(4, 48), GroupedWeight),
    "w4a16-channel": (compressed("pack-quantized"), integers(4), GroupedWeight),
    "w4a16-order": (w4(16), integers(4, 16, order=True), GroupedWeight),
    "w8a16": (compressed("pack-quantized", 8), integers(8), GroupedWeight),
    "w8a16-zeros": (w4(bits=8, symmetric=False), integers(8, 32, False), None),
}  # fmt: skip


def logits(model):
    tokens = jnp.arange(1, 25).reshape(2, 12)
    return np.asarray(jax.jit(xj.forward, static_argnums=1)(model.params, model.config, tokens)[0])


LOGITS = ("mxfp4-packed", "w4a16-order", "int-quantized")  # test_quantization.py has products of other leaves


@pytest.mark.parametrize("name", full_except({*CASES} - {*LOGITS}, CASES))
def test_every_format_equals_its_numbers(tmp_path, name):
    settings, encode, kind = CASES[name]
    unused = {f"{Q0.removesuffix('weight')}input_scale": np.float32(1)}
    path, equal = checkpoint(tmp_path / "a", HF, settings, encode, **unused)
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    assert isinstance(model.params["layers"][0]["up"]["weight"], kind or jax.Array)
    wanted = equal_model(tmp_path / "b", HF, equal)
    assert_equal(model, wanted)
    assert_equal(xj.load_model(path, "float32", dequantize=True), wanted)
    if name in LOGITS:
        np.testing.assert_allclose(logits(model), logits(wanted), atol=1e-4, rtol=0)


FAMILIES = {  # the case of `parity_cases`, its files, and whether experts are in one tensor
    "moe-defaults": False,
    "qwen3-next-sparse-step": True,
    "qwen3-5-moe-no-shared": False,
    "gemma4-experts": True,
    "gpt-oss-published": True,
}
W4A16 = ["moe-defaults", "qwen3-5-moe-no-shared", "gemma4-experts"]


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_of_every_family(tmp_path, name):
    """Blocks that splits, heads and fused tensors cross; experts together and apart."""
    hf = cases.CASES[name].hf
    path, equal = checkpoint(tmp_path / "a", hf, fp8_settings([10, 14]), fp8((10, 14)), FAMILIES[name], 3)
    assert_equal(xj.load_model(path, "float32"), equal_model(tmp_path / "b", hf, equal))


@pytest.mark.full
@pytest.mark.parametrize("name", W4A16)
def test_w4a16_of_hybrids_and_mixtures(tmp_path, name):
    hf = cases.CASES[name].hf | dict(num_hidden_layers=2)
    if "layer_types" in hf:
        hf["layer_types"] = hf["layer_types"][:2]
    path, equal = checkpoint(tmp_path / "a", hf, w4(16), integers(4, 16), False)
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    assert isinstance(model.params["layers"][1]["experts"]["gate"]["weight"], GroupedWeight)
    wanted = equal_model(tmp_path / "b", hf, equal)
    assert_equal(model, wanted)
    np.testing.assert_allclose(logits(model), logits(wanted), atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("settings", [AWQ, GPTQ], ids=["awq", "gptq"])
@pytest.mark.parametrize(
    "name",
    ["moe-defaults", "qwen3-next-sparse-step", "phi3-defaults", "deepseek-v3-yarn-groups", "glm4-moe-groups"],
)
def test_awq_and_gptq_of_hybrids_mixtures_and_fused_matrices(tmp_path, name, settings):
    """Experts apart. Several leaves are in one matrix."""
    path, equal, hf = _packed(tmp_path / "a", name, settings)
    model = xj.load_model(path, "float32")
    assert isinstance(model.params["layers"][0]["o"]["weight"], GroupedWeight)
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))


SAVED = [  # a name, settings, and whether the copy is like the file
    ("youtu-tied", AWQ, False), ("youtu-tied", GPTQ, True), ("deepseek-v3-yarn-groups", AWQ, True),
    ("deepseek-v3-yarn-groups", GPTQ, False), ("glm4-moe-groups", GPTQ, True),
]  # fmt: skip


@pytest.mark.parametrize("name, settings, is_like", full_except(SAVED[:1], SAVED))
def test_awq_and_gptq_of_latent_attention_and_experts_are_saved(tmp_path, name, settings, is_like):
    """Keys and values are floats, in the tensor in which transformers has both. All others stay."""
    path, _, _ = _packed(tmp_path / "a", name, settings)
    model = xj.load_model(path, "float32")
    xj.save_model(model.params, model.config, tmp_path / "b", like=path if is_like else None)
    (source, saved) = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "b"))
    both = {name for name in saved if ".kv_b_proj." in name}
    is_latent = name != "glm4-moe-groups"
    assert both == {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(3 * is_latent)}
    others = {name for name in source if ".kv_b_proj." not in name}
    assert {name for name in saved.keys() - both if not name.endswith("g_idx")} == others
    for name in others:
        np.testing.assert_array_equal(saved[name], source[name], err_msg=name)
    again = xj.load_model(tmp_path / "b", "float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    written = str(again.config.quantization_config)
    assert ("kv_b_proj" in written) == is_latent and "k_up_proj" not in written


# Widths in which words are full, as AWQ and GPTQ need them.
_WIDTHS = dict(shared_expert_intermediate_size=24, kv_lora_rank=32, q_lora_rank=24)


def _packed(path, name, settings):
    """Writes a checkpoint of AWQ or GPTQ. Returns its path, the equal float tensors, and config.json."""
    random = np.random.default_rng(0)

    def encode(tensor, x):
        parts, equal = pack_matrix(settings, random, *x.shape)
        return {tensor.removesuffix("weight") + part: array for part, array in parts.items()}, equal

    hf = dict(cases.CASES[name].hf)
    hf |= {field: width for field, width in _WIDTHS.items() if hf.get(field)}
    (stored, equal) = convert(published_tensors(hf), encode)
    return write(path, hf | dict(quantization_config=settings), stored), equal, hf


def test_a_model_that_sees(tmp_path):
    """Targets and tensors have the names of the whole model; some of its other tensors are quantized too."""
    stored, equal = convert(float_tensors(HF), integers(4, 32))
    whole = "model.language_model."
    stored = {
        whole + name.removeprefix("model.") if name != tiny.HEAD else name: x for name, x in stored.items()
    }
    stored["model.vision_tower.patch.weight_packed"] = np.zeros((4, 4), np.int32)
    settings = w4(32)
    settings["config_groups"]["group_0"]["targets"] = [
        rf"re:{whole}layers\.\d+\.(mlp|self_attn)",
        "re:model.vis",
    ]
    hf = dict(model_type="mistral3", text_config=HF | dict(model_type="qwen2"), vision_config={})
    path = write(tmp_path / "a", hf | dict(quantization_config=settings), stored)
    model = xj.load_model(path, "float32")
    assert_equal(model, equal_model(tmp_path / "b", HF, equal))
    xj.save_model(model.params, model.config, tmp_path / "c", like=path)
    again = xj.load_model(tmp_path / "c", "float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_kimi_k25(tmp_path):
    """Experts in int4 within a model that sees. Its `text_config` has the quantization and the text model.
    Saved next to the files, the tensors have the same bytes.
    """
    hf = cases.CASES["deepseek-v3-yarn-groups"].hf | dict(num_hidden_layers=2)
    packed = integers(4, 16)
    encode = lambda name, x: packed(name, x) if ".experts." in name else ({name: x}, x)  # noqa: E731
    (text, equal) = convert(published_tensors(hf), encode)
    stored = {f"language_model.{name}": x for name, x in text.items()}
    others = ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight")
    stored |= {name: np.ones((2, 3), np.float32) for name in others}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"]
    own = dict(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    text_config = hf | own | dict(quantization_config=w4(16, ignore=ignore))
    outer = dict(model_type="kimi_k25", architectures=["KimiK25ForConditionalGeneration"], vision_config={})
    outer |= dict(tie_word_embeddings=False)
    path = write(tmp_path / "a", outer | dict(text_config=text_config), stored)
    model = xj.load_model(path, "float32")
    assert model.load_stats.skipped == ("mm_projector.* (1)", "vision_tower.* (1)")
    assert isinstance(model.params["layers"][1]["experts"]["up"]["weight"], GroupedWeight)
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))
    xj.save_model(model.params, model.config, tmp_path / "c", like=path)
    (source, saved) = (open_tensors(folder) for folder in (path, tmp_path / "c"))
    assert saved.keys() == source.keys()
    for name, tensor in source.items():
        np.testing.assert_array_equal(saved[name].array(), tensor.array(), err_msg=name)
    again = xj.load_model(tmp_path / "c", "float32")
    assert again.config.quantization_config["ignore"] == [*ignore, "model.layers.1.mlp.gate"]
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_mixed_precision_and_fused_matrices(tmp_path):
    """W4A16 and FP8 in one file; a group with zeros in heads of which a query and a gate share a tensor."""
    settings = w4(16, symmetric=False)
    groups = settings["config_groups"]
    groups["group_0"] |= dict(targets=["re:.*self_attn"], format="pack-quantized")
    groups["group_1"] = compressed("", 8, "float")["config_groups"]["group_0"] | dict(
        format="float-quantized"
    )
    (packed, float8) = (integers(4, 16, False), fp8("row", end="_scale"))
    encode = lambda name, x: (packed if "self_attn" in name else float8)(name, x)  # noqa: E731
    hf = cases.CASES["qwen3-5-tied"].hf
    path, equal = checkpoint(tmp_path / "a", hf, settings | dict(format="mixed-precision"), encode)
    model = xj.load_model(path, "float32")
    assert isinstance(model.params["layers"][1]["attn_gate"]["weight"], GroupedWeight)
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))


@pytest.mark.parametrize("is_tied", full_except([False], [False, True]))
def test_the_embedding_is_of_its_own_class(tmp_path, is_tied):
    """Linear in 4 bits, Embedding in 8: a tied matrix is an embedding."""
    settings = w4(32, ignore=[])
    settings["config_groups"]["group_1"] = compressed("", 8)["config_groups"]["group_0"] | dict(
        targets=["Embedding"], format="pack-quantized"
    )
    hf = HF | dict(tie_word_embeddings=is_tied)
    (stored, equal) = convert(float_tensors(hf), integers(4, 32))
    for name in [name for name in (tiny.EMBED, tiny.HEAD) if name in stored]:
        encode = integers(8) if name == tiny.EMBED else integers(4, 32)
        (parts, equal[name]) = encode(name, stored.pop(name))
        stored |= parts
    model = xj.load_model(write(tmp_path / "a", hf | dict(quantization_config=settings), stored), "float32")
    assert model.params["embed"]["weight"].values.dtype == np.int8
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))


@pytest.mark.parametrize(
    "settings, scales",
    [
        (dict(quant_method="compressed-tensors", config_groups={}, kv_cache_scheme=dict(num_bits=8)), "{}_"),
        (dict(quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8"), "{}_proj.{}_"),
    ],
    ids=["compressed-tensors", "modelopt"],
)
@pytest.mark.filterwarnings("ignore:.*tensors that are not read")
def test_scales_of_the_cache_alone(tmp_path, settings, scales):
    """The model is one of floats, in the dtype of such models."""
    equal = float_tensors(HF)
    stems = [f"model.layers.0.self_attn.{scales.format(x, x)}" for x in "kv"]
    unused = {stem + field: np.ones((), np.float32) for stem in stems for field in ("scale", "zero_point")}
    path = write(tmp_path / "a", HF | dict(quantization_config=settings), equal | unused)
    model = xj.load_model(path)
    assert model.load_stats.dtype == "float32" and model.config.quantization_config is None
    assert_equal(model, equal_model(tmp_path / "b", HF, equal))
    assert xj.load_model(path, quantize="int8").load_stats.dtype == "int8"


def test_the_dtype_of_floats(tmp_path):
    """FP8 becomes bfloat16 unless another is asked for, or int8 or int4."""
    path, equal = checkpoint(tmp_path / "a", HF, *CASES["fp8-blocks"][:2])
    model = xj.load_model(path)
    leaf = model.params["layers"][0]["q"]["weight"]
    assert leaf.dtype == jnp.bfloat16 and model.load_stats.dtype == "bfloat16"
    np.testing.assert_array_equal(leaf, equal[Q0].astype(BF16))
    wanted = xj.load_model(write(tmp_path / "b", HF, equal), "float32", "int4")
    jax.tree.map(np.testing.assert_array_equal, xj.load_model(path, "float32", "int4").params, wanted.params)
    xj.save_model(model.params, model.config, tmp_path / "c", like=path)  # no scale is left, nor a setting
    jax.tree.map(np.testing.assert_array_equal, xj.load_model(tmp_path / "c").params, model.params)


@pytest.mark.parametrize(
    "name", ["w4a16", "w4a16-zeros", "w4a16-channel", "w4a16-order", "w4a16-last-group-short"]
)
def test_w4a16_is_saved_as_it_was(tmp_path, name):
    """Packed numbers and zero points byte for byte; scales, of float models, in float32."""
    path, _ = checkpoint(tmp_path / "a", HF, *CASES[name][:2])
    model = xj.load_model(path, "float32")
    xj.save_model(model.params, model.config, tmp_path / "b")
    (source, saved) = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "b"))
    assert source.keys() == saved.keys()
    for tensor, array in saved.items():
        np.testing.assert_array_equal(array, source[tensor].astype(array.dtype), err_msg=tensor)
    jax.tree.map(np.testing.assert_array_equal, xj.load_model(tmp_path / "b", "float32").params, model.params)


@pytest.mark.parametrize("name, hf", [("int-quantized", HF), ("mxfp4-packed", HF), ("w4a16", None)])
def test_others_are_not_saved_in_their_format(tmp_path, name, hf):
    """Matrices that are joined in published files neither."""
    path, _ = checkpoint(tmp_path / "a", hf or cases.CASES["qwen3-5-tied"].hf, *CASES[name][:2])
    model = xj.load_model(path, "float32")
    with pytest.raises(xj.InputError, match="cannot be written in the format compressed-tensors"):
        xj.save_model(model.params, model.config, tmp_path / "b")


@pytest.mark.full
def test_quantize_writes_compressed_tensors(tmp_path):
    done = run_script.command(
        "quantize", f"--output={tmp_path}/w4", "--method=rtn", "--format=compressed-tensors"
    )
    assert done.returncode == 0, done.stderr
    model = xj.load_model(tmp_path / "w4", "float32")
    assert model.load_stats.dtype == "compressed-tensors"
    assert isinstance(model.params["layers"][0]["q"]["weight"], GroupedWeight)


WEIGHTS = dict(num_bits=4, type="int", strategy="group", group_size=32)
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def _group(**changed):
    settings = w4(32)
    settings["config_groups"]["group_0"] |= changed
    return settings


@pytest.mark.parametrize(
    "settings, changed, message",
    [
        (w4(), {SCALE: np.ones((96, 3), BF16)}, r"up_proj.weight_scale has shape \[96, 3\], .* \[96, 2\]"),
        (w4(), {SCALE: np.full((96, 2), np.nan, BF16)}, "up_proj.weight: its scales hold NaN or inf"),
        (w4(), {SCALE: None}, "missing .*up_proj.weight_scale"),
        (w4(), {SCALE.replace("scale", "packed"): np.zeros((96, 7), np.int32)}, "weight_packed has shape"),
        (_group(targets=["Conv2d"]), {}, "is quantized, but no target of config_groups is its name or class"),
        (_group(targets=["re:("]), {}, "with targets .* is not supported"),
        (_group(targets=["re:(a+)+b"]), {}, "with targets .* is not supported"),
        (_group(targets=5), {}, "with targets 5 is not supported"),
        (_group(weights=[]), {}, "with weights .* is not supported"),
        (_group(weights=WEIGHTS | dict(num_bits=3)), {}, r"num_bits \('int', 3\) is not supported"),
        (_group(weights=WEIGHTS | dict(num_bits=[4])), {}, "is not supported"),
        (_group(weights=WEIGHTS | dict(strategy=[1])), {}, r"strategy \[1\] is not supported"),
        (_group(weights=WEIGHTS | dict(group_size=-5)), {}, "group_size -5 is not supported"),
        (w4(config_groups=dict.fromkeys("ab", _group()["config_groups"]["group_0"])), {},
         "several config_groups have the target 'Linear'"),
        (w4(config_groups=dict(W4A16=["Linear"])), {}, "with config_groups .* not supported"),
        (w4(transform_config=dict(a=1)), {}, "compressed-tensors with transform_config"),
        (w4(sparsity_config=dict(format="sparse-24-bitmask")), {}, "compressed-tensors with sparsity_config"),
        (compressed("marlin-24"), {}, "format 'marlin-24' is not supported: only the formats pack-quantized"),
        (compressed("mxfp8-quantized"), {}, "format 'mxfp8-quantized' is not supported"),
        (fp8_settings([0, 4]), {}, "fp8 with weight_block_size"),
        (fp8_settings(expert_dtype="fp4"), {}, "fp8 with expert_dtype 'fp4'"),
        (fp8_settings(scale_fmt="e5"), {}, "fp8 with scale_fmt 'e5'"),
        (dict(quant_method="modelopt", quant_algo="W4A8_AWQ"), {}, "modelopt with quant_algo 'W4A8_AWQ'"),
        (dict(quant_method="modelopt", quant_algo="FP8", quantized_layers=dict(a=dict(quant_algo="X"))), {},
         "modelopt with quantized_layers"),
        *((dict(quant_method=name), {}, f"quant_method '{name}' is not supported: awq, .*compressed-t.*fp8")
          for name in ("torchao", "hqq", "quark")),
    ],
)  # fmt: skip
def test_rejected_by_name(tmp_path, settings, changed, message):
    path, _ = checkpoint(tmp_path, HF, settings, integers(4, 32), **changed)
    with pytest.raises(xj.InputError, match=message) as error:
        xj.load_model(path, "float32")
    assert "\n" not in str(error.value)


def test_fp8_files_that_are_wrong(tmp_path):
    for changed, message in (
        ({f"{Q0}_scale_inv": None}, "missing .*q_proj.weight_scale_inv"),
        ({f"{Q0}_scale_inv": np.ones((3, 3), np.float32)}, "q_proj.weight_scale_inv has shape"),
        (
            {f"{Q0}_scale_inv": np.full((3, 2), np.inf, np.float32)},
            "q_proj.weight: its scales hold NaN or inf",
        ),
        ({Q0: np.zeros((8, 8), E4M3)}, "q_proj.weight has shape"),
    ):
        path, _ = checkpoint(tmp_path, HF, fp8_settings([24, 40]), fp8((24, 40)), **changed)
        with pytest.raises(xj.InputError, match=message):
            xj.load_model(path)


def test_modelopt_settings_in_a_separate_file(tmp_path, caplog):
    """The files have scales of keys and values, which one warning names, and scales of matrices in arrays."""
    stored, equal = convert(float_tensors(HF), nvfp4)
    stored |= {name: x[None] for name, x in stored.items() if name.endswith("weight_scale_2")}
    stored["model.layers.0.self_attn.k_proj.k_scale"] = np.float32(1)
    path = write(tmp_path / "a", HF, stored)
    quantization = dict(
        quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16, exclude_modules=["lm_head"]
    )
    tiny.write_json(
        path / "hf_quant_config.json", dict(producer=dict(name="modelopt"), quantization=quantization)
    )
    model = xj.load_model(path, "float32")
    assert "k_scale" in caplog.text
    assert_equal(model, equal_model(tmp_path / "b", HF, equal))


def test_int8_with_a_scale_per_output_where_there_are_kernels(tmp_path, monkeypatch):
    path, equal = checkpoint(tmp_path, HF, *CASES["int-quantized"][:2])
    monkeypatch.setattr(
        kernels_pallas, "device_impl", lambda: kernels_pallas.dispatch.Selection("mosaic", "")
    )
    opened = open_checkpoint(path, dtype="float32")
    leaf = opened.read().params["layers"][0]["q"]["weight"]
    assert isinstance(leaf, Int8Weight) and isinstance(
        opened.model.params["layers"][0]["q"]["weight"], Int8Weight
    )
    np.testing.assert_array_equal(leaf.dequantize(), equal[Q0])
