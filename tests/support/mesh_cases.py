"""The cases of test_meshes.py, over 8 virtual devices.

Run as a program with names of cases, as `gemma2-4` of a family over four devices, it prints a JSON object
with the error of each case. "": it passed.
"""

import dataclasses
import importlib.util
import json
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import compiling
import draft_cases
import jax
import jax.numpy as jnp
import mtp_cases
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from layer_changes import with_experts
from parity_cases import CASES, random_tensors
from random_matrices import random_params, write_checkpoint
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.draft_heads import draft as draft_head
from xinfer_jax.families.reading import from_hf
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.generation.batch_arrays import initial_state, pad_prompts
from xinfer_jax.generation.loop import DECODE, PREFILL
from xinfer_jax.generation.strategies import Plain
from xinfer_jax.generation.validation import validate_call
from xinfer_jax.model.decoder import Inputs
from xinfer_jax.model.extras import NO_EXTRAS

# Small checkpoints of families, one or two layers of each kind. 8 heads, 4 key heads: on 8 devices these are
# repeated.
_KINDS = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    family: CASES[name].hf | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8) | more
    for family, name, more in (
        ("qwen2", "qwen2-window-layer-types", _KINDS),
        ("qwen3", "qwen3-head-dim-tied", dict(num_hidden_layers=1)),
        ("qwen3_moe", "moe-some-layers-dense", dict(num_experts=8, num_hidden_layers=2)),
        ("olmo3", "olmo3-yarn-old", _KINDS),
        (
            "gemma4",
            "gemma4-shared-kv",
            dict(
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_kv_shared_layers=2,
                enable_moe_block=True,
                num_experts=8,
                top_k_experts=2,
                moe_intermediate_size=24,
                attention_k_eq_v=True,
                num_global_key_value_heads=2,
            ),
        ),
        ("glm4_moe", "glm4-moe-groups", dict(num_hidden_layers=2)),
        ("deepseek_v3", "deepseek-v3-yarn-groups", dict(num_hidden_layers=2, num_key_value_heads=8)),
        ("gpt_oss", "gpt-oss-published", _KINDS),
        (
            "qwen3_next",
            "qwen3-next-sparse-step",
            dict(
                num_hidden_layers=2,
                full_attention_interval=2,
                num_experts=8,
                linear_num_key_heads=8,
                linear_num_value_heads=16,
                shared_expert_intermediate_size=16,
            ),
        ),
        (
            "lfm2",
            "lfm2-bias-untied-layer-types",
            dict(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        ),
        ("mamba2", "mamba2-bias-tied", dict(num_hidden_layers=2, head_dim=12, n_groups=2)),
    )
}
# Families whose layers are made of the parts of those above, by the first case of each that generates.
OTHERS = {
    case.hf["model_type"]: case.hf
    for case in reversed(CASES.values())
    if case.hf["model_type"] not in {hf["model_type"] for hf in FAMILIES.values()} and case.continued_prompts
}
ONE_LAYER = dict(num_hidden_layers=1, layer_types=["full_attention"])
TOKENS = np.arange(2 * 12, dtype=np.int32).reshape(2, 12) % 90
LENGTHS = np.array([12, 7], np.int32)
FORWARD = jax.jit(xj.forward, static_argnums=1)
DRAWN = xj.SamplingConfig(temperature=0.9, top_k=20, top_p=0.95)
EVERY = dataclasses.replace(
    DRAWN, min_p=0.001, typical_p=0.99, presence_penalty=0.1, frequency_penalty=0.1, no_repeat_ngram_size=3,
    min_tokens=2, repetition_penalty=1.1, logit_bias={3: 1.0}, xtc_probability=0.5, xtc_threshold=0.02,
    dry_multiplier=0.5, dry_allowed_length=1,
)  # fmt: skip


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), ("model",), devices=jax.devices()[:devices])


def collectives(compiled: Any) -> Counter:
    """Counts collectives of each kind and shape in the compiled text."""
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())
    return Counter(f"{kind} {re.sub(r'[{][^}]*[}]', '', shape)}" for shape, kind in found)


def assert_close(one: Any, other: Any, bound: float) -> None:
    one = np.asarray(one, np.float32)
    other = np.asarray(other, np.float32)
    off = np.abs(one - other).max() / np.abs(other).max()
    assert off <= bound, f"{off} of the scale, {bound} allowed"


@partial(jax.jit, static_argnums=1)
def _prompt_and_step(params: Any, config: Any, *rows: Any) -> tuple[jax.Array, jax.Array]:
    """The logits of prompts, which go into a cache, and of a token after each."""
    tokens_BT, num_tokens_B, token_B = rows
    cache = xj.init_cache(config, len(token_B), 32)
    prompt_BTV, cache = xj.forward(params, config, tokens_BT, cache, num_tokens_B)
    return prompt_BTV, xj.decode_step(params, config, token_B, cache)[0]


