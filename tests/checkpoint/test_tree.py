"""One tree of parameters: its tensors by the names of Hugging Face, its config.json, its layers stacked."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.config.rope import RopeConfig
from xinfer_jax.families.naming import published_name
from xinfer_jax.families.writing import to_hf
from xinfer_jax.plugins import load

pytestmark = pytest.mark.oldest

# Families whose published files have other tensors than leaves.
OTHERS = (
    "phi3-defaults", "moe-some-layers-dense", "gemma4-experts", "gpt-oss-published", "qwen3-next-sparse-step",
    "qwen3-5-tied", "lfm2-bias-untied-layer-types",
)  # fmt: skip
# Published with a tensor for each expert.
APART = (
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "mixtral", "glm4_moe", "dots1",
    "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite",
    "lfm2_moe", "nemotron_h",
)  # fmt: skip


def published(name: str) -> tuple[xj.ModelConfig, dict[str, np.ndarray], xj.ModelConfig]:
    """A case's config, its tensors as published, and its parameters."""
    config = cases.CASES[name].config
    leaves = cases.random_tensors(config, seed=1)
    tensors = cases.fuse_tensors(config, leaves)
    if config.model_type in APART:
        tensors = {name: x for name, x in tensors.items() if ".experts." not in name}
        for key, stack in leaves.items():
            if "{}" in key:
                tensors |= {key.format(expert): x for expert, x in enumerate(stack)}
            elif ".block_sparse_moe." in key:  # another name in transformers 5
                tensors[key] = tensors.pop(key.replace("block_sparse_moe", "mlp"))
    tensors = {published_name(config, key): x for key, x in tensors.items()}
    return config, tensors, cases.params_from(config, leaves)


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", cases.CASES)
def test_tensors_of_published_files_and_back(name):
    config, tensors, want = published(name)
    params = xj.params.params_from_tensors(config, tensors)
    assert_same(params, want)
    back = xj.params.params_to_tensors(params, config)
    assert back.keys() == tensors.keys()
    assert_same(back, tensors)
    names = xj.params.param_names(config)
    assert [x.shape for x in names] == [x.shape for x in jax.tree.leaves(want)]
    assert {name.replace("{}", "0") for _, name, *_ in names} <= tensors.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_under_jit_in_other_forms_and_dtypes(name):
    config, tensors, want = published(name)
    to_tree = jax.jit(lambda tensors: xj.params.params_from_tensors(config, tensors, dtype="bfloat16"))
    params = to_tree(tensors)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    back = jax.jit(lambda params: xj.params.params_to_tensors(params, config))(params)
    assert_same(back, {name: x.astype(jnp.bfloat16) for name, x in tensors.items()})
    fused = cases.fuse_tensors(config, cases.random_tensors(config, seed=1))
    assert_same(xj.params.params_from_tensors(config, fused), want)


def test_a_text_model_within_one_that_sees():
    config, tensors, want = published("qwen3-5-tied")
    within = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    within |= {"model.visual.patch_embed.proj.weight": np.ones(3), "mtp.fc.weight": np.ones(3)}
    within |= {"model.vision_embedder.patch_ln1.weight": np.ones(3), "model.embed_audio.x": np.ones(3)}
    assert_same(xj.params.params_from_tensors(config, within), want)


def test_experts_with_inputs_first(tmp_path):
    """Qwen3-VL is published in this form, and a checkpoint that is written like it has this form too."""
    config, tensors, want = published("moe-some-layers-dense")
    fused = cases.fuse_tensors(config, cases.random_tensors(config, seed=1))
    first = {name: x.swapaxes(1, 2) if ".experts." in name else x for name, x in fused.items()}
    assert_same(xj.params.params_from_tensors(config, first), want)
    within = {name.replace("model.", "model.language_model."): x.copy() for name, x in first.items()}
    hf = cases.CASES["moe-some-layers-dense"].hf
    text = hf | dict(model_type="qwen3_vl_moe_text", norm_topk_prob=False)
    outer = dict(model_type="qwen3_vl_moe", text_config=text)
    path = tiny.write(tmp_path / "whole", outer, weights=within, with_tokenizer=False)
    model = xj.load_model(path, "float32")
    assert model.config == config
    assert_same(model.params, want)
    xj.save_model(model.params, config, tmp_path / "out", like=path)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), within)
    apart = tiny.write(tmp_path / "apart", hf, weights=tensors, with_tokenizer=False)
    assert_same(*(xj.load_model(x, "float32", "int8").params for x in (path, apart)))
    with pytest.raises(xj.InputError, match="inputs or with outputs first: these cannot be told apart"):
        xj.ModelConfig.from_hf(outer | dict(text_config=text | dict(moe_intermediate_size=48)))


def test_all_faults_are_one_error():
    config, tensors, params = published("qwen2-gqa-tied-old")
    norm, up = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    wrong = {name: x for name, x in tensors.items() if name != norm} | {
        up: tensors[up].T,
        "model.odd": np.ones(2),
    }
    with pytest.raises(xj.InputError) as caught:
        xj.params.params_from_tensors(config, wrong)
    assert str(caught.value) == (
        "the tensors do not fit the config: missing model.norm.weight [48], model.layers.0.mlp.up_proj.weight"
        " has shape [48, 80], the config asks for [80, 48], unknown model.odd"
    )
    layer = {
        **params["layers"][0],
        "up": {"weight": params["layers"][0]["up"]["weight"].T},
        "odd": np.ones(2),
    }
    with pytest.raises(xj.InputError, match=r"params do not .*: layers.0.up.weight .*, unknown layers.0.odd"):
        xj.params.params_to_tensors({**params, "layers": (layer, *params["layers"][1:])}, config)


