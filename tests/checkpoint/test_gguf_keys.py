"""Metadata of GGUF files: each key is read, without effect, or an error that names it."""

import dataclasses
import math

import numpy as np
import parity_cases as cases
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.checkpoint import gguf_checkpoint as opening
from xinfer_jax.families.reading import from_hf
from xinfer_jax.formats.gguf_file import open_gguf
from xinfer_jax.formats.gguf_keys import ARCHITECTURES, key_role

gguf = pytest.importorskip("gguf")
import gguf_files as files  # noqa: E402

pytestmark = pytest.mark.oldest

OTHERS = {"id": "0", "name": "rag", "dense": "dense_2"}
WORDS = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}


def constants(keys=gguf.Keys):
    """Every key of the package's list."""
    for name, value in vars(keys).items():
        if isinstance(value, type):
            yield from constants(value)
        elif not name.startswith("_"):
            yield value


@pytest.mark.unit
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_key_of_the_format_has_a_role(arch):
    keys = [key.format(arch=arch, **OTHERS) for key in constants()]
    assert len(keys) > 200 and [key for key in keys if key_role(arch, key) is None] == []
    assert key_role(arch, f"{arch}.new_key") is key_role(arch, "tokenizer.ggml.new_key") is None
    assert key_role(arch, "quantize.imatrix.file") == "without effect"


def opened(file, **changes):
    """Returns the settings that the metadata of a file make, with changes by key. None: the key is
    removed.
    """
    metadata = {key: value for key, value in (file.metadata | changes).items() if value is not None}
    (_, own, settings) = opening._settings(file._replace(metadata=metadata))
    config = from_hf(settings)
    opening._check_model(own, config)
    return dataclasses.asdict(config), opening._embedding(own), opening._generation_config(metadata)


# Keys that are read and need another one to change a model of the tests.
WITH_OTHERS = {
    "rope.scaling.type", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "classifier.output_labels", "expert_used_count",
    "expert_feed_forward_length", "feed_forward_length",
}  # fmt: skip


def another(key, value):
    if key.endswith("attention.causal"):
        return False
    if key.endswith("scaling.type"):
        return "linear"
    return [7] * 4 if isinstance(value, list) else value + 3


@pytest.mark.unit
@pytest.mark.parametrize("name", files.CONFIGS)
def test_keys_that_are_read_change_the_model(tmp_path, name):
    """Another value makes another model, or is an error. Required keys are needed."""
    files.write(tmp_path / "x.gguf", name)
    file = open_gguf(tmp_path / "x.gguf")
    arch = files.arch_of(name)
    base = opened(file)
    same = []
    for key in sorted({key.format(arch=arch, **OTHERS) for key in constants()}):
        if key_role(arch, key) != "read" or not key.startswith(f"{arch}."):
            continue
        changes = {key: another(key, file.metadata.get(key, 0))}
        try:
            same += [key] if opened(file, **changes) == base else []
        except xj.InputError:
            pass
    of_experts = {key for key in same if ".expert_" in key or "dense_block" in key}
    same = {*same} - of_experts if name == "deepseek2-dense" else same
    assert {key.removeprefix(f"{arch}.") for key in same} <= WITH_OTHERS


NEUTRAL = {
    "attention.clamp_kqv": (0.0, 8.0), "expert_weights_scale": (1.0, 2.5), "logit_scale": (1.0, 0.5),
    "attn_logit_softcapping": (0.0, 30.0), "expert_group_count": (1, 4), "attention.sliding_window": (0, 64),
    "attention.scale": (32**-0.5, 0.5), "rope.dimension_count": (32, 16), "attention.value_length": (32, 64),
    "rope.scaling.yarn_ext_factor": (1.0, 0.5), "rope.scaling.yarn_log_multiplier": (0.0, 0.1),
    "rope.scaling.attn_factor": (1.0, 1.19), "expert_gating_func": (1, 2), "rope.scaling.alpha": (0.0, 9.0),
    "use_parallel_residual": (False, True), "expert_weights_norm": (True, False),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_that_is_not_supported_is_named(tmp_path, key):
    """A key is skipped if it has the value at which it does nothing."""
    (neutral, other) = NEUTRAL[key]
    files.write(tmp_path / "x.gguf", "qwen3moe")
    file = open_gguf(tmp_path / "x.gguf")
    assert opened(file, **{f"qwen3moe.{key}": neutral}) == opened(file)
    with pytest.raises(xj.InputError, match=f"{key} {other} is .*(support|yarn)"):
        opened(file, **{f"qwen3moe.{key}": other})


@pytest.mark.unit
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "gemma3"])
def test_keys_of_another_converter(tmp_path, name):
    """Ollama writes these next to the keys of llama.cpp, from the same checkpoints."""
    files.write(tmp_path / "x.gguf", name)
    file = open_gguf(tmp_path / "x.gguf")
    width = opened(file)[0]["head_dim"]
    others = {"attention.head_dim": width, "norm_top_k_prob": True, "rope.mrope_section": [1, 2, 3]}
    changes = {f"{name}.{key}": value for key, value in others.items()}
    changes |= {"tokenizer.ggml.add_unknown_token": False, "tokenizer.ggml.eos_token_ids": [1, 2]}
    assert opened(file, **changes) == opened(file)
    for key in ("attention.head_dim", "norm_top_k_prob"):
        with pytest.raises(xj.InputError, match=f"{key} .* is not supported"):
            opened(file, **{f"{name}.{key}": 3 * width})
    if name == "gemma3":
        absent = {"gemma3.rope.freq_base_swa": None}
        swa = opened(file, **absent | {"gemma3.rope.freq_base_swa": 5e3})
        assert opened(file, **absent | {"gemma3.rope.local.freq_base": 5e3}) == swa != opened(file)


