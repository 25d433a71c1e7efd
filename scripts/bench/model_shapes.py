"""Shapes of real models for benchmarks, as the contents of their Hugging Face config.json; no download is
needed.
"""

from pathlib import Path
from typing import Any

from xinfer_jax.checkpoint.files import read_json
from xinfer_jax.errors import InputError


def _shape(
    model_type: str, sizes: tuple[int, ...], eps: float, theta: float, context: int, tied: bool, **more: Any
) -> dict[str, Any]:
    """The contents of a config.json; sizes are V, D, F, L, N, K, H."""
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        " head_dim".split()
    )
    classes = {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "bitnet": "BitNetForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma4_text": "Gemma4ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }
    return dict(
        architectures=[classes[model_type]],
        model_type=model_type,
        **dict(zip(names, sizes, strict=True)),
        rms_norm_eps=eps,
        rope_theta=theta,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        torch_dtype="bfloat16",
        **dict(hidden_act="silu") | more,
    )


def _llama3(factor: float) -> dict[str, Any]:
    return dict(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _qwen3_moe(width: int, layers: int, heads: int, expert: int) -> dict[str, Any]:
    """128 experts, of which 8 are chosen."""
    return _shape(
        "qwen3_moe",
        (151936, width, 3 * width, layers, heads, 4, 128),
        1e-6,
        1e6,
        40960,
        False,
        attention_bias=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert,
        norm_topk_prob=True,
        **_FULL,
    )


def _qwen3_5(
    sizes: tuple[int, ...], tied: bool, value_heads: int, model_type: str = "qwen3_5_text", **more: Any
) -> dict[str, Any]:
    """16 key heads of width 128; value_heads: of the same width."""
    return _shape(
        model_type, sizes, 1e-6, 1e7, 262144, tied, linear_num_key_heads=16,
        linear_num_value_heads=value_heads, partial_rotary_factor=0.25, **more,
    )  # fmt: skip


def _gemma4(sizes: tuple[int, ...], context: int, window: int, **more: Any) -> dict[str, Any]:
    return _shape(
        "gemma4_text", sizes, 1e-6, 1e6, context, True, hidden_activation="gelu_pytorch_tanh",
        sliding_window=window, final_logit_softcapping=30.0, **more,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """A window of 128 tokens on every second layer; 4 experts are chosen, whose matrices are in MXFP4:
    --weights=mxfp4.
    """
    yarn = dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
    sizes = (201088, 2880, 2880, layers, 64, 8, 64)
    return _shape("gpt_oss", sizes, 1e-5, 1.5e5, 131072, False, num_local_experts=experts, rope_scaling=yarn)


_FULL = dict(use_sliding_window=False)
SHAPES: dict[str, dict[str, Any]] = {  # V, D, F, L, N, K, H
    "qwen2.5-0.5b": _shape("qwen2", (151936, 896, 4864, 24, 14, 2, 64), 1e-6, 1e6, 32768, True, **_FULL),
    "qwen2.5-1.5b": _shape("qwen2", (151936, 1536, 8960, 28, 12, 2, 128), 1e-6, 1e6, 32768, True, **_FULL),
    "qwen2.5-3b": _shape("qwen2", (151936, 2048, 11008, 36, 16, 2, 128), 1e-6, 1e6, 32768, True, **_FULL),
    "qwen2.5-7b": _shape("qwen2", (152064, 3584, 18944, 28, 28, 4, 128), 1e-6, 1e6, 32768, False, **_FULL),
    "qwen2.5-14b": _shape("qwen2", (152064, 5120, 13824, 48, 40, 8, 128), 1e-6, 1e6, 32768, False, **_FULL),
    "qwen2.5-32b": _shape("qwen2", (152064, 5120, 27648, 64, 40, 8, 128), 1e-6, 1e6, 32768, False, **_FULL),
    "qwen2.5-72b": _shape("qwen2", (152064, 8192, 29568, 80, 64, 8, 128), 1e-6, 1e6, 32768, False, **_FULL),
    "qwen3-0.6b": _shape(
        "qwen3", (151936, 1024, 3072, 28, 16, 8, 128), 1e-6, 1e6, 40960, True, attention_bias=False, **_FULL
    ),
    "qwen3-4b": _shape(
        "qwen3", (151936, 2560, 9728, 36, 32, 8, 128), 1e-6, 1e6, 40960, True, attention_bias=False, **_FULL
    ),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 1536),
    "llama3.2-1b": _shape(
        "llama", (128256, 2048, 8192, 16, 32, 8, 64), 1e-5, 5e5, 131072, True, rope_scaling=_llama3(32.0)
    ),
    "llama3.1-8b": _shape(
        "llama", (128256, 4096, 14336, 32, 32, 8, 128), 1e-5, 5e5, 131072, False, rope_scaling=_llama3(8.0)
    ),
    "llama3.1-70b": _shape(
        "llama", (128256, 8192, 28672, 80, 64, 8, 128), 1e-5, 5e5, 131072, False, rope_scaling=_llama3(8.0)
    ),
    # V0.3.
    "mistral-7b": _shape(
        "mistral", (32768, 4096, 14336, 32, 32, 8, 128), 1e-5, 1e6, 32768, False, sliding_window=None
    ),
    # b1.58-2B-4T; its matrices are ternary: --quantize=ternary.
    "bitnet-2b": _shape(
        "bitnet", (128256, 2560, 6912, 30, 20, 5, 128), 1e-5, 5e5, 4096, True, hidden_act="relu2"
    ),
    # Five layers with a window of 1,024 tokens, then one without.
    "gemma3-4b": _shape(
        "gemma3_text",
        (262208, 2560, 10240, 34, 8, 4, 256),
        1e-6,
        1e6,
        131072,
        True,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=1024,
        sliding_window_pattern=6,
        rope_local_base_freq=1e4,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    # Five layers with a window, then one without, whose heads are 512 wide. Sizes: the metadata of GGUF files
    # of the 26B-A4B; Megatron Bridge's documentation and gemma.cpp's config of the E4B.
    "gemma4-26b-a4b": _gemma4(
        (262144, 2816, 2112, 30, 16, 8, 256),
        262144,
        1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma4-e4b": _gemma4((262144, 2560, 10240, 42, 8, 2, 256), 131072, 512, num_kv_shared_layers=18),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # Three layers of linear attention, then one of full attention.
    "qwen3.5-0.8b": _qwen3_5((248320, 1024, 3584, 24, 8, 2, 256), True, 16),
    "qwen3.5-9b": _qwen3_5((248320, 4096, 12288, 32, 16, 4, 256), False, 32),
    "qwen3.5-35b-a3b": _qwen3_5(
        (248320, 2048, 512, 40, 16, 2, 256),
        False,
        32,
        "qwen3_5_moe_text",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "smollm2-135m": _shape("llama", (49152, 576, 1536, 30, 9, 3, 64), 1e-5, 1e5, 8192, True),
}


def hf_config(name_or_dir: str) -> dict[str, Any]:
    """The config.json of a built-in shape or of a directory.

    Raises:
        InputError: it is neither; the message lists the shapes.
    """
    if name_or_dir in SHAPES:
        return dict(SHAPES[name_or_dir])
    settings = read_json(Path(name_or_dir).expanduser() / "config.json")
    if settings is None:
        raise InputError(
            f"config {name_or_dir!r} is neither a built-in shape ({', '.join(SHAPES)}) nor a directory with"
            " config.json"
        )
    return settings