def family(name: str, devices: int) -> None:
    """Logits of a prompt and of a decode step are those of one device."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), (FAMILIES | OTHERS)[name], fused=devices > 2)
        one = xj.load_model(path, "float32")
        over = xj.load_model(path, "float32", mesh=mesh_of(devices))
    rows = TOKENS, LENGTHS, np.array([7, 9], np.int32)
    wanted, found = (_prompt_and_step(model.params, model.config, *rows) for model in (one, over))
    valid = np.arange(12) < LENGTHS[:, None]
    assert_close(np.asarray(found[0])[valid], np.asarray(wanted[0])[valid], 1e-5)
    assert_close(found[1], wanted[1], 1e-5)


def count_collectives(
    settings: xj.SamplingConfig, logprobs: int = 0, step: bool = True, name: str = "qwen2", **changed: Any
) -> Counter:
    """Counts the collectives of a decode step, or of the prefill of a prompt."""
    hf = FAMILIES[name] | changed
    with tempfile.TemporaryDirectory() as folder:
        model = xj.load_model(write_checkpoint(Path(folder), hf), "float32", mesh=mesh_of(4))
    params = model.params
    config = model.config
    options = xj.GenerateOptions(max_tokens=4, sampling=settings, logprobs=logprobs)
    call = validate_call(params, config, [[1, 2, 3], [4, 5]], options, jax.random.key(0))
    cache = xj.init_cache(config, 2, 32, mesh=mesh_of(4))
    state = initial_state(call, np.arange(2, dtype=np.int32))
    if step:
        constants = params, NO_EXTRAS
        lowered = DECODE.lower(Plain(config), constants, (state, cache), np.int32(3), RunConfig())
    else:
        inputs = Inputs(*pad_prompts(call.prompts, 16))
        lowered = PREFILL.donating.lower(params, config, inputs, NO_EXTRAS, cache, 512, RunConfig())
    return collectives(lowered.compile())


def collectives_of_a_layer() -> None:
    """Two all-reduces of [.., D] a layer, one for the embedding; a norm over all heads adds a small one."""
    for name in ("qwen2", "qwen3_moe", "olmo3"):
        found = count_collectives(xj.SamplingConfig(), step=False, name=name)
        layers = FAMILIES[name]["num_hidden_layers"]
        joint = {"all-reduce f32[2,16,2]": layers} if name == "olmo3" else {}
        assert found == {"all-reduce f32[2,16,48]": 2 * layers + 1} | joint, found


def collectives_of_sampling() -> None:
    """Outside the layers only a few numbers of each row and device are sent: no logits."""
    for settings, logprobs, most, changed in (
        (xj.SamplingConfig(), 0, 14, {}),
        (DRAWN, 0, 14, {}),
        (EVERY, 0, 25, {}),  # three are XTC's: the largest logit, the sum of probabilities, the least likely
        (EVERY, 3, 28, {}),
        (EVERY, 3, 29, dict(vocab_size=97)),
    ):
        found = count_collectives(settings, logprobs, **changed)
        if changed:  # after the last step: results of a program cannot be sharded unevenly
            assert found.pop("all-gather pred[2,100]") == found.pop("all-gather s32[2,100]") == 1
        assert found.pop("all-reduce f32[2,1,48]") == 5
        for what in found:
            sizes = [
                np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\[([\d,]+)\]", what)
            ]
            assert max(sizes) <= 2 * 4 * max(1, logprobs), found
        # Of all branches together. Find out why before you write another number here.
        assert sum(found.values()) <= most, found


def formats() -> None:
    """The leaves of each format are those of one device, where their parts are quantized alike; so are logits
    of each product.
    """
    import quantized_checkpoints as files

    hf = tiny.UNTIED | dict(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float32": write_checkpoint(Path(folder) / "float", hf, shards=2)}
        settings, how = files.CASES["gptq-act-order"]
        path, _ = files.write(Path(folder) / "80", settings | dict(group_size=80), hf, **how)
        with pytest.raises(xj.InputError, match="groups of 80 do not divide"):
            xj.load_model(path, "float32", mesh=mesh_of(2))
        settings, how = files.CASES["awq"]  # groups of 48 become smaller, with equal scales
        paths["awq-48"], _ = files.write(Path(folder) / "48", settings | dict(group_size=48), hf, **how)
        for name in ("awq", "gptq-act-order", "gptq-8"):
            settings, how = files.CASES[name]
            paths[name], _ = files.write(Path(folder) / name, settings, hf, **how)
        model = xj.load_model(paths["float32"], "float32", "int4")
        xj.save_model(model.params, model.config, Path(folder) / "own-int4")
        paths["own-int4"] = Path(folder) / "own-int4"
        for name in ("awq", "gptq-act-order"):
            over = xj.load_model(paths[name], "float32", mesh=mesh_of(2))
            xj.save_model(over.params, over.config, Path(folder) / "again" / name)
            tensors = (
                load_file(path / "model.safetensors") for path in (paths[name], Path(folder) / "again" / name)
            )
            jax.tree.map(np.testing.assert_array_equal, *tensors)
        loads = [(name, None) for name in paths] + [("float32", "int8"), ("float32", "int4")]
        for name, quantize in loads:
            # Two key heads are repeated on four devices.
            for devices in (2, 4) if name in ("float32", "awq") else (2,):
                is_new = quantize or name in ("gptq-act-order", "gptq-8") or (name, devices) == ("awq", 4)
                _same_leaves(name, paths[name], quantize, devices, logits=bool(is_new))


def bitnet_files() -> None:
    """A byte holds outputs of all devices, a word holds 32 inputs. A token has one scale on all devices."""
    import bitnet_checkpoints as files

    hf = files.HF | dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    hf |= dict(num_hidden_layers=1)
    with tempfile.TemporaryDirectory() as folder:
        for way, devices in (("bitlinear", 2), ("master", 4)):  # two key heads are repeated on four devices
            path, _ = files.checkpoint(Path(folder) / way, way, hf)
            _same_leaves("bitnet", path, None, devices)
            models = (xj.load_model(path, "float32", mesh=mesh) for mesh in (None, mesh_of(devices)))
            one, over = (np.asarray(FORWARD(m.params, m.config, TOKENS)[0]) for m in models)
            assert np.median(np.abs(one - over)) < 1e-5  # few activations are rounded differently
        path, _ = files.checkpoint(Path(folder) / "odd", "master", hf | dict(intermediate_size=80))
        with pytest.raises(xj.InputError, match="has 40 inputs for each of 2 devices, which groups of 32"):
            xj.load_model(path, mesh=mesh_of(2))


def int8_activations() -> None:
    """A token has one scale over the inputs of all devices, in a dense model and in a hybrid with experts.
    Key heads of the dense one are repeated on four devices. Blocks of its rotations are whole on each.
    """
    dense = FAMILIES["qwen2"] | ONE_LAYER
    dense |= dict(intermediate_size=256, num_key_value_heads=2, head_dim=32)
    hybrid = FAMILIES["qwen3_next"] | dict(
        intermediate_size=128, shared_expert_intermediate_size=128, linear_value_head_dim=16, head_dim=16
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "small", dense | dict(intermediate_size=64))
        with pytest.raises(xj.InputError, match="32 inputs for each of 2 devices, which groups of 64 do not"):
            xj.load_model(path, mesh=mesh_of(2), quantize="int8", activations="int8")
        for name, method, hf, devices in (
            ("dense", "int8", dense, 4), ("hybrid", "int8", hybrid, 2), ("dense", "int4", dense, 2)
        ):  # fmt: skip
            how = dict(quantize=method, activations="int8")
            path = write_checkpoint(Path(folder) / f"{name}-{method}", hf)
            meshes = None, mesh_of(devices)
            one, over = (xj.load_model(path, "float32", mesh=mesh, **how) for mesh in meshes)
            logits = [np.asarray(FORWARD(m.params, m.config, TOKENS)[0]) for m in (one, over)]
            off = np.abs(logits[0] - logits[1])  # few activations are rounded differently
            assert np.median(off) < 1e-5 and off.max() < 0.02 * np.abs(logits[0]).max(), (name, off.max())


def mxfp4_files() -> None:
    """Each device has some of the experts, as the file has them, or dequantized and quantized anew."""
    import mxfp4_checkpoints as files

    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write(Path(folder), files.HF, weights=files.tensors(), with_tokenizer=False)
        for how in ({}, dict(dequantize=True, quantize="int4")):
            one, over = (xj.load_model(path, "float32", mesh=mesh, **how) for mesh in (None, mesh_of(2)))
            found = [model.params["layers"][1]["experts"]["up"]["weight"].values for model in (one, over)]
            np.testing.assert_array_equal(*found)
            assert found[1].addressable_shards[1].data.shape == (4, *found[0].shape[1:])
            if not how:
                wanted, found = (FORWARD(m.params, m.config, TOKENS)[0] for m in (one, over))
                assert_close(found, wanted, 1e-5)


def gguf_leaves() -> None:
    """Groups stay whole on each device: of a hybrid with experts, also in another order. A block of a K-quant
    is on both devices.
    """
    if importlib.util.find_spec("gguf") is None:
        return
    import gguf_files as files

    kinds = (files.Q8_0, files.Q4_0, files.MXFP4, files.F16)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama", "qwen35moe", "gpt-oss"):
            path = Path(folder) / f"{name}.gguf"
            hf = dict(intermediate_size=256) if name == "llama" else dict(vocab_size=95)

            def of(own: str, shape: tuple[int, ...]) -> Any:
                kind = kinds[3 if "conv1d" in own else sum(own.encode()) % 4]
                return files.Q4_K if shape[-1] == 256 else kind

            files.write(path, name, of, hf)
            leaves = [jax.tree.leaves(xj.load_model(path, mesh=mesh).params) for mesh in (None, mesh_of(2))]
            for one, over in zip(*leaves, strict=True):
                whole = np.asarray(over)[tuple(map(slice, one.shape))]  # the vocabulary is padded
                np.testing.assert_array_equal(whole, one)
                assert over.sharding.is_fully_replicated or over.addressable_shards[0].data.size < over.size


def scaled_files() -> None:
    """Blocks of FP8 that devices and heads of linear attention cross, and that stay; a mixture in W4A16."""
    import scaled_checkpoints as files

    kept = files.fp8_settings([128, 128]), files.fp8((128, 128))
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, layers, settings, encode, is_fused, quantize) in enumerate((
            ("qwen3-next-sparse-step", 3, files.fp8_settings([10, 14]), files.fp8((10, 14)), True, None),
            ("qwen3-5-moe-no-shared", 2, files.w4(16), files.integers(4, 16), False, None),
            ("moe-defaults", 2, *kept, False, "fp8"),
        )):  # fmt: skip
            hf = CASES[name].hf | dict(num_hidden_layers=layers)
            path, _ = files.checkpoint(Path(folder) / str(i), hf, settings, encode, is_fused, 2)
            one, over = (xj.load_model(path, "float32", quantize, mesh) for mesh in (None, mesh_of(2)))
            assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(over.params)} == {2}
            wanted, found = (np.asarray(FORWARD(m.params, m.config, TOKENS)[0]) for m in (one, over))
            assert_close(found, wanted, 1e-4)
            experts = [m.params["layers"][1]["experts"]["up"]["weight"] for m in (one, over)]
            jax.tree.map(np.testing.assert_array_equal, *experts)


def _same_leaves(name: str, path: Path, quantize: str | None, devices: int, logits: bool = True) -> None:
    one = xj.load_model(path, "float32", quantize)
    try:
        over = xj.load_model(path, "float32", quantize, mesh_of(devices))
    except xj.InputError as error:
        assert "groups of" in str(error) or "equal parts" in str(error), (name, devices, str(error))
        assert (name, devices) == ("own-int4", 2), (name, devices, str(error))
        return
    dequantize = jax.jit(partial(xj.params.dequantize, dtype="float32"))
    trees = [jax.device_get(dequantize(jax.device_get(x.params))) for x in (one, over)]
    known = jax.tree_util.tree_leaves_with_path(trees[0])
    for (place, wanted), found in zip(known, jax.tree.leaves(trees[1]), strict=True):
        where = jax.tree_util.keystr(place)
        if re.match(r"\['(embed|lm_head)'\]", where):
            assert not found[one.config.vocab_size :].any()
            found = found[: one.config.vocab_size]
        if wanted.shape != found.shape:  # key heads that are repeated
            heads = one.config.num_key_value_heads
            width = one.config.head_dim
            assert re.search(r"'[kv]'\]", where) and devices > heads
            by_head = wanted.reshape(heads, width, -1)
            wanted = np.repeat(by_head, devices // heads, 0).reshape(found.shape)
        if quantize == "int4" and re.search(r"'(o|down)'\]", where):  # groups may be smaller
            assert_close(found, wanted, 1 / 7)  # one step of int4
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=f"{name} {quantize} {devices} {where}")
    for leaf in jax.tree.leaves(over.params):
        assert len(leaf.sharding.device_set) == devices
    if not logits:
        return None
    wanted, found = (np.asarray(FORWARD(m.params, m.config, TOKENS)[0]) for m in (one, over))
    if not quantize:
        return assert_close(found, wanted, 1e-5 if name == "float32" else 0.02)
    exact = xj.load_model(path, "float32")  # the error is no larger than on one device
    exact_BTV = np.asarray(FORWARD(exact.params, exact.config, TOKENS)[0])
    lost, lost_on_one = (np.square(x - exact_BTV).mean() for x in (found, wanted))
    assert lost <= 1.2 * lost_on_one, (quantize, devices, lost, lost_on_one)


def an_engine() -> None:
    """Runs an engine with a vocabulary that devices do not divide, and with a caller's processor and vector.
    A request gets the bits that it gets alone, nothing is compiled after warm-up, and the cache is sharded
    over heads.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), FAMILIES["qwen2"] | ONE_LAYER | dict(vocab_size=97))
        one = xj.load_model(path, "float32")
        over = xj.load_model(path, "float32", mesh=mesh_of(4))
    prompts = [(np.arange(n) % 90).tolist() for n in (3, 70, 20, 130)]
    penalized = dataclasses.replace(DRAWN, repetition_penalty=1.1)
    settings = xj.SamplingConfig(), DRAWN, penalized, DRAWN
    options = [xj.GenerateOptions(max_tokens=8, sampling=each, eos_token_ids=()) for each in settings]
    noisy = dict(processors=dict(noise=3.0), taps=dict(up=2.0))
    options[3] = dataclasses.replace(options[3], **noisy)
    together_key = jax.random.split(jax.random.key(1), 4)
    keys = [together_key[i : i + 1] for i in range(4)]

    def add_noise(by_B, logits_BV, context):
        return logits_BV + by_B[:, None] * jax.vmap(lambda key: jax.random.normal(key, (97,)))(context.key_B)

    vector = np.linspace(-1, 1, one.config.hidden_size)
    shape = dict(rows=3, capacity=192, pages=10, chunk=64, taps=dict(up={0: vector}))
    shape["processors"] = dict(noise=(xj.LogitsProcessor(None, add_noise), 1.0))
    with xj.Engine(over, **shape) as engine:
        with compiling.programs() as seen:
            together = engine.generate(prompts, options, key=together_key)
            each = zip(prompts, options, keys, strict=True)
            alone = [engine.submit(p, o, key=k).result() for p, o, k in each]
            scored = engine.submit(prompts[1], options[0], prompt_logprobs=2)
            scored.result()
        assert not seen, seen
        assert [out.tokens for out in together] == [out.tokens for out in alone]
        assert [out.logprobs for out in together] == [out.logprobs for out in alone]
        pool = engine.core.device.pools[0][0]
        assert pool.sharding.shard_shape(pool.shape)[1] == 1
        assert engine.stats.pages_used == 0
    with xj.Engine(one, **shape) as engine:
        wanted = engine.generate(prompts, options, key=together_key)
        score = engine.submit(prompts[1], options[0], prompt_logprobs=2)
        score.result()
    assert [out.tokens for out in together] == [out.tokens for out in wanted]
    assert [t.top[0][0] for t in scored.prompt_logprobs] == [t.top[0][0] for t in score.prompt_logprobs]
    assert_close(
        [t.logprob for t in scored.prompt_logprobs], [t.logprob for t in score.prompt_logprobs], 1e-5
    )


