"""Small gpt-oss checkpoints with experts in MXFP4, as the published ones are."""

import numpy as np
import parity_cases as cases

from xinfer_jax.families.reading import from_hf

HF = cases.CASES["gpt-oss-published"].hf | dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    quantization_config=dict(
        quant_method="mxfp4",
        modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    ),
)
CONFIG = from_hf(HF)


def tensors() -> dict[str, np.ndarray]:
    """Random tensors by their names in the files."""
    draw = np.random.default_rng(0).integers
    stored = cases.fuse_tensors(CONFIG, cases.random_tensors(CONFIG, 3))
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        (experts, inputs, outputs) = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        stored[f"{name}_blocks"] = draw(0, 256, (*shape, 16), np.uint8)
        stored[f"{name}_scales"] = draw(120, 124, shape, np.uint8)
    return {name: np.ascontiguousarray(x) for name, x in stored.items()}