def test_what_is_no_array_of_floats():
    config, tensors, params = published("qwen2-gqa-tied-old")
    norm = {"model.norm.weight": np.ones(config.hidden_size, np.int32)}
    with pytest.raises(xj.InputError, match="parameters are floats, .*, got model.norm.weight of int32"):
        xj.params.params_from_tensors(config, tensors | norm)
    with pytest.raises(xj.InputError, match="parameters are floats, .*, got final_norm of int32"):
        xj.Model(params | dict(final_norm=norm["model.norm.weight"]), config)
    with pytest.raises(xj.InputError, match="model.norm.weight must be an array of .*, got builtins.list"):
        xj.params.params_from_tensors(config, tensors | {"model.norm.weight": [1.0] * config.hidden_size})
    with pytest.raises(xj.InputError, match="config must be a ModelConfig, as model.config is, got dict"):
        xj.params.params_from_tensors(tensors, config)
    with pytest.raises(xj.InputError, match="tensors must be arrays by name, got None"):
        xj.params.params_from_tensors(config, None)


def test_a_model_of_ones_own_arrays():
    config, _, params = published("qwen2-gqa-tied-old")
    model = xj.Model(params, config)
    assert repr(model).endswith("in float32, 0.2 MiB, vocabulary 96, context 1024, no tokenizer)")
    asked = xj.GenerateOptions(max_tokens=4, eos_token_ids=())
    assert len(xj.generate(model.params, model.config, [[1, 2]], asked).tokens[0]) == 4
    with pytest.raises(xj.InputError, match="this model has no tokenizer .*, and text needs one"):
        xj.generate_text(model, "hi", asked)
    (first, *rest) = params["layers"]
    for layer, named in (
        ({**first, "odd": first["q"]}, "unknown layers.0.odd.bias, unknown layers.0.odd.weight"),
        ({name: x for name, x in first.items() if name != "q"}, r"missing layers.0.q.bias \[48\]"),
        (first | dict(up=dict(weight=first["up"]["weight"].T)), r"layers.0.up.weight has shape \[48, 80\]"),
    ):
        with pytest.raises(xj.InputError, match=f"the params do not fit the config: .*{named}"):
            xj.Model({**params, "layers": (layer, *rest)}, config)


def test_what_has_no_tensors():
    config, _, _ = published("qwen2-gqa-tied-old")
    quantized = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), quantize="int8"))
    with pytest.raises(xj.InputError, match="only float parameters have tensors; quantized: embed"):
        xj.params.params_to_tensors(quantized, config)


@pytest.mark.unit
@pytest.mark.parametrize("name", cases.CASES)
def test_config_json_is_written(name):
    config = cases.CASES[name].config
    assert xj.ModelConfig.from_hf(to_hf(config)) == config


FAMILIES = {case.hf["model_type"]: name for name, case in cases.CASES.items()}


def neutral(hf: dict) -> Iterator[dict]:
    """A config.json with each of its settings at 0, at 1, at its family's default, or left out."""
    defaults = load("family", hf["model_type"]).defaults
    scaling = next((name for name in ("rope_scaling", "rope_parameters") if hf.get(name)), None)
    for name in sorted(hf.keys() | defaults.keys()):
        for value in (0, 1, 1.0, defaults.get(name)):
            yield hf | {name: value}
        yield {other: x for other, x in hf.items() if other != name}
    for field in dataclasses.fields(RopeConfig) if scaling else ():
        for value in (0, 1, 1.0, field.default):
            yield hf | {scaling: hf[scaling] | {field.name: value}}


@pytest.mark.unit
@pytest.mark.parametrize("name", sorted({*FAMILIES.values(), *OTHERS, "llama-yarn-mscale", "olmo3-yarn-old"}))
def test_config_json_is_written_with_numbers_at_neutral_values(name):
    """A factor of yarn and longrope that is 1 is not the ratio of their lengths."""
    configs = []
    for hf in neutral(cases.CASES[name].hf):
        with contextlib.suppress(xj.InputError):  # a value that no model has
            configs.append(xj.ModelConfig.from_hf(hf))
    assert len(configs) > 20
    for config in configs:
        assert xj.ModelConfig.from_hf(to_hf(config)) == config


@pytest.mark.unit
def test_a_config_that_its_family_cannot_have_is_not_written():
    config = cases.CASES["llama3-new"].config
    with pytest.raises(xj.InputError, match="a llama model has no place for its embed_scale"):
        to_hf(dataclasses.replace(config, embed_scale=2.0))


@pytest.mark.full
@pytest.mark.parametrize("name, pattern", [("qwen2-gqa-tied-old", 1), ("gemma3-old", 0)])
def test_stacked_layers(name, pattern):
    config, _, params = published(name)
    stacked = xj.params.stack_layers(params, config)
    blocks = stacked["layers"]["blocks"]
    kinds = len(blocks)
    assert kinds == (pattern or next(n for n in range(1, 9) if config.layers[n:] == config.layers[:-n]))
    repeats = config.num_hidden_layers // kinds
    assert {x.shape[0] for x in jax.tree.leaves(blocks)} == {repeats}
    assert len(stacked["layers"]["rest"]) == config.num_hidden_layers % kinds
    assert_same(xj.params.unstack_layers(stacked), params)
    loss = lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))  # noqa: E731
    gradient = jax.grad(lambda tree: loss(xj.params.unstack_layers(tree)))(stacked)
    assert_same(xj.params.unstack_layers(gradient), jax.tree.map(lambda x: 2 * x, params))
    with pytest.raises(xj.InputError, match="the layers are not stacked"):
        xj.params.unstack_layers(params)