def caches() -> None:
    """Every kind of cache is sharded over heads and donated. No program is compiled twice."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), FAMILIES["qwen2"] | ONE_LAYER)
        one = xj.load_model(path, "float32")
        over = xj.load_model(path, "float32", mesh=mesh_of(4))
    prompts = [[1, 2, 3], [4, 5]]
    for dtype in ("int8", "gear"):
        options = xj.GenerateOptions(max_tokens=6, cache_dtype=dtype, eos_token_ids=())
        with compiling.programs() as seen:
            outs = [xj.generate(over.params, over.config, prompts, options).tokens for _ in range(2)]
        assert outs[0] == outs[1] == xj.generate(one.params, one.config, prompts, options).tokens
        assert max(seen[name] for name in ("prefill_chunks", "decode", "sample_and_append")) == 1, seen
    with compiling.programs() as seen:
        parts = list(
            xj.stream(
                over.params, over.config, prompts[:1], xj.GenerateOptions(max_tokens=40, eos_token_ids=())
            )
        )
    assert len(parts) == 40 and max(seen.values()) <= 2, seen
    cache = xj.init_cache(over.config, 2, 32, mesh=mesh_of(4))
    inputs = Inputs(*pad_prompts(prompts, 16))
    lowered = PREFILL.donating.lower(over.params, over.config, inputs, NO_EXTRAS, cache, 512, RunConfig())
    compiled = lowered.compile()
    held = sum(x.nbytes // 4 for x in jax.tree.leaves(cache.layers))
    assert compiled.memory_analysis().alias_size_in_bytes >= held


ODD = FAMILIES["qwen3"] | dict(vocab_size=257)
EDGE = ODD["vocab_size"] - 1


def odd_vocabulary() -> None:
    """A vocabulary that devices do not divide gives ids, draws and log-probabilities of one device.

    Also where all logits are below those of padding, which are 0, and the last token is the most probable.
    """
    hf = ODD | dict(tie_word_embeddings=False)
    config = from_hf(hf)
    prompt = [3, EDGE, 7, 3]
    weights = random_tensors(config, 0)
    with tempfile.TemporaryDirectory() as folder:
        hidden_BTD, _ = xj.hidden_states(_params(folder, hf, weights), config, np.array([prompt], np.int32))
        below_V1 = 1 + np.arange(EDGE, -1, -1)[:, None] / EDGE
        weights[tiny.HEAD] = np.array(-hidden_BTD[0, -1] * below_V1 / np.square(hidden_BTD[0, -1]).sum())
        path = tiny.write(Path(folder) / "edge", hf, with_tokenizer=False, weights=weights)
        models = [xj.load_model(path, "float32", mesh=mesh) for mesh in (None, mesh_of(4))]
    assert [model.params["lm_head"]["weight"].shape[0] for model in models] == [257, 260]
    one, over = (_outputs(model, prompt) for model in models)
    assert one[0][0][0][0] == EDGE and (one[1] < 0).all()
    assert over[0] == one[0], (over[0], one[0])
    assert_close(over[1], one[1], 1e-5)
    assert_close(over[2], one[2], 1e-5)


def _params(folder: str, hf: dict[str, Any], weights: dict[str, Any]) -> Any:
    return xj.load_model(tiny.write(Path(folder) / "any", hf, with_tokenizer=False, weights=weights)).params


def _outputs(model: Any, prompt: list[int]) -> tuple[list, np.ndarray, list]:
    """Returns tokens and alternatives, logits, and log-probabilities."""
    tree = (model.params, model.config)
    V = model.config.vocab_size
    settings = [xj.SamplingConfig(), DRAWN, EVERY, xj.SamplingConfig(temperature=5.0)]
    options = xj.GenerateOptions(max_tokens=4, sampling=settings, eos_token_ids=(), logprobs=V, logits=True)
    out = xj.generate(*tree, [prompt, [5], [6, 7], [EDGE]], options, key=jax.random.key(5))
    ids = [out.tokens]
    numbers = [x for row in out.logprobs for x in row]
    for token in [token for row in out.alternatives for token in row]:
        assert sorted(i for i, _ in token.top) == sorted(i for i, _ in token.processed_top) == [*range(V)]
        ids.append([i for i, _ in token.top[:3]])
        numbers += [x for _, x in token.top]
    assert out.logits[0].shape[-1] == V
    return ids, np.asarray(FORWARD(*tree, np.array([prompt], np.int32))[0][0, -1]), numbers


def odd_formats() -> None:
    """Checks, for every format, that the rows of the vocabulary are the rows of one device, then zeros, which
    are not saved.
    """
    import quantized_checkpoints as files

    hf = tiny.UNTIED | dict(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4,
        vocab_size=259,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float32": write_checkpoint(Path(folder) / "float", hf)}
        settings, how = files.CASES["awq-head"]  # 33 words of eight outputs: a device has complete words
        path, _ = files.write(Path(folder) / "awq", settings, hf | dict(vocab_size=264), **how)
        paths["awq-head"] = path
        for quantize in (None, "int8", "int4"):
            own = Path(folder) / f"own-{quantize}"
            over = xj.load_model(paths["float32"], "float32", quantize, mesh_of(2))
            xj.save_model(over.params, over.config, own)
            if quantize != "int4":  # its groups depend on the parts
                one = xj.load_model(paths["float32"], "float32", quantize)
                back = xj.load_model(own, "float32")
                jax.tree.map(np.testing.assert_array_equal, one.params, back.params)
                paths[f"own-{quantize}"] = own
        loads = [(name, None) for name in paths] + [("float32", "int8"), ("float32", "int4")]
        for name, quantize in loads:
            _same_leaves(name, paths[name], quantize, 2, quantize == "int8" or name == "awq-head")
        _same_leaves("awq-head", paths["awq-head"], None, 4, False)


def odd_tree_of_a_user() -> None:
    """`shardings` does not divide the vocabulary. Gradients of either layout are those of one device."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), ODD)
        one = xj.load_model(path, "float32")
        over = xj.load_model(path, "float32", mesh=mesh_of(4))
    config = one.config
    users = jax.device_put(one.params, xj.params.shardings(config, mesh_of(4)))
    assert users["embed"]["weight"].sharding.shard_shape((257, 48)) == (257, 48)
    again = jax.device_put(over.params, xj.params.shardings(config, mesh_of(4), like=over.params))
    assert again["embed"]["weight"].sharding.shard_shape((260, 48)) == (65, 48)

    def loss(params: Any) -> jax.Array:
        return -jnp.mean(xj.score(params, config, TOKENS, LENGTHS).logprobs_BT)

    wanted, of_users, of_loaded = (jax.jit(jax.grad(loss))(p) for p in (one.params, users, over.params))
    rows = np.asarray(of_loaded["embed"]["weight"])
    assert not rows[257:].any()
    of_loaded["embed"]["weight"] = rows[:257]
    for found in (of_users, of_loaded):
        jax.tree.map(lambda a, b: assert_close(a, b, 2e-5), found, wanted)


