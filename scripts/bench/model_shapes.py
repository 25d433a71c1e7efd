"""Shapes of real models, as the contents of their Hugging Face config.json; no download is needed."""

from pathlib import Path
from typing import Any

from xinfer_jax.errors import InputError
from xinfer_jax.formats.files import read_json

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " head_dim".split()
)


def _shape(
    model_type: str, sizes: tuple[int, ...], theta: float, context: int, tied: bool = False, **more: Any
) -> dict[str, Any]:
    """The contents of a config.json; sizes are V, D, F, L, N, K, H."""
    named = dict(zip(_SIZES, sizes, strict=True))
    named |= dict(rope_theta=theta, max_position_embeddings=context, tie_word_embeddings=tied)
    return dict(model_type=model_type, rms_norm_eps=1e-6) | named | more


def _llama3(sizes: tuple[int, ...], factor: float, tied: bool = False) -> dict[str, Any]:
    rope = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    rope |= dict(original_max_position_embeddings=8192)
    return _shape("llama", sizes, 5e5, 131072, tied, rms_norm_eps=1e-5, rope_scaling=rope)


def _qwen3_moe(sizes: tuple[int, ...], expert: int) -> dict[str, Any]:
    more = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, moe_intermediate_size=expert)
    return _shape("qwen3_moe", sizes, 1e6, 40960, **more)


def _qwen3_5(
    sizes: tuple[int, ...], tied: bool, value_heads: int, kind: str = "", **more: Any
) -> dict[str, Any]:
    """Three layers of linear attention, with 16 key heads and as wide value heads, then a full one."""
    heads = dict(linear_num_key_heads=16, linear_num_value_heads=value_heads)
    return _shape(
        f"qwen3_5_{kind}text", sizes, 1e7, 262144, tied, partial_rotary_factor=0.25, **heads, **more
    )


def _gemma4(sizes: tuple[int, ...], context: int, window: int, **more: Any) -> dict[str, Any]:
    """Five layers with a window, then one without, whose heads are 512 wide. Sizes: the metadata of GGUF
    files of the 26B-A4B; Megatron Bridge's documentation and gemma.cpp's config of the E4B.
    """
    more |= dict(hidden_activation="gelu_pytorch_tanh", sliding_window=window, final_logit_softcapping=30.0)
    return _shape("gemma4_text", sizes, 1e6, context, True, **more)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """A window of 128 tokens on every second layer; 4 experts are chosen, whose matrices are in MXFP4:
    --weights=mxfp4.
    """
    yarn = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
    yarn |= dict(original_max_position_embeddings=4096)
    sizes = (201088, 2880, 2880, layers, 64, 8, 64)
    more = dict(num_local_experts=experts, rope_scaling=yarn, rms_norm_eps=1e-5)
    return _shape("gpt_oss", sizes, 1.5e5, 131072, **more)


SHAPES: dict[str, dict[str, Any]] = {  # V, D, F, L, N, K, H
    "tiny": _shape("qwen2", (500, 64, 96, 1, 4, 2, 64), 1e6, 4096),
    "qwen2.5-0.5b": _shape("qwen2", (151936, 896, 4864, 24, 14, 2, 64), 1e6, 32768, True),
    "qwen2.5-1.5b": _shape("qwen2", (151936, 1536, 8960, 28, 12, 2, 128), 1e6, 32768, True),
    "qwen2.5-3b": _shape("qwen2", (151936, 2048, 11008, 36, 16, 2, 128), 1e6, 32768, True),
    "qwen2.5-7b": _shape("qwen2", (152064, 3584, 18944, 28, 28, 4, 128), 1e6, 32768),
    "qwen2.5-14b": _shape("qwen2", (152064, 5120, 13824, 48, 40, 8, 128), 1e6, 32768),
    "qwen2.5-32b": _shape("qwen2", (152064, 5120, 27648, 64, 40, 8, 128), 1e6, 32768),
    "qwen2.5-72b": _shape("qwen2", (152064, 8192, 29568, 80, 64, 8, 128), 1e6, 32768),
    "qwen3-0.6b": _shape("qwen3", (151936, 1024, 3072, 28, 16, 8, 128), 1e6, 40960, True),
    "qwen3-4b": _shape("qwen3", (151936, 2560, 9728, 36, 32, 8, 128), 1e6, 40960, True),
    "qwen3-30b-a3b": _qwen3_moe((151936, 2048, 6144, 48, 32, 4, 128), 768),
    "qwen3-235b-a22b": _qwen3_moe((151936, 4096, 12288, 94, 64, 4, 128), 1536),
    "llama3.2-1b": _llama3((128256, 2048, 8192, 16, 32, 8, 64), 32.0, True),
    "llama3.1-8b": _llama3((128256, 4096, 14336, 32, 32, 8, 128), 8.0),
    "llama3.1-70b": _llama3((128256, 8192, 28672, 80, 64, 8, 128), 8.0),
    # V0.3.
    "mistral-7b": _shape(
        "mistral", (32768, 4096, 14336, 32, 32, 8, 128), 1e6, 32768, rms_norm_eps=1e-5, sliding_window=None
    ),
    # b1.58-2B-4T; its matrices are ternary: --quantize=ternary.
    "bitnet-2b": _shape("bitnet", (128256, 2560, 6912, 30, 20, 5, 128), 5e5, 4096, True, rms_norm_eps=1e-5),
    # Five layers with a window of 1,024 tokens, then one without.
    "gemma3-4b": _shape(
        "gemma3_text",
        (262208, 2560, 10240, 34, 8, 4, 256),
        1e6,
        131072,
        True,
        sliding_window=1024,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
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
    "qwen3.5-0.8b": _qwen3_5((248320, 1024, 3584, 24, 8, 2, 256), True, 16),
    "qwen3.5-9b": _qwen3_5((248320, 4096, 12288, 32, 16, 4, 256), False, 32),
    "qwen3.5-35b-a3b": _qwen3_5(
        (248320, 2048, 512, 40, 16, 2, 256),
        False,
        32,
        "moe_",
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "smollm2-135m": _shape("llama", (49152, 576, 1536, 30, 9, 3, 64), 1e5, 8192, True, rms_norm_eps=1e-5),
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