LATENTS = {  # of each case the metadata without "deepseek2.", and the error
    "key-heads": ({"attention.head_count_kv": 4}, "attention.head_count_kv must be 1, got 4"),
    "latent": ({"attention.kv_lora_rank": 64}, "attention.(key|value)_length .* is not supported: only "),
    "rotated": ({"rope.dimension_count": 80}, "qk_nope_head_dim must be a number above 0"),
    "scores": ({"expert_gating_func": 3}, "expert_gating_func 3 is not supported: only 1 and 2 are"),
    "norm": ({"expert_gating_func": 1}, "expert_weights_norm true is supported with the sigmoid of scores"),
    "groups": ({"expert_group_count": 3}, "n_routed_experts 8 is not a multiple of n_group 3"),
    "factor": ({"rope.scaling.attn_factor": 2.0}, "yarn_log_multiplier 0.1 is supported with yarn, and wit"),
    "linear": ({"rope.scaling.type": "linear"}, "yarn_log_multiplier 0.1 is supported with yarn, and with"),
    "indexer": ({"attention.indexer.top_k": 64}, "attention.indexer.top_k 64 is not supported"),
    "no-rank": ({"attention.kv_lora_rank": None}, "deepseek2.attention.kv_lora_rank is absent, and the"),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("name", LATENTS)
def test_keys_of_latents_and_groups_that_do_not_fit(tmp_path, name):
    (changes, message) = LATENTS[name]
    files.write(tmp_path / "x.gguf", "deepseek2")
    with pytest.raises(xj.InputError, match=message):
        opened(open_gguf(tmp_path / "x.gguf"), **{f"deepseek2.{key}": x for key, x in changes.items()})


@pytest.mark.unit
def test_absent_keys_of_latents_and_groups(tmp_path):
    """Older files do not name groups. Files of GLM-4.7-Flash do not say how experts are scored, and have a
    bias of the choice.
    """
    absent = ("expert_group_count", "expert_group_used_count", "expert_gating_func")
    for name in ("deepseek2", "deepseek2-softmax", "glm4moe"):
        files.write(tmp_path / "x.gguf", name)
        file = open_gguf(tmp_path / "x.gguf")
        (wanted, _, _) = opened(file)
        arch = files.arch_of(name)
        (config, _, _) = opened(file, **{f"{arch}.{key}": None for key in absent})
        assert config["model_type"] == wanted["model_type"]
        assert config["layers"][1]["feed_forward"]["router"]["n_group"] == 1


_KV = "attention.head_count_kv"
STATES = {  # of each case the architecture, the metadata without its name, and the error
    "bamba": ("granitehybrid", {"rope.scaling.finetuned": True}, "finetuned must be false: files of Bamba"),
    "bamba-too": ("granitehybrid", {"rope.scaling.finetuned": None}, "finetuned must be false: files of B"),
    "no-rope": ("granite", {"rope.scaling.finetuned": False}, "finetuned must be true: the family has RoPE"),
    "no-keys": ("granitemoe", {_KV: [2, 0]}, r"head_count_kv \[2, 0\] is not supported: all layers have att"),
    "few-layers": ("granitehybrid", {_KV: [0]}, r"attention.head_count_kv is \[0\], for 2 layers"),
    "two-numbers": ("lfm2", {_KV: [2, 4]}, r"head_count_kv \[2, 4\] is not supported: only one number and 0"),
    "negative": ("lfm2", {_KV: [0, -2]}, r"attention.head_count_kv is \[0, -2\], for 2 layers"),
    "text": ("nemotron_h", {"feed_forward_length": "9"}, "feed_forward_length is '9', for 3 layers"),
    "no-conv": ("lfm2", {"shortconv.l_cache": None}, "lfm2.shortconv.l_cache is absent"),
    "short-conv": ("lfm2moe", {"shortconv.l_cache": 1}, "conv_L_cache must be at least 2, got 1"),
    "scores": ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func 1 is not supported, only 2"),
    "inner": ("mamba2", {"ssm.inner_size": 130}, "ssm.inner_size is not a multiple of ssm.time_step_rank"),
    "groups": ("nemotron_h_moe", {"ssm.group_count": 3}, "mamba_num_heads 4 is not a multiple of n_groups 3"),
    "no-shared": ("nemotron_h_moe", {"expert_shared_count": 2}, "n_shared_experts 2 is not supported"),
    "causal": ("mamba2", {"attention.causal": False}, "causal false is not supported for models with states"),
    "norms": ("mamba2", {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms True is not supported"),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", STATES)
def test_keys_of_states_that_do_not_fit(tmp_path, name):
    (arch, changes, message) = STATES[name]
    files.write(tmp_path / "x.gguf", arch)
    with pytest.raises(xj.InputError, match=message):
        opened(open_gguf(tmp_path / "x.gguf"), **{f"{arch}.{key}": x for key, x in changes.items()})


ERRORS = {
    "unknown": ({"qwen3.new_key": 3}, "qwen3.new_key 3 is not supported: load this model's Hugging Face"),
    "token-key": ({"tokenizer.ggml.new_key": 3}, "tokenizer.ggml.new_key 3 is not supported"),
    "adapter": ({"general.type": "adapter"}, "general.type 'adapter' is not supported, only model"),
    "no-norm": ({"qwen3.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is absent"),
    "no-context": ({"qwen3.context_length": None}, "qwen3.context_length is absent"),
    "pooling": ({"qwen3.pooling_type": 7}, "pooling_type must be from 0 to 4, got 7"),
    "factor": ({"qwen3.rope.scaling.factor": "4"}, "rope.scaling.factor must be a number from 0 on, got '4'"),
    "causal": ({"qwen3.attention.causal": 0}, "is_causal must be true or false, got 0"),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("name", ERRORS)
def test_errors(tmp_path, name):
    (changes, message) = ERRORS[name]
    files.write(tmp_path / "x.gguf", "qwen3")
    with pytest.raises(xj.InputError, match=message):
        opened(open_gguf(tmp_path / "x.gguf"), **changes)


@pytest.mark.unit
def test_absent_keys_have_the_defaults_of_the_format(tmp_path):
    """The defaults are not the ones of a family in transformers: Qwen3's heads are 128 wide, and Qwen2 has 32
    of keys.
    """
    for name in ("qwen2", "qwen3"):
        files.write(tmp_path / "x.gguf", name)
        file = open_gguf(tmp_path / "x.gguf")
        absent = ("attention.key_length", "attention.head_count_kv", "rope.freq_base")
        (config, _, _) = opened(file, **{f"{name}.{key}": None for key in absent})
        assert (config["head_dim"], config["num_key_value_heads"]) == (16, 4)
        assert config["rope"]["rope_theta"] == 1e4


SCALINGS = {  # of each case the metadata, the type and factor of RoPE, and the factor on cos and sin
    "old": ({"scale_linear": 4.0}, ("linear", 4.0, None)),
    "typeless": ({"scaling.factor": 4.0}, ("linear", 4.0, None)),
    "none": ({"scaling.factor": 4.0, "scaling.type": "none"}, ("default", 1.0, None)),
    "factor-zero": ({"scaling.factor": 0.0, "scaling.type": "linear"}, ("default", 1.0, None)),
    "yarn": ({"scaling.factor": 4.0, "scaling.type": "yarn"}, ("yarn", 4.0, None)),
    "yarn-times": ({"scaling.factor": 4.0, "scaling.type": "yarn", "scaling.attn_factor": 1.5},
        ("yarn", 4.0, 1.5 * (0.1 * math.log(4) + 1))),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_is_that_of_llama_cpp(tmp_path, name):
    (changes, wanted) = SCALINGS[name]
    files.write(tmp_path / "x.gguf", "qwen2")
    (config, _, _) = opened(
        open_gguf(tmp_path / "x.gguf"), **{f"qwen2.rope.{key}": x for key, x in changes.items()}
    )
    rope = config["rope"]
    assert (rope["rope_type"], rope["factor"], rope["attention_factor"]) == wanted
    if rope["rope_type"] == "yarn":
        assert rope["original_max_position_embeddings"] == config["max_position_embeddings"]


@pytest.mark.unit
def test_divisors_beside_a_scaling_are_an_error(tmp_path):
    files.write(tmp_path / "x.gguf", "llama")
    with pytest.raises(xj.InputError, match="rope.scaling.type linear with factor 2.0 is not supported for"):
        opened(open_gguf(tmp_path / "x.gguf"), **{"llama.rope.scaling.factor": 2.0})


def test_vectors_and_defaults_of_sampling(tmp_path):
    """The pooling is that of the file, attention sees later tokens if it says so, as do samplers."""
    path = tmp_path / "x.gguf"
    metadata = {f"tokenizer.ggml.{key}": value for key, value in WORDS.items()}
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_p": 0.9}
    metadata |= {"ARCH.pooling_type": 3, "tokenizer.ggml.suppress_tokens": [7], **sampling}
    files.write(path, "qwen3", metadata=metadata)
    model = xj.load_model(path, "float32")
    assert model.embedding.pooling == "last" and model.embedding.normalize
    ids = [[3, 4, 5]]
    np.testing.assert_array_equal(xj.embed_texts(model, ids), xj.embed_texts(model, ids, pooling="last"))
    settings = xj.SamplingConfig.from_hf(model.generation_config)
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.5, 0.9, 0)
    assert settings.forbidden_token_ids == [7]
    files.write(path, "qwen3", metadata={"ARCH.attention.causal": False})
    both = xj.load_model(path, "float32")
    assert both.config.layers[0].attention.ahead and both.generation_config == {}


def test_factors_of_matrices(tmp_path):
    """`.scale` is a factor of a matrix, as of NVFP4's, or one for each expert. `.input_scale` is not used."""

    kind = gguf.GGMLQuantizationType.NVFP4
    blocks = np.random.default_rng(0).integers(0, 127, (64, 36), np.uint8)  # a row of 64 numbers each

    def change(stored):
        stored["blk.0.attn_q.weight"] = (blocks, kind)
        stored["blk.0.attn_q.scale"] = (np.array([0.25], np.float32), files.F32)
        stored["blk.0.attn_q.input_scale"] = (np.array([3.0], np.float32), files.F32)
        stored["blk.0.ffn_gate_exps.scale"] = (np.arange(1, 5, dtype=np.float32), files.F32)

    of = lambda own, shape: files.Q8_0 if "gate_exps" in own else files.F32  # noqa: E731
    path = tmp_path / "x.gguf"
    config, tensors = files.write(path, "qwen3moe", of, hf=dict(num_attention_heads=2), change=change)
    wanted = cases.params_from(config, tensors)["layers"][0]["experts"]["gate"]["weight"]
    layer = xj.load_model(path, "float32").params["layers"][0]
    np.testing.assert_array_equal(layer["q"]["weight"], 0.25 * gguf.dequantize(blocks, kind))
    gate = wanted * np.arange(1, 5)[:, None, None]
    np.testing.assert_allclose(layer["experts"]["gate"]["weight"], gate, rtol=1e-6)


def test_the_head_of_a_reranker(tmp_path):
    """Its rows are those of the tokens yes and no of the model's own head. Another classifier is an error."""
    tokens = ["y", "e", "s", "n", "o", "ye", "yes", "no"]
    words = dict(WORDS, tokens=tokens, merges=["y e", "ye s", "n o"])
    metadata = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    metadata |= {"ARCH.pooling_type": 4, "ARCH.classifier.output_labels": ["yes", "no"]}

    def change(rows):
        def add(stored):
            head = stored["output.weight"][0]
            stored["cls.output.weight"] = (np.ascontiguousarray(head[rows]), files.F32)

        return add

    path = tmp_path / "x.gguf"
    files.write(path, "qwen3", metadata=metadata, change=change([6, 7]))
    model = xj.load_model(path, "float32")
    assert model.embedding is None and model.tokenizer.encode("yes") == [6]
    files.write(path, "qwen3", metadata=metadata, change=change([5, 7]))
    assert "its head has no row of the token 'yes': only rerankers with the labels" in tiny.load_error(path)
    files.write(path, "qwen3", metadata=metadata)
    assert "is a classifier of ['yes', 'no']: only rerankers" in tiny.load_error(path)