def tensors_by_name() -> None:
    """Trees that are divided become tensors by name, trees again and files, and stay divided."""
    mesh = mesh_of(2)
    for name in ("phi3-defaults", "moe-some-layers-dense", "qwen3-next-sparse-step"):
        config = CASES[name].config
        params = random_params(config)
        over = jax.device_put(params, xj.params.shardings(config, mesh))
        tensors = xj.params.params_to_tensors(over, config)
        jax.tree.map(np.testing.assert_array_equal, tensors, xj.params.params_to_tensors(params, config))
        divided = [
            x
            for name, x in tensors.items()
            if name.endswith("self_attn.o_proj.weight") or "gate_up_proj" in name or "in_proj" in name
        ]
        assert divided and not any(x.sharding.is_fully_replicated for x in divided)
        back = xj.params.params_from_tensors(config, tensors, mesh=mesh)
        for leaf, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(over), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        with tempfile.TemporaryDirectory() as folder:
            xj.save_model(over, config, Path(folder) / "out", max_shard_bytes=100_000)
            saved = xj.load_model(Path(folder) / "out", "float32").params
        jax.tree.map(np.testing.assert_array_equal, saved, params)
    _repeated_heads_are_saved_once()


def _repeated_heads_are_saved_once() -> None:
    config = CASES["qwen3-bias-mqa"].config
    params = random_params(config)
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one"
        xj.save_model(params, config, one)
        over = xj.load_model(one, "float32", mesh=mesh_of(4))
        assert over.config.num_key_value_heads == 4
        xj.save_model(over.params, over.config, Path(folder) / "again", like=one)
        (first, again) = (load_file(Path(folder) / x / "model.safetensors") for x in ("one", "again"))
        jax.tree.map(np.testing.assert_array_equal, again, first)
        k = over.params["layers"][0]["k"]["weight"]
        layer = {**over.params["layers"][0], "k": {**over.params["layers"][0]["k"], "weight": k.at[0].add(1)}}
        changed = {**over.params, "layers": (layer, *over.params["layers"][1:])}
        with pytest.raises(xj.InputError, match="layers.0.k.weight has key heads that were repeated"):
            xj.save_model(changed, over.config, Path(folder) / "not", like=one)


