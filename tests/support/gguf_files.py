"""Writes GGUF files of small random models as llama.cpp's converters do, with names by gguf's own tables."""

import copy
import json
import re
from pathlib import Path

import gguf
import numpy as np
import parity_cases as cases

from xinfer_jax.families.naming import published_name
from xinfer_jax.families.reading import from_hf

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4 = (
    gguf.GGMLQuantizationType[name]
    for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K MXFP4".split()
)
_SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_S, _F, _L = "sliding_attention", "full_attention", "linear_attention"
_LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
    rms_norm_eps=1e-3, layer_types=[_L, _F],
    rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.5),
)  # fmt: skip
_GEMMA = dict(
    sliding_window=8, hidden_activation="gelu_pytorch_tanh", layer_types=[_S, _F], num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip
_GROUPS = dict(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_group=4, topk_group=2,
    first_k_dense_replace=1, n_shared_experts=2, routed_scaling_factor=2.5,
)  # fmt: skip
_LATENT = dict(
    kv_lora_rank=32, qk_nope_head_dim=64, qk_rope_head_dim=16, v_head_dim=96, q_lora_rank=32,
    num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1e4, num_attention_heads=4,
)  # fmt: skip
_NEMOTRON = dict(
    mamba_num_heads=4,
    mamba_head_dim=32,
    ssm_state_size=32,
    n_groups=2,
    mlp_hidden_act="relu2",
    layer_norm_epsilon=1e-5,
    intermediate_size=96,
    moe_intermediate_size=96,
)
_FACTORS = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.015625, logits_scaling=8.0
)
_GRANITE = _FACTORS | dict(
    layer_types=["mamba", "attention"],
    position_embedding_type="nope",
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=32,
    head_dim=16,
    rms_norm_eps=1e-5,
    shared_intermediate_size=96,
)
_CONVOLUTIONS = dict(
    layer_types=["conv", _F],
    head_dim=16,
    norm_eps=1e-5,
    block_auto_adjust_ff_dim=False,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
_YARN40 = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=128)


def _hf(model_type, **changes):
    return cases._hf(model_type, **_SIZES | changes)


