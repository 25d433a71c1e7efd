"""The tables of families: their published models, and the tests that stand behind each feature."""

import dataclasses
import functools
from typing import Any

from feature_cases import CHECKS, FAMILIES, is_supported
from gpu.programs import layer_period
from mesh_cases import FAMILIES as MESH_FAMILIES, OTHERS as MESH_OTHERS
from parity_cases import CASES
from paths import GOLDEN

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.checkpoint.gguf_checkpoint import FAMILIES as GGUF_FAMILIES
from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.estimates.card_specs import CARDS, TPUS, Card, Tpu
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.estimates.plan_estimates import device_weights
from xinfer_jax.families.reading import from_hf
from xinfer_jax.plugins import TABLE, names

from .markdown import code, table

# Models that were published in each family, as their names on the hub begin.
PUBLISHED = {
    "apertus": "Apertus-8B, -70B",
    "arcee": "AFM-4.5B",
    "bamba": "Bamba-9B-v1, -v2",
    "bitnet": "bitnet-b1.58-2B-4T",
    "cohere2": "c4ai-command-r7b, c4ai-command-a",
    "deepseek_v2": "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-Coder-V2",
    "deepseek_v3": "DeepSeek-V3, -V3.1, -R1; Kimi-K2; the text of Kimi-K2.5",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE-4.5-0.3B",
    "ernie4_5_moe": "ERNIE-4.5-21B-A3B, -300B-A47B",
    "exaone4": "EXAONE-4.0-1.2B, -32B",
    "falcon_h1": "Falcon-H1-0.5B, -1.5B, -1.5B-Deep, -3B, -7B, -34B",
    "gemma": "gemma-2b, -7b",
    "gemma2": "gemma-2-2b, -9b, -27b",
    "gemma3_text": "gemma-3-270m, -1b; the text of gemma-3-4b, -12b, -27b; embeddinggemma-300m (vectors"
    " only)",
    "gemma4_text": "the text of gemma-4-E2B, -E4B, -31B, -26B-A4B",
    "gemma4_unified_text": "the text of gemma-4-12B",
    "glm": "glm-4-9b-hf, glm-4-9b-chat-hf; glm-edge-1.5b, -4b",
    "glm4": "GLM-4-9B-0414, -32B-0414; GLM-Z1-9B-0414, -32B-0414",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss-20b, -120b",
    "granite": "granite-3.0 to 3.3 (2b, 8b)",
    "granitemoe": "granite-3.0 to 3.1 (1b-a400m, 3b-a800m)",
    "granitemoehybrid": "granite-4.0-h-350m, -h-1b, -h-micro, -h-tiny, -h-small; granite-4.0-350m, -1b,"
    " -micro",
    "granitemoeshared": "moe-7b-1b-active-shared-experts",
    "hunyuan_v1_dense": "Hunyuan-0.5B, -1.8B, -4B, -7B",
    "hunyuan_v1_moe": "Hunyuan-A13B",
    "mamba2": "Mamba-2 130M to 2.7B, Codestral-Mamba-7B (with the tensor names of transformers)",
    "lfm2": "LFM2-350M, -700M, -1.2B, -2.6B; LFM2.5-1.2B",
    "lfm2_moe": "LFM2-8B-A1B",
    "lfm3": "LFM3-1.7B",
    "llama": "Llama-2, Llama-3, 3.1, 3.2 (text) and 3.3; SmolLM2",
    "minicpm3": "MiniCPM3-4B",
    "minimax_m2": "MiniMax-M2, -M2.1",
    "ministral3": "Ministral-3-3B, -8B, -14B (the text)",
    "mistral": "Mistral-7B, Mistral-Small-24B; the text of Mistral-Small-3.1 and 3.2",
    "mistral4": "Mistral-Small-4 (the text)",
    "mixtral": "Mixtral-8x7B, -8x22B",
    "nemotron_h": "Nemotron-H-8B, -47B, -56B; Nemotron-Nano-9B-v2, -12B-v2; Nemotron-3-Nano-30B-A3B,"
    " -Super-120B-A12B",
    "olmo2": "OLMo-2-1B, -7B, -13B, -32B",
    "olmo3": "Olmo-3-7B, -32B",
    "olmoe": "OLMoE-1B-7B",
    "phi3": "Phi-3-mini, -medium; Phi-3.5-mini; Phi-4-mini; phi-4",
    "qwen2": "Qwen2 and Qwen2.5 (0.5B to 72B), QwQ-32B; the text of Qwen2-VL and Qwen2.5-VL",
    "qwen2_moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3": "Qwen3-0.6B, -1.7B, -4B, -8B, -14B, -32B; Qwen3-Embedding, Qwen3-Reranker; the text of Qwen3-VL",
    "qwen3_5_moe_text": "the text of Qwen3.5-35B-A3B and larger mixtures",
    "qwen3_5_text": "the text of Qwen3.5-0.8B, -2B, -4B, -9B, -27B",
    "qwen3_moe": "Qwen3-30B-A3B, -235B-A22B; Qwen3-Coder-30B-A3B, -480B-A35B; the text of Qwen3-VL-30B-A3B,"
    " -235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    "seed_oss": "Seed-OSS-36B",
    "smollm3": "SmolLM3-3B",
    "youtu": "Youtu-LLM-2B",
}  # fmt: skip
TESTED = "tested"
COMPILED = "compiled only"
_ATTENTION = {"decode_attention", "prefill_attention"}
NO = "no"
_GPU = CARDS["h200"], CARDS["rtx4090"]
_TPU = (TPUS["v6e"],)
_ROWS = 8
# Of a family without a published shape here, the default sizes of its config class in transformers 5.24.
_STAND_INS = dict(
    granitemoeshared=dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024,
    ),
    gemma4_unified_text=dict(
        vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, global_head_dim=512, rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=262144, sliding_window=1024,
    ),
)  # fmt: skip