def gradients() -> None:
    """Gradients of every leaf, over data and model and with fully sharded parameters, in a caller's jit."""
    config = from_hf(FAMILIES["qwen3_moe"] | dict(num_key_value_heads=8))
    params = random_params(config)
    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def loss(params: Any, tokens: Any) -> jax.Array:
        logits, _ = xj.forward(params, config, tokens)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

    wanted = jax.jit(jax.value_and_grad(loss))(params, TOKENS)
    places = xj.params.shardings(config, mesh, fsdp="data")
    placed = jax.device_put(params, places)
    rows = NamedSharding(places["final_norm"].mesh, PartitionSpec("data"))
    of_results = NamedSharding(rows.mesh, PartitionSpec()), places
    run = jax.jit(jax.value_and_grad(loss), out_shardings=of_results)
    found = run(placed, jax.device_put(TOKENS, rows))
    assert_close(found[0], wanted[0], 1e-5)
    for x, y in zip(*map(jax.tree.leaves, (found[1], placed)), strict=True):
        assert x.sharding == y.sharding
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-5), found[1], wanted[1])
    leaf = placed["layers"][0]["q"]["weight"]
    assert leaf.sharding.shard_shape(leaf.shape) == (leaf.shape[0] // 4, leaf.shape[1] // 2)


def rows_over_data() -> None:
    """Runs a plain jit with rows over "data". Caches of each kind stay with their rows, and the results equal
    the results of one device. So do the gradients (`gradients` has the gradients of a mixture).
    """
    for name, dtype, shape in (("qwen3_next", None, (2, 2)), ("qwen2", "gear", (4, 1))):
        only = ONE_LAYER if name == "qwen2" else dict(num_hidden_layers=1)  # of linear attention
        settings = DRAWN if name == "qwen3_next" else xj.SamplingConfig()
        config = from_hf(FAMILIES[name] | only)
        params = random_params(config)
        keys = jax.random.split(jax.random.key(1), 8)
        inputs = np.tile(TOKENS, (4, 1)), np.tile(LENGTHS, 4)

        @jax.jit
        def rollout(params, tokens_BT, num_tokens_B, keys, config=config, dtype=dtype, settings=settings):
            cache = xj.init_cache(config, 8, 112, dtype)
            logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
            out = xj.decode_loop(params, config, logits_BV, cache, keys, settings, jnp.array([3]), 4)
            return out.tokens_BT, out.logprobs_BT, out.cache

        wanted = rollout(params, *inputs, keys)
        mesh = jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
        over = jax.device_put(params, xj.params.shardings(config, mesh))
        args = over, *jax.device_put((*inputs, keys), NamedSharding(mesh, PartitionSpec("data")))
        compiled = rollout.lower(*args).compile()
        gathered = [x for x in collectives(compiled) if re.search(r"all-(gather|to-all).*\[8,\d+,\d+,\d", x)]
        assert not gathered, (name, shape, gathered)
        found = compiled(*args)
        assert (np.asarray(found[0]) == np.asarray(wanted[0])).all(), (name, shape)
        assert_close(found[1], wanted[1], 1e-5)
        assert all(x.sharding.spec[:1] == ("data",) for x in jax.tree.leaves(found[2].layers)), found[2]
        if name == "qwen3_next":
            score = lambda params, *inputs: xj.score(params, config, *inputs).logprobs_BT.sum()  # noqa: B023, E731
            gradients = [jax.jit(jax.grad(score))(*given[:3]) for given in (args, (params, *inputs))]
            jax.tree.map(partial(assert_close, bound=1e-4), *gradients)


def training() -> None:
    """Gradients on 2 × 2 devices are those of one: of layers computed again, stacked layers, packed texts and
    given experts.
    """
    config = from_hf(
        FAMILIES["qwen3_moe"] | dict(mlp_only_layers=[], decoder_sparse_step=1, use_sliding_window=False)
    )
    params = random_params(config)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    over = jax.device_put(params, xj.params.shardings(config, mesh))
    draws = np.random.default_rng(0).random((*TOKENS.shape, 2, config.num_experts)).argsort(-1)
    given = dict(routed_experts=draws[..., : config.num_experts_per_tok].astype(np.int32))
    segments = dict(segment_ids_BT=(np.arange(12) >= [[5], [8]]).astype(np.int32))

    def gradient(params: Any, arrays: Any, place: Any = None, **how: Any) -> Any:
        def loss(params: Any, tokens_BT: Any, arrays: Any) -> jax.Array:
            return xj.score(params, config, tokens_BT, **arrays, **how).logprobs_BT.sum()

        return jax.jit(jax.grad(loss))(params, *jax.device_put((TOKENS, arrays), place))

    rows = NamedSharding(mesh, PartitionSpec("data"))
    wanted = gradient(params, segments | given)
    stacked = gradient(xj.params.stack_layers(over, config), segments | given, rows, remat="layer")
    for tree in (gradient(over, segments | given, rows), xj.params.unstack_layers(stacked)):
        jax.tree.map(partial(assert_close, bound=1e-4), tree, wanted)


def adapters() -> None:
    """Runs adapters over devices that repeat key heads and pad the vocabulary. The logits equal the logits of
    one device: for one adapter, also of embedding and head, and for one adapter per row.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = tiny.write(Path(folder) / "model", tiny.UNTIED | dict(vocab_size=286))
        one = xj.load_model(config, "float32")
        mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
        over = xj.load_model(config, "float32", mesh=mesh)
        targets = ["q", "k", "v", "o", "down", "embed", "lm_head"]
        adapter = xj.lora.init_adapter(one.config, jax.random.key(0), 3, targets)
        noise = iter(jax.random.split(jax.random.key(1), 1000))
        adapter = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape), adapter)
        xj.lora.save_adapter(adapter, one.config, Path(folder) / "adapter")
        loaded = xj.lora.load_adapter(over.config, Path(folder) / "adapter")
        layers = [path for path in loaded.matrices if path.startswith("layers")]
        part = xj.lora.Adapter({path: loaded.matrices[path] for path in layers}, (1.0,) * len(layers))
        assert (
            over.params["layers"][0]["k"]["weight"].shape[0] > one.params["layers"][0]["k"]["weight"].shape[0]
        )
        forward = jax.jit(xj.forward, static_argnums=1)
        for make in (
            lambda params: xj.lora.with_adapter(params, loaded),
            lambda params: xj.lora.with_adapters(params, [part], np.array([0, -1])),
        ):
            wanted, found = (forward(make(x.params), x.config, TOKENS)[0] for x in (one, over))
            assert_close(found, wanted, 1e-5)

        def loss(x, params, config):
            return xj.score(xj.lora.with_adapter(params, x), config, TOKENS).logprobs_BT.sum()

        gradient = jax.jit(jax.grad(loss), static_argnums=2)
        gradients = [gradient(loaded, x.params, x.config) for x in (one, over)]
        jax.tree.map(partial(assert_close, bound=1e-4), *gradients)
    config = from_hf(FAMILIES["qwen3_moe"] | dict(num_hidden_layers=2))
    params = random_params(config)
    adapter = xj.lora.init_adapter(
        config, jax.random.key(0), 3, ["experts.gate", "experts.down", "router", "o"]
    )
    adapter = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape), adapter)
    divided = jax.device_put(
        params,
        xj.params.shardings(
            config, jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
        ),
    )
    wanted, found = (forward(xj.lora.with_adapter(x, adapter), config, TOKENS)[0] for x in (params, divided))
    assert_close(found, wanted, 1e-5)


def draft_heads() -> None:
    """Loads heads in the files of models over four devices. Drafts are the drafts of one device, and key
    heads that were repeated are saved once.
    """
    for name in ("deepseek_v3", "glm4_moe"):
        model = mtp_cases.build(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            xj.save_model(model.params, model.config, path)
            over = xj.load_model(path, "float32", mesh=mesh_of(4), draft_head=True)
            xj.save_model(over.params, over.config, Path(folder) / "again", like=path)
            (first, again) = (load_file(x / "model.safetensors") for x in (path, Path(folder) / "again"))
            jax.tree.map(np.testing.assert_array_equal, again, first)
        head = over.params["draft_head"]["layers"][0]
        assert not head["o"]["weight"].sharding.is_fully_replicated
        unread = mtp_cases.read_prompts(model)
        want = mtp_cases.draft(model, unread)
        found = mtp_cases.draft(over, mtp_cases.read_prompts(over), mesh=mesh_of(4))
        np.testing.assert_array_equal(found.tokens_BT, want.tokens_BT)


def heads() -> None:
    """Draft heads over two devices: tokens and accepted draft tokens of a call and of an engine are those of
    one device. So are they if one device prefills and the other decodes.
    """
    sizes = dict(rows=2, capacity=128, pages=9, chunk=64)
    for name in ("mtp", "dspark", "eagle3"):
        model, draft = draft_cases.draft_case(name)
        prompts = draft_cases.prompts(2, draft_cases.V, seed=1)
        options = xj.GenerateOptions(max_tokens=30, eos_token_ids=())
        drafted = dataclasses.replace(options, draft=draft)
        want = xj.generate(model.params, model.config, prompts, drafted)
        assert sum(map(sum, want.stats.accepted)) > 1, want.stats.accepted
        params = jax.device_put(model.params, xj.params.shardings(model.config, mesh_of(2)))
        found = xj.generate(params, model.config, prompts, drafted)
        assert (found.tokens, found.stats.accepted) == (want.tokens, want.stats.accepted), name
        engines = [xj.Engine(dataclasses.replace(model, params=params), draft=draft, **sizes)]
        if name == "mtp":
            engines.append(xj.Engine(model, draft=draft, **sizes, prefill_devices=[0], decode_devices=[1]))
        for engine in engines:
            with engine:
                outs = engine.generate(prompts, [options] * 2)
            assert [out.tokens[0] for out in outs] == want.tokens, name
            assert [out.stats.accepted[0] for out in outs] == want.stats.accepted, name
        if isinstance(draft, xj.Draft):
            copy = draft_head.place_draft(draft, params).params
            assert copy is draft_head.place_draft(draft, params).params
            assert not copy["layers"][0]["o"]["weight"].sharding.is_fully_replicated


def taps() -> None:
    """Reads and edits by taps over 2 × 2 devices, and of rows that a `jax.shard_map` divides. The results
    equal the results of one device, and so do tokens of a steered model.
    """
    two = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, num_kv_shared_layers=1)
    config = from_hf(FAMILIES["gemma4"] | two | dict(enable_moe_block=False))
    params = random_params(config)
    vector_D = np.random.default_rng(0).standard_normal(config.hidden_size).astype(np.float32)

    def edit(hidden_BTD: Any, vector_D: Any) -> Any:
        return hidden_BTD + vector_D * hidden_BTD[:, :1]

    def reads(params: Any, tokens_BT: Any, vector_D: Any) -> Any:
        places = [(layer, after) for layer in (0, 1) for after in ("attention", "layer")]
        taps = {place: xj.Tap(vector_D, edit, read=True) for place in places}
        return xj.run_model(params, config, tokens_BT, taps=taps).reads

    want = jax.jit(reads)(params, TOKENS, vector_D)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    over = jax.device_put(params, xj.params.shardings(config, mesh))
    tokens_BT = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data")))
    jax.tree.map(partial(assert_close, bound=1e-5), jax.jit(reads)(over, tokens_BT, vector_D), want)
    rows = PartitionSpec("rows")
    mesh = jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = dict(in_specs=(PartitionSpec(), rows, PartitionSpec()), out_specs=rows)
    found = jax.jit(jax.shard_map(reads, mesh=mesh, **specs))(params, TOKENS, vector_D)
    jax.tree.map(partial(assert_close, bound=1e-5), found, want)
    explicit = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    placed_D = jax.device_put(vector_D, NamedSharding(explicit, PartitionSpec()))
    outs = []
    for tree, given_D in ((params, vector_D), (over, placed_D)):
        options = xj.GenerateOptions(
            max_tokens=6, eos_token_ids=(), taps={(1, "attention"): xj.Tap(given_D, edit)}
        )
        outs.append(xj.generate(tree, config, [[1, 2, 3], [4]], options))
    assert outs[0].tokens == outs[1].tokens, outs[1].tokens
    assert_close(outs[1].logprobs, outs[0].logprobs, 1e-5)


def explicit_axes() -> None:
    """Runs over the axes that `jax.make_mesh` gives. Results and gradients equal the ones of one device, and
    stay divided by rows. The host's functions and engines take such parameters, also under `jax.set_mesh`.
    """
    config = from_hf(FAMILIES["qwen2"] | ONE_LAYER)
    params = random_params(config)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    inputs = jax.tree.map(np.asarray, (TOKENS, LENGTHS))
    keys = jax.random.split(jax.random.key(1), 2)

    @jax.jit
    def calls(params, tokens_BT, num_tokens_B, keys):
        cache = xj.init_cache(config, 2, 32)
        logits_BV, cache = xj.prefill(params, config, tokens_BT, num_tokens_B, cache)
        out = xj.decode_loop(params, config, logits_BV, cache, keys, xj.SamplingConfig(), jnp.array([3]), 4)

        def loss(params):
            scores_BT = xj.score(params, config, tokens_BT, num_tokens_B).logprobs_BT
            return scores_BT.sum(), scores_BT

        gradients, scores_BT = jax.grad(loss, has_aux=True)(params)
        return (scores_BT, out.tokens_BT), gradients

    want = calls(params, *inputs, keys)
    prompts = [[1, 2, 3], [4]]
    tokens = xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=4)).tokens
    auto = jax.device_put(params, xj.params.shardings(config, mesh))
    for context in (None, mesh):
        with jax.set_mesh(context):
            shardings = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), auto)
            explicit = jax.tree.map(jax.device_put, params, shardings)
            results, gradients = calls(explicit, *jax.device_put((*inputs, keys), rows))
            assert all(x.sharding.spec[0] == "data" for x in results), results
            jax.tree.map(partial(assert_close, bound=1e-4), (results, gradients), want)
            assert xj.generate(explicit, config, prompts, xj.GenerateOptions(max_tokens=4)).tokens == tokens
            cache = xj.init_cache(config, 2, 32, mesh=mesh)
            logits_BV, cache = xj.prefill(explicit, config, *inputs, cache)
            assert cache.layers[0].k.sharding.spec[:2] == ("data", "model"), cache.layers[0].k.sharding
            new = xj.init_cache(config, 2, 32)  # over no mesh
            again_BV, _ = xj.prefill(explicit, config, *inputs, new, donate=True)
            assert_close(again_BV, logits_BV, 1e-4)
            alone = xj.forward(explicit, config, TOKENS)[0]  # outside a trace
            assert_close(alone[0, -1], logits_BV[0], 1e-4)
            hidden_BTD, _ = xj.hidden_states(explicit, config, TOKENS)
            again_BTV = xj.rollouts.map_logits(explicit, config, hidden_BTD, lambda logits_BTV: logits_BTV)
            assert_close(again_BTV, alone, 1e-4)
    specs = dict(in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec("data"))
    with jax.set_mesh(mesh):  # "model" stays Explicit in the shard_map
        explicit = jax.device_put(params, xj.params.shardings(config, mesh))
        score = lambda params, tokens_BT: xj.score(params, config, tokens_BT).logprobs_BT  # noqa: E731
        apart = jax.jit(jax.shard_map(score, **specs, axis_names={"data"}))
        assert_close(
            apart(explicit, jax.device_put(inputs[0], rows)),
            xj.score(params, config, inputs[0]).logprobs_BT,
            1e-4,
        )
    for tree in auto, explicit:  # outside a trace the second call compiles nothing
        xj.forward(tree, config, TOKENS, num_tokens_B=LENGTHS)
        with compiling.events() as seen:
            logits_BTV, _ = xj.forward(tree, config, TOKENS, num_tokens_B=LENGTHS)
        assert not seen, seen
        assert_close(logits_BTV[0, -1], logits_BV[0], 1e-4)
        with pytest.raises(xj.InputError, match="token id .* is outside"):
            xj.forward(tree, config, TOKENS + 999)
    one = jax.make_mesh((2, 1), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    replicated = jax.device_put(params, NamedSharding(one, PartitionSpec()))  # "model" divides nothing
    rows = NamedSharding(one, PartitionSpec("data"))
    scores = jax.jit(xj.score, static_argnums=1)(replicated, config, *jax.device_put(inputs, rows))
    assert_close(scores.logprobs_BT, want[0][0], 1e-4)
    mesh = mesh_of(2)
    with jax.set_mesh(mesh):
        assert jax.tree.leaves(xj.params.shardings(config, mesh))[0].mesh == mesh
        explicit = jax.device_put(params, xj.params.shardings(config, mesh))
        engine = xj.Engine(xj.Model(explicit, config), rows=2, capacity=64)
        answers = [answer.tokens[0] for answer in engine.generate(prompts, xj.GenerateOptions(max_tokens=4))]
        engine.update(explicit)
        engine.close()
        assert answers == tokens, answers
        loaded = xj.load_model(mesh=mesh)
        assert jax.tree.leaves(loaded.params)[0].sharding.mesh.axis_types == (AxisType.Auto,)


def resharded() -> None:
    """A tree moves to a mesh as `load_model` reads it there: cast, with key heads repeated and the vocabulary
    padded, and to meshes whose axes have other names.
    """
    hf = FAMILIES["qwen2"] | dict(vocab_size=95)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), hf)
        for devices, quantize in ((4, None), (8, None), (4, "int8")):
            alone = xj.load_model(path, dtype="float32")
            loaded = xj.load_model(path, mesh=mesh_of(devices), dtype="bfloat16", quantize=quantize)
            to = dict(dtype="bfloat16", quantize=quantize)
            tree, config = xj.params.reshard(alone.params, alone.config, mesh_of(devices), **to)
            if quantize is None:  # from float32, else from bfloat16
                jax.tree.map(np.testing.assert_array_equal, tree, loaded.params)
            assert config == loaded.config
            for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded.params), strict=True):
                assert x.sharding == y.sharding and x.shape == y.shape and x.dtype == y.dtype
            with pytest.raises(
                xj.InputError, match="is quantized and cannot be" if quantize else "heads has"
            ):
                xj.params.reshard(tree, config, mesh_of(4 if quantize else 3), quantize=quantize)
    config = from_hf(FAMILIES["qwen2"])
    params = random_params(config)
    want = FORWARD(params, config, TOKENS)[0]
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    tp = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), "tp")
    for how in (dict(fsdp="fsdp"), dict(rules=tp | dict(embed="fsdp"))):
        given = jax.device_put(params, xj.params.shardings(config, mesh, **how))
        q = given["layers"][0]["q"]["weight"].sharding.spec
        assert q == PartitionSpec("tp" if "rules" in how else None, "fsdp"), q
        assert_close(FORWARD(given, config, TOKENS)[0], want, 1e-5)
    with pytest.raises(xj.InputError, match="unknown axes"):
        xj.params.shardings(config, mesh, rules=dict(head="tp"))


def another_layout() -> None:
    """Runs on a mesh whose devices do not divide the heads: the compiler completes the caller's sharding."""
    config = from_hf(FAMILIES["qwen2"])
    params = random_params(config)
    wanted = FORWARD(params, config, TOKENS)[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("model",))
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    assert_close(FORWARD(placed, config, TOKENS)[0], wanted, 1e-5)


def other_ways() -> None:
    """Beams, draft tokens, a kept prefix and no cache give the tokens of one device, with a vocabulary that
    devices do not divide.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), ODD | dict(vocab_size=97))
        one = xj.load_model(path, "float32")
        over = xj.load_model(path, "float32", mesh=mesh_of(4))
    found = []
    for model in (one, over):
        tree = (model.params, model.config)
        prompts = [[1, 2, 3, 1, 2], [4, 5]]
        beams = xj.beam_search(*tree, prompts[0], max_tokens=5, num_beams=3)
        outs = [
            xj.generate(*tree, prompts, xj.GenerateOptions(max_tokens=5, eos_token_ids=(), **how))
            for how in (dict(draft="lookup"), dict(use_cache=False), dict(keep_prefix=True))
        ]
        longer = [[*prompt, *answer, 7] for prompt, answer in zip(prompts, outs[2].tokens, strict=True)]
        outs.append(
            xj.generate(
                *tree, longer, xj.GenerateOptions(max_tokens=5, eos_token_ids=(), prefix=outs[2].prefix)
            )
        )
        found.append([beams.sequences, *(out.tokens for out in outs)])
    assert found[0] == found[1], found


def kernels() -> None:
    """A program for Hopper GPUs has an attention kernel over the heads of a device, and no other kernel of
    Mosaic.
    """
    selection = kernels_pallas.Selection("mosaic", "an imaginary GPU")
    config = from_hf(FAMILIES["qwen2"] | dict(num_key_value_heads=8, head_dim=64))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "bfloat16"))
    places = xj.params.shardings(config, mesh_of(4))
    hopper = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,), abstract_device=hopper)
    to_hopper = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s.spec))  # noqa: E731
    params = jax.tree.map(to_hopper, params, places)
    cache = jax.eval_shape(lambda: xj.init_cache(config, 2, 64, "bfloat16"))
    with mock.patch.object(kernels_pallas.dispatch, "device_impl", lambda: selection):
        for program, tokens in ((xj.prefill, (TOKENS, LENGTHS)), (xj.decode_step, (LENGTHS,))):
            traced = jax.jit(program, static_argnums=1).trace(params, config, *tokens, cache)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            calls = re.findall(r'@mosaic_gpu[\w.]*\(.*|call_target_name = "mosaic_gpu.*', text)
            # One for each layer, or for each kind of layer; two of the eight heads.
            assert len(calls) in (2, 3) and all("tensor<2x2x64x64xbf16>" in call for call in calls), calls


def experts() -> None:
    """The kernels of a device skip choices of other devices' experts. Pallas's interpreter does not pass the
    check of varying axes.
    """
    config = with_experts(CASES["moe-defaults"].config, intermediate_size=32, num_experts=8)
    params = random_params(config)
    layer = {name: params["layers"][0][name] for name in ("router", "experts")}
    x_BTD = jax.random.normal(jax.random.key(1), (2, 5, config.hidden_size))
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,), devices=jax.devices()[:4])
    specs = PartitionSpec(), {"router": PartitionSpec(), "experts": PartitionSpec("model")}

    run = partial(mixture_of_experts, config=config, run_config=RunConfig("interpret", over="model"))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    want = mixture_of_experts(x_BTD, layer, config, run_config=RunConfig("xla"))
    np.testing.assert_allclose(jax.jit(sharded)(x_BTD, layer), want, atol=1e-5)


CALLS = {
    call.__name__: call
    for call in (
        collectives_of_a_layer, collectives_of_sampling, formats, bitnet_files, mxfp4_files, scaled_files,
        int8_activations,
        gguf_leaves, an_engine, caches, gradients, kernels, experts, another_layout, other_ways,
        odd_vocabulary, odd_formats, odd_tree_of_a_user, tensors_by_name, explicit_axes, resharded,
        rows_over_data, training, adapters, taps, draft_heads, heads,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    wrong = {}
    for name in names:
        try:
            if name in CALLS:
                CALLS[name]()
            else:
                which, devices = name.rsplit("-", 1)
                family(which, int(devices))
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
        jax.clear_caches()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