# Of each architecture config.json.
CONFIGS = {
    "llama": _hf("llama", rope_theta=5e5, rms_norm_eps=1e-5,
        rope_scaling=dict(rope_type="llama3", **cases._LLAMA3)),
    "qwen2": _hf("qwen2", rope_theta=1e6, tie_word_embeddings=True),
    "qwen3": _hf("qwen3", rope_theta=1e6,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)),
    "qwen3moe": _hf("qwen3_moe", rope_theta=1e6, norm_topk_prob=True, sliding_window=None, **_MOE),
    "qwen35": _hf("qwen3_5_text", **_LINEAR, tie_word_embeddings=True),
    "qwen35moe": _hf("qwen3_5_moe_text", **_LINEAR, **_MOE, shared_expert_intermediate_size=64),
    "gemma3": _hf("gemma3_text", **_GEMMA, query_pre_attn_scalar=32, rope_local_base_freq=1e4, rope_theta=1e6,
        rope_scaling=dict(rope_type="linear", factor=8.0)),
    "gemma4": _hf("gemma4_text", **_GEMMA | dict(num_hidden_layers=3, layer_types=[_S, _F, _F]),
        global_head_dim=64, hidden_size_per_layer_input=32, vocab_size_per_layer_input=96, num_experts=None,
        rms_norm_eps=1e-3, num_kv_shared_layers=1, use_double_wide_mlp=True),
    "gemma4-experts": _hf("gemma4_text", **_GEMMA | dict(num_key_value_heads=2), global_head_dim=64,
        hidden_size_per_layer_input=0, rms_norm_eps=1e-3, enable_moe_block=True, top_k_experts=2,
        attention_k_eq_v=True, num_global_key_value_heads=1, num_experts=4, moe_intermediate_size=32,
        final_logit_softcapping=30.0),
    "gpt-oss": _hf("gpt_oss", rope_theta=1.5e5, layer_types=[_S, _F], sliding_window=8, rms_norm_eps=1e-5,
        num_local_experts=4, intermediate_size=32, num_experts_per_tok=2, attention_bias=True,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128,
            beta_fast=32.0, beta_slow=1.0, truncate=False)),
    "deepseek2": _hf("deepseek_v3", **_GROUPS | _LATENT, norm_topk_prob=True,
        rope_scaling=dict(**_YARN40, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek2-softmax": _hf("deepseek_v2", **_GROUPS | _LATENT | dict(q_lora_rank=None, n_shared_experts=1),
        topk_method="group_limited_greedy",
        rope_scaling=dict(**_YARN40, mscale=0.707, mscale_all_dim=0.707)),
    "deepseek2-dense": _hf("youtu", **_LATENT, tie_word_embeddings=True),
    "glm4moe": _hf("glm4_moe", **_GROUPS | dict(n_group=1, topk_group=1), norm_topk_prob=True,
        use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, rope_theta=1e6, rms_norm_eps=1e-5),
    "granite": _hf("granite", **_FACTORS, head_dim=16),
    "granitemoe": _hf("granitemoe", **_FACTORS, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe-shared": _hf("granitemoeshared", **_FACTORS, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=64),
    "mamba2": _hf("mamba2", num_heads=4, head_dim=32, state_size=32, n_groups=2, layer_norm_epsilon=1e-5,
        rms_norm_eps=1e-5, intermediate_size=1, num_attention_heads=1, num_key_value_heads=1),
    "falcon-h1": _hf("falcon_h1", mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2,
        mamba_d_state=32, rope_theta=1e11, rms_norm_eps=1e-5),
    "granitehybrid": _hf("granitemoehybrid", **_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granitehybrid-dense": _hf("granitemoehybrid", **_GRANITE, num_local_experts=0, num_experts_per_tok=0,
        tie_word_embeddings=True),
    "nemotron_h": _hf("nemotron_h", **_NEMOTRON, hybrid_override_pattern="M-*", num_hidden_layers=3),
    "nemotron_h_moe": _hf("nemotron_h", **_NEMOTRON, hybrid_override_pattern="ME*E", num_hidden_layers=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_shared_expert_intermediate_size=64, moe_latent_size=32),
    "lfm2": _hf("lfm2", **_CONVOLUTIONS),
    "lfm2moe": _hf("lfm2_moe", **_CONVOLUTIONS, **_MOE, num_dense_layers=1, use_expert_bias=True),
}  # fmt: skip
_OLD = "deepseek_v2"  # its files are written in the older form, with `attn_kv_b`


def arch_of(name: str) -> str:
    """The architecture of a model of `CONFIGS`."""
    return re.sub("-(experts|softmax|dense|shared)$", "", name)


def write(path, name, kind_of=None, hf=None, metadata=None, splits=(), change=None):
    """Writes a model of `CONFIGS`. Returns its config, and its dequantized tensors for `cases.params_from`.

    Args:
        path: of the file; with splits those of the parts follow from it.
        name: in `CONFIGS`.
        kind_of: the type of a matrix, by GGUF name and shape.
        hf: other settings of config.json.
        metadata: more of it, by key.
        splits: names of the last tensor of each file but the last one.
        change: called with all arrays and their types, by name, before they are written.
    """
    hf = copy.deepcopy(CONFIGS[name] | (hf or {}))
    config = from_hf(hf)
    leaves = cases.random_tensors(config, 3)
    return config, write_leaves(path, arch_of(name), hf, leaves, kind_of, metadata, splits, change)


def write_leaves(path, arch, hf, leaves, kind_of=None, metadata=None, splits=(), change=None):
    """Writes leaves by their Hugging Face names. Returns them dequantized. Arguments as of `write`."""
    config = from_hf(hf)
    fused = cases.fuse_tensors(config, leaves)
    is_apart = re.compile(r"\.experts\.|block_sparse_moe.*_linear|shared_mlp").search
    source = {name: tensor for name, tensor in sorted(fused.items()) if not is_apart(name)}
    source |= {name: tensor for name, tensor in leaves.items() if is_apart(name)}
    if config.model_type != _OLD:
        source = _apart(config, source)
    key = next(key for key, own in gguf.MODEL_ARCH_NAMES.items() if own == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    groups: dict = {}  # of each GGUF tensor those that it joins
    for part in source:
        groups.setdefault(_own_name(names, arch, _of_converter(config, part)), []).append(part)
    stored: dict = {}
    equal: dict = {}
    for own, parts in groups.items():
        changed = [_forth(arch, config, part, source[part]) for part in parts]
        joined = changed[0] if len(parts) == 1 else np.concatenate(changed, axis=-2)
        is_float = joined.ndim == 1 or "norm" in own or not own.endswith(".weight")
        kind = F32 if is_float or kind_of is None else kind_of(own, joined.shape)
        stored[own] = (_quantized(joined, kind), kind)
        values = gguf.dequantize(stored[own][0], kind).reshape(joined.shape)
        pieces = [values] if len(parts) == 1 else np.split(values, len(parts), axis=-2)
        for part, piece in zip(parts, pieces, strict=True):
            equal[part] = _back(arch, config, part, piece, source[part].shape)
    metadata = _metadata(arch, hf, config, stored) | (metadata or {})
    equal = _together(equal)
    if change:
        change(stored)
    write_file(path, arch, stored, metadata, splits)
    state = fused | cases.fuse_tensors(config, leaves | {n: x for n, x in equal.items() if n in leaves})
    return cases.split_tensors(config, state | {n: x for n, x in equal.items() if n in fused})


def _apart(config, source) -> dict:
    """Splits `kv_b_proj`: by head, and keys with their inputs first."""
    found = {}
    for name, tensor in source.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        by_head = tensor.reshape(config.num_attention_heads, -1, tensor.shape[-1])
        width = config.layers[0].mixer_of("latent_attention").qk_nope_head_dim
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(by_head[:, :width].swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(by_head[:, width:])
    return found


def _together(tensors) -> dict:
    """The inverse of `_apart`."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".k_b_proj.weight")]:
        (keys, values) = (found.pop(name), found.pop(name.replace("k_b", "v_b")))
        joined = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        found[name.replace("k_b", "kv_b")] = joined.reshape(-1, joined.shape[-1])
    return found


def _own_name(names, arch, name: str) -> str:
    """The GGUF name of a tensor. gemma4's experts have gate and up in one."""
    for end, own in {"router.scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}.items():
        if name.endswith(end):
            return f"blk.{name.split('.')[2]}.{own}"
    plain = _plain(name)
    if arch == "gemma4" and ".experts." in name:
        plain = re.sub("gate_proj|up_proj", "gate_up_proj", plain)
    own = names.get_name(plain, (".weight", ".bias"))
    assert own, name
    return own


def _of_converter(config, name: str) -> str:
    """The name of a leaf or tensor as the converters of some architectures have it, which split tensors or
    join those of experts.
    """
    name = published_name(config, name)
    shared = "mlp.shared_experts." if config.experts else "mlp."
    if "shared_mlp." in name:
        return name.replace("shared_mlp.", shared).replace("output", "down").replace("_linear", "_proj")
    if config.model_type == "lfm2_moe":
        name = name.replace("model.layers", "layers") if ".experts." in name else name
        return name.replace("expert_bias", "expert_bias.bias")
    if config.model_type == "nemotron_h" and ".experts." in name:
        return name.replace("backbone", "model").replace(".mixer.", ".mlp.")
    return name.replace("block_sparse_moe.experts", "mlp.experts")


def _plain(name: str) -> str:
    """A tensor's name as the converter has it before gguf's table."""
    name = name.replace(".experts.{}.", ".experts.").replace(".dt_bias", ".dt_proj.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    return name + ".weight" if name.endswith(("sinks", "layer_scalar", "conv1d")) else name


def _order(arch: str, config, name: str, tensor) -> tuple[np.ndarray, int] | None:
    """The converter's order along an axis. None: the tensor stays."""
    is_in_pairs = arch == "llama" or arch.startswith(("granite", "nemotron"))
    if is_in_pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return np.arange(len(tensor)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1), 0
    if "linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return None
    linear = next(filter(None, (layer.mixer_of("delta") for layer in config.layers)))
    axis = int("out_proj" in name)
    keys = 2 * linear.num_key_heads * linear.key_head_dim if "qkv" in name or "conv1d" in name else 0
    size = tensor.shape[axis] - keys
    turned = np.arange(size).reshape(linear.num_key_heads, linear.num_value_heads // linear.num_key_heads, -1)
    return np.concatenate([np.arange(keys), keys + turned.swapaxes(0, 1).reshape(-1)]), axis


def _has_offset(config, name: str) -> bool:
    return bool(config.norm_offset) and name.endswith("norm.weight") and "linear_attn" not in name


def _forth(arch: str, config, name: str, tensor):
    tensor = tensor.squeeze(1) if "conv1d.weight" in name or "conv.conv.weight" in name else tensor
    if order := _order(arch, config, name, tensor):
        tensor = np.take(tensor, *order)
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    if mamba := next(filter(None, (layer.mixer_of("mamba2") for layer in config.layers)), None):
        if name.endswith((".A_log", ".D")):
            return tensor.reshape(-1, 1)
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            return tensor.reshape(mamba.n_groups, -1)
    return tensor + np.float32(1) if _has_offset(config, name) else tensor


def _back(arch: str, config, name: str, stored, shape):
    tensor = stored - np.float32(1) if _has_offset(config, name) else stored
    if name.endswith("A_log"):
        tensor = np.log(-tensor)
    if order := _order(arch, config, name, tensor):
        tensor = np.take(tensor, np.argsort(order[0]), order[1])
    return tensor.reshape(shape)


def _quantized(array, kind):
    """A matrix in some type. For those that gguf does not write, random blocks."""
    if kind not in (Q4_K, Q5_K, Q6_K):
        return gguf.quantize(array, kind)
    (size, num_bytes) = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    blocks = random.integers(0, 256, (array.size // size, num_bytes), np.uint8)
    (at, divisor) = {Q4_K: ((0, 2), 500), Q5_K: ((0, 2), 1000), Q6_K: ((208,), 3000)}[kind]
    for start in at:  # a float16 number begins there
        scales = random.uniform(0.2, 1, (len(blocks), 1)) / np.sqrt(array.shape[-1]) / divisor
        blocks[:, start : start + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def write_file(path: Path, arch: str, stored, metadata, splits=()) -> None:
    """Writes arrays with their types, by name. Arguments as of `write`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files: list[dict] = [{}]
    for name, tensor in stored.items():
        files[-1][name] = tensor
        if name in splits:
            files.append({})
    for i, tensors in enumerate(files):
        at = path
        if len(files) > 1:
            at = path.with_name(f"{path.stem}-{i + 1:05}-of-{len(files):05}.gguf")
        writer = gguf.GGUFWriter(at, arch)
        if len(files) > 1:
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", len(files))
            writer.add_int32("split.tensors.count", len(stored))
        for key, value in ({} if i else metadata).items():
            _add(writer, key.replace("ARCH", arch), value)
        for name, (array, kind) in tensors.items():
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer, key, value):
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _metadata(arch: str, hf, config, stored) -> dict:
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    linear = next(filter(None, (layer.mixer_of("delta") for layer in config.layers)), None)
    found = {
        "ARCH.block_count": config.num_hidden_layers, "ARCH.context_length": hf["max_position_embeddings"],
        "ARCH.embedding_length": hf["hidden_size"], "ARCH.feed_forward_length": hf["intermediate_size"],
        "ARCH.attention.head_count": hf["num_attention_heads"],
        "ARCH.attention.head_count_kv": hf["num_key_value_heads"],
        "ARCH.attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "ARCH.attention.key_length": config.head_dim,
        "ARCH.rope.freq_base": float(hf.get("rope_theta") or rope.get("rope_theta", 1e4)),
        "ARCH.attention.sliding_window": hf.get("sliding_window"),
        "ARCH.expert_count": hf.get("num_experts")
        or hf.get("num_local_experts")
        or hf.get("n_routed_experts"),
        "ARCH.expert_used_count": hf.get("num_experts_per_tok") or hf.get("top_k_experts"),
        "ARCH.expert_feed_forward_length": hf.get("moe_intermediate_size"),
        "ARCH.expert_shared_feed_forward_length": hf.get("shared_expert_intermediate_size"),
        "ARCH.final_logit_softcapping": hf.get("final_logit_softcapping"),
    }  # fmt: skip
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"ARCH.rope.scaling.type": rope["rope_type"], "ARCH.rope.scaling.factor": rope["factor"]}
        found |= {"ARCH.rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    if linear:
        found |= {
            "ARCH.ssm.conv_kernel": linear.conv_kernel_dim, "ARCH.ssm.state_size": linear.key_head_dim,
            "ARCH.ssm.group_count": linear.num_key_heads, "ARCH.ssm.time_step_rank": linear.num_value_heads,
            "ARCH.ssm.inner_size": linear.num_value_heads * linear.value_head_dim,
            "ARCH.full_attention_interval": 2,
            "ARCH.rope.dimension_count": int(hf["head_dim"] * rope["partial_rotary_factor"]),
        }  # fmt: skip
    if "kv_lora_rank" in hf:
        _latent(found, hf, stored)
    if "n_routed_experts" in hf and config.experts:
        _grouped(found, hf, config)
    _of_states(arch, found, hf, config)
    if arch == "gpt-oss":
        found["ARCH.expert_feed_forward_length"] = hf["intermediate_size"]
    if arch == "gemma3":
        found["ARCH.attention.sliding_window_pattern"] = 2
    if arch == "gemma4":
        _gemma4(found, hf, stored)
    if arch == "llama" and rope:
        stored["rope_freqs.weight"] = (_llama3_divisors(hf), F32)
    return found


def _latent(found, hf, stored) -> None:
    """Older files have keys for each head, as their matrix `attn_kv_b` makes them."""
    (rank, rotated) = (hf["kv_lora_rank"], hf["qk_rope_head_dim"])
    (key, value) = (hf["qk_nope_head_dim"] + rotated, hf["v_head_dim"])
    rope = hf.get("rope_scaling") or {}
    found |= {
        "ARCH.attention.kv_lora_rank": rank, "ARCH.attention.q_lora_rank": hf["q_lora_rank"],
        "ARCH.rope.dimension_count": rotated, "ARCH.leading_dense_block_count": hf["num_hidden_layers"],
        "ARCH.expert_feed_forward_length": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "ARCH.expert_shared_count": 0, "ARCH.attention.key_length": key, "ARCH.attention.value_length": value,
    }  # fmt: skip
    if "blk.0.attn_k_b.weight" in stored:
        found |= {
            "ARCH.attention.head_count_kv": 1, "ARCH.attention.key_length": rank + rotated,
            "ARCH.attention.value_length": rank, "ARCH.attention.key_length_mla": key,
            "ARCH.attention.value_length_mla": value,
        }  # fmt: skip
    if factor := rope.get("mscale_all_dim"):
        found["ARCH.rope.scaling.yarn_log_multiplier"] = 0.1 * factor


def _grouped(found, hf, config) -> None:
    router = config.experts.router
    found |= {
        "ARCH.leading_dense_block_count": hf.get("first_k_dense_replace"),
        "ARCH.expert_shared_count": hf.get("n_shared_experts"), "ARCH.expert_group_count": hf["n_group"],
        "ARCH.expert_group_used_count": hf["topk_group"],
        "ARCH.expert_gating_func": 2 if router.scoring_func == "sigmoid" else 1,
        "ARCH.expert_weights_scale": hf["routed_scaling_factor"],
        "ARCH.expert_weights_norm": hf.get("norm_topk_prob"),
    }  # fmt: skip
    if hf["model_type"] == "glm4_moe":
        found["ARCH.rope.dimension_count"] = int(hf["head_dim"] * hf["partial_rotary_factor"])


def _of_states(arch: str, found, hf, config) -> None:
    """The keys of architectures with Mamba-2 or short convolutions."""
    if mamba := next(filter(None, (layer.mixer_of("mamba2") for layer in config.layers)), None):
        found |= {
            "ARCH.ssm.conv_kernel": mamba.conv_kernel,
            "ARCH.ssm.state_size": mamba.state_size,
            "ARCH.ssm.group_count": mamba.n_groups,
            "ARCH.ssm.time_step_rank": mamba.num_heads,
            "ARCH.ssm.inner_size": mamba.num_heads * mamba.head_dim,
            "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        }
    if arch in OWN_METADATA:
        OWN_METADATA[arch](found, hf, config)


def _by_layer(config, number, kind) -> list[int]:
    """The number in layers with such a part, and 0 in others."""
    return [number if getattr(layer, kind) else 0 for layer in config.layers]


def _mamba2(found, hf, config) -> None:
    found |= {"ARCH.feed_forward_length": 0, "ARCH.attention.head_count": 0}
    found |= dict.fromkeys(
        ("ARCH.attention.head_count_kv", "ARCH.attention.key_length", "ARCH.rope.freq_base")
    )


def _granite(found, hf, config) -> None:
    """Files of models without Mamba-2 may have its numbers too, and the number of key heads of each layer."""
    found |= {
        "ARCH.attention.head_count_kv": _by_layer(config, config.num_key_value_heads, "attention"),
        "ARCH.attention.key_length": None,
        "ARCH.rope.dimension_count": config.head_dim,
        "ARCH.rope.scaling.finetuned": bool(config.ropes),
        "ARCH.attention.scale": hf["attention_multiplier"],
        "ARCH.embedding_scale": hf["embedding_multiplier"],
        "ARCH.residual_scale": hf["residual_multiplier"],
        "ARCH.logit_scale": hf["logits_scaling"],
        "ARCH.expert_shared_feed_forward_length": hf.get("shared_intermediate_size"),
        "ARCH.ssm.conv_kernel": 4,
    }


def _nemotron_h(found, hf, config) -> None:
    """As in files, the rotated part of a head, which there is none of, is not that of this model."""
    widths = [layer.feed_forward is not None for layer in config.layers]
    found |= {
        "ARCH.attention.head_count_kv": _by_layer(config, config.num_key_value_heads, "attention"),
        "ARCH.feed_forward_length": [hf["intermediate_size"] * width for width in widths],
        "ARCH.rope.dimension_count": 12,
        "ARCH.rope.scaling.finetuned": False,
        "ARCH.attention.value_length": config.head_dim,
        "ARCH.leading_dense_block_count": None,
    }
    if config.experts is None:
        found |= dict.fromkeys([key for key in found if key.startswith("ARCH.expert_")])
    else:
        found |= {
            "ARCH.expert_shared_feed_forward_length": hf["moe_shared_expert_intermediate_size"],
            "ARCH.expert_shared_count": 1,
            "ARCH.moe_latent_size": hf["moe_latent_size"],
        }


def _lfm2(found, hf, config) -> None:
    found |= {
        "ARCH.attention.head_count_kv": _by_layer(config, config.num_key_value_heads, "attention"),
        "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ARCH.vocab_size": hf["vocab_size"],
        "ARCH.shortconv.l_cache": config.layers[0].mixers[0].kernel_dim,
    }
    if config.experts:
        found |= {"ARCH.leading_dense_block_count": 1, "ARCH.expert_gating_func": 2}


OWN_METADATA = dict(
    mamba2=_mamba2,
    granite=_granite,
    granitemoe=_granite,
    granitehybrid=_granite,
    nemotron_h=_nemotron_h,
    nemotron_h_moe=_nemotron_h,
    lfm2=_lfm2,
    lfm2moe=_lfm2,
)


def _gemma4(found, hf, stored) -> None:
    slides = [kind == _S for kind in hf["layer_types"]]
    shared = hf.get("num_kv_shared_layers", 0)
    wide = len(slides) - shared if hf.get("use_double_wide_mlp") else len(slides)
    found |= {
        "ARCH.attention.sliding_window_pattern": slides, "ARCH.attention.shared_kv_layers": shared,
        "ARCH.attention.key_length": hf["global_head_dim"], "ARCH.attention.key_length_swa": hf["head_dim"],
        "ARCH.embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
        "ARCH.feed_forward_length": [hf["intermediate_size"] * (1 + (i >= wide)) for i in range(len(slides))],
        "ARCH.rope.freq_base": 1e6, "ARCH.rope.freq_base_swa": 1e4,
    }  # fmt: skip
    if full := hf.get("num_global_key_value_heads"):
        found["ARCH.attention.head_count_kv"] = [hf["num_key_value_heads"] if x else full for x in slides]
    pairs = hf["global_head_dim"] // 2
    divisors = np.where(np.arange(pairs) < pairs // 4, 1, 1e30).astype(np.float32)
    stored["rope_freqs.weight"] = (divisors, F32)


def _llama3_divisors(hf) -> np.ndarray:
    rope = hf["rope_scaling"]
    powers = hf["rope_theta"] ** (np.arange(0, hf["head_dim"], 2) / hf["head_dim"])
    turns = rope["original_max_position_embeddings"] / (2 * np.pi * powers)
    (low, high) = (rope[f"{name}_freq_factor"] for name in ("low", "high"))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def tokenizer_metadata(saved, pre: str = "", size: int = 0) -> dict:
    """The metadata of a tokenizer.json, filled to that size. pre: of byte-level BPE. "": SentencePiece."""
    saved = json.loads(saved.read_text() if isinstance(saved, Path) else saved)
    model = saved["model"]
    added = {token["id"]: token for token in saved["added_tokens"]}
    size = max(size, 1 + max([*model["vocab"].values(), *added]))
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [5] * size
    for token, i in model["vocab"].items():
        tokens[i] = token
        kinds[i] = 6 if re.fullmatch("<0x..>", token) else 1
    for i, token in added.items():
        tokens[i] = token["content"]
        kinds[i] = 2 if token["content"] == "<unk>" else 3 if token["special"] else 4
    found = {
        "tokenizer.ggml.model": "gpt2" if pre else "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if pre:
        return found | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    ranks = {merge.replace(" ", ""): -float(i) for i, merge in enumerate(merges)}
    return found | {"tokenizer.ggml.scores": [ranks.get(token, -1e6) for token in tokens]}
