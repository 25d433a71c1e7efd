"""Writes checkpoints with small numbers and scales, as FP8, NVFP4, MXFP4 and compressed-tensors have them."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import parity_cases as cases
import tiny

import xinfer_jax as xj
from xinfer_jax.families.naming import file_specs
from xinfer_jax.families.reading import from_hf
from xinfer_jax.weights.quantized_weight import is_quantized

TYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int8": "I8",
    "uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file, which may have types that `safetensors.numpy` does not write."""
    header, data, end = {}, [], 0
    for name, tensor in tensors.items():
        data.append(np.asarray(tensor).tobytes())
        offsets = [end, end := end + len(data[-1])]
        header[name] = dict(dtype=TYPES[tensor.dtype.name], shape=list(tensor.shape), data_offsets=offsets)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def write(path: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Writes a checkpoint with a tokenizer."""
    tiny.write(path, hf, weights={})
    if shards == 1:
        save(path / "model.safetensors", tensors)
        return path
    (path / "model.safetensors").unlink()
    parts = {f"model-{i}.safetensors": dict([*tensors.items()][i::shards]) for i in range(shards)}
    for file, part in parts.items():
        save(path / file, part)
    weight_map = {name: file for file, part in parts.items() for name in part}
    tiny.write_json(path / "model.safetensors.index.json", dict(metadata={}, weight_map=weight_map))
    return path


def float_tensors(hf: dict[str, Any], is_fused: bool = True) -> dict[str, np.ndarray]:
    """Random weights by the names of published files; not fused: experts apart, and other matrices too."""
    config = from_hf(hf)
    tensors = cases.random_tensors(config, 3)
    if is_fused:
        return cases.fuse_tensors(config, tensors)
    apart = {}
    for spec in jax.tree.leaves(file_specs(config)):
        tensor = tensors[spec.hf_name]
        many = "{}" in spec.hf_name
        apart |= {spec.hf_name.format(i): x for i, x in enumerate(tensor)} if many else {spec.hf_name: tensor}
    return apart


def published_tensors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights by the names of published files: experts apart, and other matrices joined."""
    stored = {}
    for name, x in float_tensors(hf).items():
        if x.ndim < 3 or ".experts." not in name:
            stored[name] = x
            continue
        stem = name.rpartition(".")[0]
        half = x.shape[1] // 2
        parts = dict(gate_proj=x[:, :half], up_proj=x[:, half:])
        parts = parts if name.endswith("gate_up_proj") else dict(down_proj=x)
        stored |= {
            f"{stem}.{i}.{part}.weight": one for part, all in parts.items() for i, one in enumerate(all)
        }
    return stored


def is_matrix(name: str, tensor: np.ndarray) -> bool:
    """Returns True if files have the tensor quantized: it lies within a layer, and is neither a router nor a
    convolution.
    """
    others = r"mlp\.gate\.|router|shared_expert_gate|conv|norm|bias|_ba\.|in_proj_[ab]\.|A_log|sinks"
    return tensor.ndim > 1 and ".layers." in name and not re.search(others, name)


def convert(tensors: dict[str, np.ndarray], encode: Any) -> tuple[dict, dict]:
    """The tensors with matrices encoded, and those that they equal. encode: gets a name and a matrix, returns
    tensors and the matrix that they mean.
    """
    stored, equal = {}, {}
    for name, tensor in tensors.items():
        stored[name] = equal[name] = np.asarray(tensor, np.float32, order="C")
        if is_matrix(name, tensor):
            del stored[name]
            (parts, equal[name]) = encode(name, tensor.astype(np.float32))
            stored |= parts
    return stored, equal


def expand(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Scales of blocks, once for each number."""
    whole = np.repeat(np.repeat(scale, block[0], -2), block[1], -1)
    return whole[..., : shape[-2], : shape[-1]].astype(np.float32)


def largest(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the largest magnitude of each block."""
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % block[0]), (0, -x.shape[-1] % block[1])]
    x = np.abs(np.pad(x, padding))
    (rows, columns) = (x.shape[-2] // block[0], x.shape[-1] // block[1])
    return x.reshape(*x.shape[:-2], rows, block[0], columns, block[1]).max((-3, -1))


def fp8(block=None, dtype=E4M3, scale_dtype=np.float32, end="_scale_inv"):
    """block: None: one scale; "row": one for each output."""

    def encode(name, x):
        (outputs, inputs) = x.shape[-2:]
        size = {None: (outputs, inputs), "row": (1, inputs)}.get(block, block)
        scale = (largest(x, size) / 448).astype(np.float32)
        if scale_dtype != np.float32:
            scale = np.exp2(np.ceil(np.log2(scale))).astype(scale_dtype)
        values = (x / expand(scale, size, x.shape)).astype(dtype)
        equal = values.astype(np.float32) * expand(scale, size, x.shape)
        return {name: values, name + end: scale.reshape(x.shape[:-2]) if block is None else scale}, equal

    return encode


def fp4_levels(x):
    """The nearest numbers of E2M1 as their 4 bits."""
    return np.abs(x[..., None] - FP4).argmin(-1).astype(np.uint8)


def _fp4(x, whole):
    """Numbers in 4 bits, two in a byte, and what they mean. whole: the scale of each number."""
    levels = fp4_levels(x / whole)
    return levels[:, ::2] | levels[:, 1::2] << 4, FP4[levels] * whole


def nvfp4(name, x):
    """Encodes a matrix as ModelOpt does."""
    whole = np.float32(np.abs(x).max() / 448 / 6)
    scale = (largest(x, (1, 16)) / 6 / whole).astype(E4M3)
    packed, equal = _fp4(x, expand(scale, (1, 16), x.shape) * whole)
    return {name: packed, f"{name}_scale": scale, f"{name}_scale_2": whole}, equal


def nvfp4_packed(name, x):
    """Encodes a matrix as compressed-tensors does."""
    divisor = np.float32(448 * 6 / np.abs(x).max())
    scale = (largest(x, (1, 16)) / 6 * divisor).astype(E4M3)
    packed, equal = _fp4(x, expand(scale.astype(np.float32) / divisor, (1, 16), x.shape))
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_global_scale": divisor[None]}, equal


def mxfp4(name, x):
    """Encodes a matrix as compressed-tensors does."""
    exponent = np.ceil(np.log2(largest(x, (1, 32)) / 6)).astype(int)
    packed, equal = _fp4(x, expand(np.exp2(exponent), (1, 32), x.shape))
    return {f"{name}_packed": packed, f"{name}_scale": (exponent + 127).astype(np.uint8)}, equal


def pack(x, bits):
    """Whole numbers around 0 along the last axis in words, lowest bits first."""
    per_word = 32 // bits
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % per_word))).astype(np.int64) + 2 ** (bits - 1)
    words = (x.reshape(len(x), -1, per_word) << bits * np.arange(per_word)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def integers(bits, group=None, symmetric=True, packed=True, scale_dtype=BF16, order=None):
    """Returns an encoder in the form of compressed-tensors. group: None: one scale for each output. order:
    draws `weight_g_idx`.
    """

    def encode(name, x):
        (outputs, inputs) = x.shape
        draw = np.random.default_rng(len(name))
        J = group or inputs
        Q = -(-inputs // J)
        top = 2 ** (bits - 1)
        of_input = np.arange(inputs) // J if order is None else draw.permutation(np.arange(inputs) // J)
        zero = np.zeros((outputs, Q), int) if symmetric else draw.integers(-top, top, (outputs, Q))
        scale = (draw.uniform(0.5, 1.5, (outputs, Q)) / top / np.sqrt(inputs)).astype(scale_dtype)
        numbers = draw.integers(-top, top, x.shape)
        equal = (numbers - zero[:, of_input]).astype(np.float32) * scale.astype(np.float32)[:, of_input]
        stored = {f"{name}_scale": scale}
        if packed:
            stored |= {f"{name}_packed": pack(numbers, bits), f"{name}_shape": np.array(x.shape, np.int64)}
        else:
            stored[name] = numbers.astype(np.int8)
        if not symmetric:
            stored[f"{name}_zero_point"] = (
                np.ascontiguousarray(pack(zero.T, bits).T) if packed else zero.astype(np.int8)
            )
        if order is not None:
            stored[f"{name}_g_idx"] = of_input.astype(np.int32)
        return stored, equal

    return encode


def fp8_settings(block=None, **others):
    return dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=block) | others


def compressed(format, bits=4, kind="int", strategy="channel", symmetric=True, **others):
    weights = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=symmetric, dynamic=False)
    weights |= {name: others.pop(name) for name in ("group_size", "block_structure") if name in others}
    group = dict(targets=["Linear"], weights=weights, input_activations=None)
    groups = dict(config_groups=dict(group_0=group), ignore=["lm_head"], quantization_status="compressed")
    return dict(quant_method="compressed-tensors", format=format) | groups | others


def w4(group=32, **how):
    return compressed("pack-quantized", strategy="group", group_size=group, **how)


def checkpoint(path, hf, settings, encode, is_fused=True, shards=1, **changed):
    """The path, and the equal float tensors."""
    stored, equal = convert(float_tensors(hf, is_fused), encode)
    stored = {name: x for name, x in (stored | changed).items() if x is not None}
    return write(path, hf | dict(quantization_config=settings), stored, shards), equal


def equal_model(path, hf, equal):
    """The model of a checkpoint with these float tensors."""
    return xj.load_model(write(path, hf, equal), "float32")


def assert_equal(model, wanted, rtol=0.0):
    """Every leaf is that of a float model, dequantized: to the bit, unless rtol is given."""
    known = jax.tree_util.tree_leaves_with_path(wanted.params)
    found = jax.tree.leaves(model.params, is_leaf=is_quantized)
    for (place, x), leaf in zip(known, found, strict=True):
        if is_quantized(leaf):
            dequantize = type(leaf).dequantize
            leaf = (jax.vmap(dequantize) if len(leaf.shape) > 2 else dequantize)(leaf)
        np.testing.assert_allclose(leaf, x, rtol, 0, err_msg=jax.tree_util.keystr(place))
