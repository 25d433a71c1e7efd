"""Writes BitNet checkpoints in every layout of ternary matrices."""

import copy

import numpy as np
import parity_cases as cases
import tiny

from xinfer_jax.families.reading import from_hf

HF = cases.CASES["bitnet-defaults"].hf
# linear_class, quantization_mode, and how the files store matrices.
LAYOUTS = {
    "bitlinear": ("bitlinear", "offline", "packed"),
    "bitlinear-online": ("bitlinear", "online", "packed"),  # packed in either mode
    "autobitlinear": ("autobitlinear", "offline", "packed"),
    "float-ternary": ("autobitlinear", "offline", "float"),
    "master": ("autobitlinear", "online", "master"),
}


def is_ternary(name: str) -> bool:
    return name.endswith("_proj.weight")


def pack(levels_OI: np.ndarray) -> np.ndarray:
    """transformers' pack_weights."""
    rows = len(levels_OI) // 4
    levels = (levels_OI + 1).astype(np.uint8).reshape(4, rows, -1)
    return levels[0] | levels[1] << 2 | levels[2] << 4 | levels[3] << 6


def checkpoint(path, layout: str, hf=HF, dtype="float32", **more):
    """Writes a checkpoint. Returns its path, and the equal float matrices by name."""
    linear_class, mode, how = LAYOUTS[layout]
    masters = cases.random_tensors(from_hf(copy.deepcopy(hf)), 0)
    stored = {}
    wide = {}
    for i, (name, matrix) in enumerate(masters.items()):
        stored[name] = wide[name] = matrix.astype(tiny.DTYPES[dtype])
        if not is_ternary(name):
            continue
        matrix = stored[name].astype(np.float32)
        mean = np.abs(matrix).mean()
        levels = np.clip(np.rint(matrix / mean), -1, 1)
        if how == "master":
            wide[name] = levels * mean
            continue
        scale = np.float32(2 ** -(i % 3) / 4)  # exact in every type
        wide[name] = levels * scale
        kept = 1 / scale if linear_class == "bitlinear" else scale
        half = np.float32(0.5 if how == "float" else 1)
        stored[name] = pack(levels) if how == "packed" else (levels * half).astype(tiny.DTYPES[dtype])
        stored[f"{name}_scale"] = np.array([kept / half]).astype(tiny.DTYPES[dtype])
    settings = dict(quant_method="bitnet", linear_class=linear_class, quantization_mode=mode) | more
    hf = hf | dict(quantization_config=settings)
    return tiny.write(path, hf, weights=stored, with_tokenizer=False), wide