def families() -> list[str]:
    """Returns each `model_type` with its published models and its file."""
    rows = []
    for family in sorted(names("family")):
        file = f"{TABLE['family', family][0].rpartition('.')[2]}.py"
        link = f"[{file}](../../xinfer_jax/families/{file})"
        rows.append([code(family), PUBLISHED[family], link])
    return table(["`model_type`", "published models", "file"], rows)


def formats() -> list[str]:
    """Returns the formats in which weights of each family are read and written."""
    columns = {
        "Hugging Face files": lambda family: _tested(_has_golden_file(family)),
        "int8, int4 while loading": lambda family: _feature("quantized", family),
        "own int8, int4 files": lambda family: _feature("own_files", family),
        "AWQ scales": lambda family: _feature("scales", family),
        "FP8 files": lambda family: _feature("fp8_files", family),
        "GGUF": lambda family: _tested(family in GGUF_FAMILIES),
    }
    return _table(columns)


def features() -> list[str]:
    """Returns the features and the devices of each family."""
    columns = {
        "adapters": lambda family: _feature("adapters", family),
        "training": lambda family: _tested(family in {case.hf["model_type"] for case in CASES.values()}),
        "engine": lambda family: _feature("engine", family),
        "drafts from the text": lambda family: _feature("drafts", family),
        "as a draft model": lambda family: _feature("draft_model", family),
        "mesh": lambda family: _tested(family in mesh_families()),
        "GPU kernels": lambda family: _kernels(family, _GPU),
        "TPU kernels": lambda family: _kernels(family, _TPU),
    }
    return _table(columns)


def mesh_families() -> set[str]:
    """Returns the families that the tests of meshes run."""
    return {hf["model_type"] for hf in (*MESH_FAMILIES.values(), *MESH_OTHERS.values())}


def _table(columns: dict[str, Any]) -> list[str]:
    rows = [[code(name), *(of(name) for of in columns.values())] for name in sorted(names("family"))]
    return table(["`model_type`", *columns], rows)


def _tested(is_tested: bool) -> str:
    return TESTED if is_tested else NO


def _feature(feature: str, family: str) -> str:
    return _tested(feature in CHECKS and family in FAMILIES and is_supported(feature, family))


def _has_golden_file(family: str) -> bool:
    return any(
        (GOLDEN / f"{name}.npz").is_file() for name, case in CASES.items() if case.hf["model_type"] == family
    )


def _kernels(family: str, devices: tuple[Card | Tpu, ...]) -> str:
    """Returns "compiled only" if kernels compute the attention of a family's published shapes on all of the
    devices, else "no" or "decode compiled only". If shapes differ, the text names them.
    """
    found = {
        name: set.intersection(*({*kernels_of(config, x)} for x in devices))
        for name, config in published_configs(family).items()
    }
    if all(kernels == {"decode_attention"} for kernels in found.values()):
        return f"decode {COMPILED}"
    lacking = [name for name, kernels in found.items() if not _ATTENTION <= kernels]
    if len(lacking) == len(found):
        return NO
    return f"{COMPILED}; {', '.join(map(code, lacking))}: {NO}" if lacking else COMPILED


def published_configs(family: str) -> dict[str, ModelConfig]:
    """Returns the configs of published models of a family, each with one period of its layers."""
    shapes = {name: hf for name, hf in SHAPES.items() if hf["model_type"] == family and name != "tiny"}
    if not shapes:
        shapes = {"": dict(model_type=family, **_STAND_INS[family])}
    return {name: _one_period(from_hf(hf)) for name, hf in shapes.items()}


def _one_period(config: ModelConfig) -> ModelConfig:
    if config.shares_kv:  # layers at the end use keys of others
        return config
    period = layer_period(config)
    return dataclasses.replace(config, layers=config.layers[:period], num_hidden_layers=period)


@functools.cache
def kernels_of(config: ModelConfig, device: Card | Tpu) -> tuple[str, ...]:
    """Returns the kernels that compute attention on a device when `generate` runs in bfloat16."""
    with kernels_pallas.assume_device(device.capability, device.name, device.platform):
        used = xj.kernels_used(
            device_weights(config, "bfloat16", 1), config, rows=_ROWS, cache_dtype="bfloat16"
        )
    return tuple(kernel for kernel in _ATTENTION if kernel in used and used[kernel].impl != "xla")
