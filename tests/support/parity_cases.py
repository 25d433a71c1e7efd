"""The small random checkpoints that are compared with Hugging Face transformers: a config.json for each.

`scripts/make_golden.py` writes tests/golden from them and test_golden.py compares with those files anywhere;
test_parity_live.py compares with transformers itself.
"""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np

from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.families.naming import FileSpec, file_specs
from xinfer_jax.families.reading import from_hf
from xinfer_jax.families.skipped_tensors import text_name
from xinfer_jax.weights.params import Params

VOCAB = 96
NEW_TOKENS = 24  # greedy ids per prompt
LENGTHS = (5, 23, 77)  # of the prompts: below and above every window, and above 64
_LONG = (7, 300, 530)  # several key blocks; two query blocks and two prefill chunks


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint's config.json, and the lengths of its prompts."""

    hf: dict[str, Any]
    lengths: tuple[int, ...] = LENGTHS

    @property
    def config(self) -> ModelConfig:
        return from_hf(copy.deepcopy(self.hf))

    @property
    def continued_prompts(self) -> tuple[int, ...]:
        """Indices of the prompts to continue: not those that would cross the maximum of rope type dynamic, or
        the length at which longrope switches its factors. None of a model that is not causal.
        """
        config = self.config
        if self.hf.get("use_bidirectional_attention") is True:
            return ()
        limit = config.max_position_embeddings if config.rope.rope_type == "dynamic" else 10**9
        switch = config.rope.switches_at or limit
        return tuple(
            i
            for i, n in enumerate(self.lengths)
            if n + NEW_TOKENS <= limit and not n <= switch < n + NEW_TOKENS
        )


def _hf(model_type: str, **changes: Any) -> dict[str, Any]:
    architecture = {
        "smollm3": "SmolLM3",
        "bitnet": "BitNet",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "seed_oss": "SeedOss",
        "gemma3_text": "Gemma3",
        "gemma4_text": "Gemma4",
        "gemma4_unified_text": "Gemma4Unified",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "glm4_moe_lite": "Glm4MoeLite",
        "minicpm3": "MiniCPM3",
        "glm4_moe": "Glm4Moe",
        "ernie4_5": "Ernie4_5",
        "ernie4_5_moe": "Ernie4_5_Moe",
        "hunyuan_v1_dense": "HunYuanDenseV1",
        "hunyuan_v1_moe": "HunYuanMoEV1",
        "minimax_m2": "MiniMaxM2",
        "gpt_oss": "GptOss",
        "falcon_h1": "FalconH1",
        "granitemoehybrid": "GraniteMoeHybrid",
        "granitemoe": "GraniteMoe",
        "granitemoeshared": "GraniteMoeShared",
        "lfm2_moe": "Lfm2Moe",
        "nemotron_h": "NemotronH",
        "qwen3_next": "Qwen3Next",
        "qwen3_5_text": "Qwen3_5",
        "qwen3_5_moe_text": "Qwen3_5Moe",
    }.get(model_type, model_type.capitalize())
    return dict(
        architectures=[f"{architecture}ForCausalLM"], model_type=model_type, vocab_size=VOCAB,
        hidden_size=48, intermediate_size=80,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_act="silu",
        max_position_embeddings=1024,
        rms_norm_eps=1e-6, attention_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=None,
    ) | changes  # fmt: skip


def _old(rope_theta: float = 10000.0, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Fields of checkpoints before transformers 5."""
    return dict(
        rope_theta=rope_theta,
        rope_scaling=scaling,
        torch_dtype="bfloat16",
        use_cache=True,
        transformers_version="4.43.1",
    )


def _new(rope_type: str = "default", rope_theta: float = 10000.0, **rope: Any) -> dict[str, Any]:
    """Fields of transformers 5."""
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=rope_theta) | rope, dtype="float32")


_S = "sliding_attention"
_F = "full_attention"
_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
_GROUPS = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_group=4, topk_group=2, head_dim=16
)
_LATENT = dict(kv_lora_rank=28, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, head_dim=8)
_NEMOTRON = _GROUPS | dict(
    mamba_num_heads=6,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=24,
    layer_norm_epsilon=1e-5,
    moe_shared_expert_intermediate_size=36,
    routed_scaling_factor=2.5,
    mlp_hidden_act="relu2",
)
_YARN40 = dict(
    type="yarn", factor=40.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
    beta_fast=32, beta_slow=1,
)  # fmt: skip
_OSS = dict(num_local_experts=8, intermediate_size=20, sliding_window=8, rms_norm_eps=1e-5)
_LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=20,
    head_dim=16,
    rms_norm_eps=1e-3,  # less would enlarge rounding errors of outputs near 0: one ulp of the weights by 1e-4
)  # fmt: skip
_L = "linear_attention"
_MAMBA = dict(mamba_d_state=20, mamba_chunk_size=16)
_FALCON = dict(
    ssm_multipliers=[0.7, 0.5, 0.9, 1.3, 0.8],
    mlp_multipliers=[0.9, 0.6],
    ssm_in_multiplier=1.25,
    ssm_out_multiplier=0.4,
    attention_in_multiplier=1.1,
    attention_out_multiplier=0.8,
    key_multiplier=0.7,
    embedding_multiplier=3.5,
    lm_head_multiplier=1.7,
)
_GRANITE = dict(
    embedding_multiplier=1.5, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=1.5
)
_GEMMA = dict(head_dim=16, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=24, sliding_window=8)

_GEMMA4 = dict(
    head_dim=16, global_head_dim=24, sliding_window=8, hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0, num_experts=None, rms_norm_eps=1e-3,
)  # fmt: skip


def _long(pairs: int) -> dict[str, Any]:
    """longrope as in Phi: a factor for each pair of channels."""
    short, long = ([round(1 + slope * i, 2) for i in range(pairs)] for slope in (0.1, 1.5))
    return dict(type="longrope", short_factor=short, long_factor=long)


_CASES = {
    # qwen2: bias on q, k and v
    "qwen2-gqa-tied-old": _hf(
        "qwen2", **_old(1e6), tie_word_embeddings=True, use_sliding_window=False, sliding_window=32,
        max_window_layers=1
    ),
    "qwen2-mqa-untied-new": _hf("qwen2", **_new(rope_theta=1e6), tie_word_embeddings=False,
        num_key_value_heads=1),
    "qwen2-window-late-layers": _hf("qwen2", **_old(), use_sliding_window=True, sliding_window=8,
        max_window_layers=1),
    "qwen2-window-layer-types": _hf(
        "qwen2", **_new(), use_sliding_window=True, sliding_window=12, layer_types=[_S, _F, _S],
        max_window_layers=3
    ),
    "qwen2-long-window": _hf("qwen2", **_old(1e5), use_sliding_window=True, sliding_window=290,
        max_window_layers=2),
    # qwen3: norms on query and key heads
    "qwen3-head-dim-tied": _hf("qwen3", **_old(1e6), tie_word_embeddings=True, head_dim=16,
        sliding_window=None),
    "qwen3-bias-mqa": _hf("qwen3", **_new(), attention_bias=True, num_key_value_heads=1, head_dim=24),
    "qwen3-default-head-dim": _hf("qwen3", **_new(rope_theta=5e4), hidden_size=32, num_attention_heads=2,
        num_key_value_heads=None),
    "qwen3-window-layer-types-yarn": _hf(
        "qwen3", **_new("yarn", factor=2.0, original_max_position_embeddings=40, truncate=False),
        head_dim=16, use_sliding_window=True, sliding_window=6, layer_types=[_F, _S, _S],
    ),
    "qwen3-dynamic-old": _hf("qwen3", **_old(1e4, dict(type="dynamic", factor=3.0)), head_dim=16,
        max_position_embeddings=50),
    # llama: biases on request
    "llama2-mha-old": _hf("llama", **_old(), num_key_value_heads=None, rms_norm_eps=1e-5, pretraining_tp=1),
    "llama3-old-tied": _hf(
        "llama", **_old(5e5, dict(rope_type="llama3") | _LLAMA3), tie_word_embeddings=True, head_dim=16,
        rms_norm_eps=1e-5
    ),
    "llama3-new": _hf("llama", **_new("llama3", 1e4, **_LLAMA3 | dict(factor=32.0, high_freq_factor=6.0))),
    "llama-bias": _hf("llama", **_new(), attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "llama-mlp-bias-head-dim": _hf("llama", **_old(), mlp_bias=True, attention_bias=False, head_dim=8),
    "llama-linear-old": _hf("llama", **_old(1e4, dict(type="linear", factor=2.5))),
    "llama-dynamic-old": _hf("llama", **_old(1e4, dict(type="dynamic", factor=2.0)),
        max_position_embeddings=48),
    "llama-yarn-attention-factor": _hf("llama",
        **_new("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3)),
    "llama-yarn-mscale": _hf(
        "llama",
        **_new("yarn", factor=8.0, original_max_position_embeddings=128, mscale=1.4, mscale_all_dim=0.7,
            beta_fast=4, beta_slow=0.5),
    ),
    "llama-yarn-mscale-alone": _hf("llama",
        **_new("yarn", factor=8.0, original_max_position_embeddings=128, mscale=0.707, beta_fast=3.0)),
    "llama-yarn-factor-from-lengths": _hf(
        "llama",
        **_new("yarn", factor=None, original_max_position_embeddings=128, truncate=False, beta_slow=3.0)
    ),
    "llama-yarn-own-length": _hf("llama", **_old(1e4, dict(rope_type="yarn", factor=2.0)),
        max_position_embeddings=128, head_dim=16),
    "llama-yarn-length-outside": _hf("llama", **_new("yarn", 1e4, factor=16.0),
        original_max_position_embeddings=64, head_dim=16),
    # mistral: a window on every layer
    "mistral-window": _hf("mistral", **_old(), sliding_window=8, head_dim=16),
    "mistral-no-window-tied": _hf("mistral", **_new(rope_theta=1e6), sliding_window=None, head_dim=20,
        tie_word_embeddings=True),
    "mistral-long-window": _hf("mistral", **_new(), sliding_window=70, num_key_value_heads=1),
    # ministral3: queries scaled by their position
    "ministral3-published": _hf("ministral3",
        **_new("yarn", 1e6, type="yarn", factor=16.0, original_max_position_embeddings=16, beta_fast=32.0,
            beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.6),
        head_dim=16, max_position_embeddings=256, sliding_window=None),
    "ministral3-window-tied-default-rope": _hf("ministral3",
        **_new(rope_theta=3e4, original_max_position_embeddings=10, llama_4_scaling_beta=0.3), head_dim=20,
        sliding_window=30, num_key_value_heads=1, tie_word_embeddings=True),
    "ministral3-long-yarn": _hf("ministral3",
        **_new("yarn", factor=4.0, original_max_position_embeddings=100, attention_factor=1.2, truncate=False,
            llama_4_scaling_beta=0.2), head_dim=24, num_key_value_heads=4, sliding_window=290),
    # granite: factors on embeddings, scores, residuals and logits
    "granite-tied-old": _hf("granite", **_old(1e4), attention_bias=False, tie_word_embeddings=True,
        embedding_multiplier=1.5, residual_multiplier=0.8, attention_multiplier=0.1, logits_scaling=0.5),
    "granite-bias-llama3-new": _hf("granite", **_new("llama3", 1e5, **_LLAMA3), attention_bias=True,
        mlp_bias=True, num_key_value_heads=1, embedding_multiplier=12, residual_multiplier=0.22,
        attention_multiplier=0.3, logits_scaling=3),
    # arcee: no gate
    "arcee-yarn-old": _hf("arcee",
        **_old(1e4, dict(type="yarn", factor=20.0, original_max_position_embeddings=64, mscale=1.0)),
        hidden_act="relu2", head_dim=None),
    "arcee-bias-tied-new": _hf("arcee", **_new(rope_theta=5e4), hidden_act="relu2", num_key_value_heads=1,
        head_dim=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    # qwen3_moe: experts
    "moe-defaults": _hf("qwen3_moe", **_old(1e6), **_MOE, norm_topk_prob=True, head_dim=16,
        sliding_window=None, max_window_layers=3),
    "moe-some-layers-dense": _hf(
        "qwen3_moe", **_new("yarn", factor=4.0, original_max_position_embeddings=64), **_MOE,
        num_hidden_layers=5, decoder_sparse_step=2,
        mlp_only_layers=[3], tie_word_embeddings=True, attention_bias=True, use_sliding_window=True,
        sliding_window=9,
    ),
    # olmo2: norms after attention and MLP, and over all heads together
    "olmo2-bias-new": _hf("olmo2", **_new(rope_theta=5e5), attention_bias=True),
    # olmo3: norms after attention and MLP, and over all heads together; rope scaled on full layers
    "olmo3-yarn-old": _hf(
        "olmo3",
        **_old(5e5,
            dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=40, attention_factor=1.2079)),
        num_hidden_layers=4, sliding_window=10, attention_bias=True,
    ),
    "olmo3-two-ropes-new": _hf(
        "olmo3", sliding_window=12, layer_types=[_S, _F, _S], num_key_value_heads=None,
        rope_parameters={_F: dict(rope_type="linear", factor=2.0, rope_theta=2e4),
            _S: dict(rope_type="default", rope_theta=1e4)},
    ),
    # gemma: scaled embeddings, norms before and after, norm weights offset by 1, soft caps, two ropes
    "gemma2-no-caps-layer-types": _hf(
        "gemma2", **_GEMMA | dict(query_pre_attn_scalar=16), **_new(rope_theta=3e4),
        attn_logit_softcapping=None,
        final_logit_softcapping=None, layer_types=[_F, _F, _S], tie_word_embeddings=False,
        attention_bias=True,
    ),
    "gemma2-long-caps": _hf(
        "gemma2", **_GEMMA | dict(sliding_window=290), attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0, tie_word_embeddings=False,
    ),
    # EmbeddingGemma: a token sees those after it too
    "gemma3-bidirectional": _hf(
        "gemma3_text", **_old(1e6), **_GEMMA | dict(sliding_window=13), rope_local_base_freq=1e4,
        use_bidirectional_attention=True, sliding_window_pattern=3, num_hidden_layers=4,
    ),
    "gemma3-bidirectional-long-untied": _hf(
        "gemma3_text", **_GEMMA | dict(sliding_window=290), layer_types=[_F, _S], num_hidden_layers=2,
        use_bidirectional_attention=True, tie_word_embeddings=False, num_key_value_heads=1,
        rope_parameters={_F: dict(rope_type="default", rope_theta=1e5),
            _S: dict(rope_type="default", rope_theta=5e3)},
    ),
    "gemma3-old": _hf(
        "gemma3_text", **_old(1e6, dict(rope_type="linear", factor=8.0)), **_GEMMA, num_hidden_layers=7,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    ),
    "gemma3-two-ropes-new": _hf(
        "gemma3_text", **_GEMMA, layer_types=[_S, _F, _S], final_logit_softcapping=4.0,
        tie_word_embeddings=False,
        rope_parameters={_F: dict(rope_type="default", rope_theta=1e5),
            _S: dict(rope_type="default", rope_theta=5e3)},
    ),
    # gemma4: full layers with heads of another width, values without a matrix or of other layers
    "gemma4-shared-kv": _hf(
        "gemma4_text",
        **_GEMMA4
        | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_hidden_layers=6),
        layer_types=[_S, _F, _S, _S, _F, _F], num_kv_shared_layers=3, use_double_wide_mlp=True,
        final_logit_softcapping=4.0,
    ),
    "gemma4-experts": _hf(
        "gemma4_text", **_GEMMA4 | dict(num_experts=6), enable_moe_block=True, top_k_experts=2,
        moe_intermediate_size=24, attention_k_eq_v=True, num_global_key_value_heads=1, attention_bias=True,
        layer_types=[_S, _F, _F], tie_word_embeddings=False,
        rope_parameters={_F: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e5),
            _S: dict(rope_type="default", rope_theta=5e3)},
    ),
    # gemma4_unified: without experts and inputs of layers
    "gemma4-unified-values-are-keys": _hf(
        "gemma4_unified_text", head_dim=16, global_head_dim=24, sliding_window=8, rms_norm_eps=1e-3,
        hidden_activation="gelu_pytorch_tanh", attention_k_eq_v=True, num_global_key_value_heads=1,
        use_bidirectional_attention="vision", final_logit_softcapping=4.0, layer_types=[_S, _F, _F],
        tie_word_embeddings=False,
        rope_parameters={_F: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e5),
            _S: dict(rope_type="default", rope_theta=5e3)},
    ),
    "gemma4-unified-shared-kv": _hf(
        "gemma4_unified_text", head_dim=12, global_head_dim=16, sliding_window=11, rms_norm_eps=1e-3,
        hidden_activation="gelu_pytorch_tanh", layer_types=[_S, _F, _S, _F], num_hidden_layers=4,
        num_kv_shared_layers=2, use_double_wide_mlp=True, num_key_value_heads=1, attention_bias=True,
    ),
    # gpt_oss: sinks, experts with biases and clamped values
    "gpt-oss-published": _hf(
        "gpt_oss",
        **_old(1.5e5, dict(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=128)),
        **_OSS, num_experts_per_tok=2, head_dim=16, layer_types=[_S, _F, _S], swiglu_limit=1.5,
        attention_bias=True, experts_per_token=2, initial_context_length=128,
    ),
    "gpt-oss-no-bias-tied": _hf(
        "gpt_oss", **_new(rope_theta=1e4), **_OSS | dict(num_local_experts=3), num_experts_per_tok=1,
        head_dim=12, num_hidden_layers=4, num_key_value_heads=1, swiglu_alpha=1.1, attention_bias=False,
        tie_word_embeddings=True,
    ),
    # phi3: fused matrices, rotary embedding of a part of each head, longrope
    "phi3-defaults": _hf("phi3", **_old(), num_key_value_heads=None, sliding_window=30),
    "phi3-longrope-beyond": _hf(
        "phi3", **_old(1e4, dict(_long(6), factor=2.0)), original_max_position_embeddings=4,
        tie_word_embeddings=True
    ),
    "phi3-longrope-both-partial": _hf(
        "phi3", **_new("longrope", partial_rotary_factor=0.75, **_long(6)), hidden_size=64,
        original_max_position_embeddings=32
    ),
    "phi3-partial-attention-factor": _hf(
        "phi3", **_old(1e4, dict(_long(3), attention_factor=1.3)), partial_rotary_factor=0.5,
        original_max_position_embeddings=128
    ),
    # bitnet: norms before the output and down matrices, relu squared
    "bitnet-defaults": _hf("bitnet", **_old(5e5), hidden_act="relu2", num_key_value_heads=1,
        tie_word_embeddings=True),
    "bitnet-bias-new": _hf("bitnet", **_new(rope_theta=1e4), hidden_act="relu2", attention_bias=True),
    # hybrids: linear attention, and full attention with an output gate
    "qwen3-next-sparse-step": _hf(
        "qwen3_next", **_new(rope_theta=1e5), **_LINEAR, **_MOE, num_hidden_layers=6,
        full_attention_interval=3, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False,
        shared_expert_intermediate_size=20,
    ),
    "qwen3-5-tied": _hf(
        "qwen3_5_text",
        **_new(rope_theta=1e5, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.5),
        **_LINEAR | dict(linear_num_value_heads=2, linear_conv_kernel_dim=3, linear_value_head_dim=12),
        layer_types=[_L, _F, _L], tie_word_embeddings=True,
    ),
    "qwen3-5-moe-no-shared": _hf(
        "qwen3_5_moe_text", **_new(), **_LINEAR, **_MOE, full_attention_interval=2, attention_bias=True,
        shared_expert_intermediate_size=0, hidden_act="gelu_pytorch_tanh",
    ),
    # glm4_moe: experts by sigmoid scores with a bias, in groups; a part of each head is rotated
    "glm4-moe-groups": _hf("glm4_moe", **_old(1e6), **_GROUPS, n_shared_experts=2, attention_bias=True,
        use_qk_norm=True, routed_scaling_factor=1.5, num_nextn_predict_layers=1),
    "glm4-moe-one-group-tied": _hf(
        "glm4_moe",
        **_new("yarn", 1e5, factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.75),
        **_GROUPS | dict(n_group=1, topk_group=1), first_k_dense_replace=0, norm_topk_prob=False,
        n_shared_experts=0, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    # deepseek_v3: latent attention, and experts in groups
    "deepseek-v3-yarn-groups": _hf(
        "deepseek_v3", **_old(1e4, _YARN40), **_GROUPS | _LATENT, q_lora_rank=20, num_key_value_heads=4,
        first_k_dense_replace=1, n_shared_experts=2, rms_norm_eps=1e-5, num_nextn_predict_layers=1,
    ),
    "deepseek-v3-bias-one-query-matrix-halves": _hf(
        "deepseek_v3", **_new(rope_theta=5e4), **_GROUPS | _LATENT | dict(n_group=1, topk_group=1),
        q_lora_rank=None, num_key_value_heads=4, attention_bias=True, rope_interleave=False,
        first_k_dense_replace=2, n_shared_experts=1, routed_scaling_factor=2.827,
    ),
    "deepseek-v2-greedy": _hf(
        "deepseek_v2", **_old(1e4, _YARN40 | dict(mscale=0.707, mscale_all_dim=0.707)), **_GROUPS | _LATENT,
        q_lora_rank=None, num_key_value_heads=4, first_k_dense_replace=1, n_shared_experts=2,
        norm_topk_prob=True, topk_method="greedy",
    ),
    "deepseek-v2-groups": _hf(
        "deepseek_v2", **_new(), **_GROUPS | _LATENT, q_lora_rank=20, num_key_value_heads=4,
        attention_bias=True, routed_scaling_factor=16.0, topk_method="group_limited_greedy",
    ),
    "glm4-moe-lite-defaults": _hf(
        "glm4_moe_lite", **_new(rope_theta=1e6), **_GROUPS | _LATENT | dict(n_group=1, topk_group=1),
        q_lora_rank=20, num_key_value_heads=4, rms_norm_eps=1e-5, num_nextn_predict_layers=1,
    ),
    "glm4-moe-lite-layer-types-tied": _hf(
        "glm4_moe_lite", **_new("yarn", 1e4, factor=4.0, original_max_position_embeddings=64), **_GROUPS
        | _LATENT, q_lora_rank=None, num_key_value_heads=4, mlp_layer_types=["sparse", "dense", "sparse"],
        attention_bias=True, rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True,
    ),
    "mistral4-published": _hf(
        "mistral4", **_new(
            "yarn", 1e4, factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1, partial_rotary_factor=0.4, beta_fast=32.0, beta_slow=1.0
        ), **_GROUPS | _LATENT | dict(n_group=1, topk_group=1, head_dim=20), q_lora_rank=20,
        num_key_value_heads=4,
    ),
    "mistral4-groups-no-query-scale": _hf(
        "mistral4", **_new("yarn", 1e5, factor=4.0, original_max_position_embeddings=64,
        llama_4_scaling_beta=0.0, partial_rotary_factor=0.4), **_GROUPS | _LATENT | dict(head_dim=20),
        q_lora_rank=None, num_key_value_heads=4, first_k_dense_replace=1, n_shared_experts=2,
        routed_scaling_factor=1.5, rope_interleave=False, attention_bias=True,
    ),
    "minicpm3-longrope-tied": _hf(
        "minicpm3", **_old(1e4, _long(4) | dict(original_max_position_embeddings=1024)), **_LATENT,
        q_lora_rank=20, num_key_value_heads=4, rms_norm_eps=1e-5, scale_emb=3, scale_depth=2.4,
        dim_model_base=96, tie_word_embeddings=True,
    ),
    "minicpm3-one-query-matrix-bias": _hf(
        "minicpm3", **_new(rope_theta=3e4), **_LATENT | dict(v_head_dim=None), q_lora_rank=None,
        num_key_value_heads=4, scale_depth=None, dim_model_base=None, scale_emb=2.5, attention_bias=True,
        tie_word_embeddings=False,
    ),
    "youtu-tied": _hf(
        "youtu", **_new(rope_theta=1.6e6), **_LATENT, q_lora_rank=20, num_key_value_heads=4,
    ),
    "youtu-yarn-bias-untied": _hf(
        "youtu", **_old(1e4, _YARN40), **_LATENT, q_lora_rank=None, num_key_value_heads=4,
        attention_bias=True, tie_word_embeddings=False,
    ),
    # lfm2: short convolutions, and attention
    "lfm2-published-tied": _hf(
        "lfm2", block_ff_dim=100, block_multiple_of=16, full_attn_idxs=[1, 3], num_hidden_layers=5,
        norm_eps=1e-5, rope_theta=1e4, conv_L_cache=3,
    ),
    "lfm2-bias-untied-layer-types": _hf(
        "lfm2", **_new(rope_theta=3e4), layer_types=["conv", "conv", _F], conv_bias=True, conv_L_cache=5,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=False, num_key_value_heads=1,
    ),
    # mamba2: a state alone in each layer
    "mamba2-groups": _hf(
        "mamba2", num_heads=6, head_dim=16, state_size=24, n_groups=2, chunk_size=16, layer_norm_epsilon=1e-5
    ),
    "mamba2-bias-tied": _hf(
        "mamba2", num_heads=8, head_dim=12, state_size=16, n_groups=1, conv_kernel=3, use_bias=True,
        use_conv_bias=False, tie_word_embeddings=True,
    ),
    # lfm2_moe: experts by sigmoid scores with a bias after some layers with an MLP
    "lfm2-moe-published-tied": _hf(
        "lfm2_moe", **_old(1e4), **_MOE | dict(num_experts=8, num_experts_per_tok=3), num_dense_layers=1,
        layer_types=["conv", _F, "conv", "conv"], num_hidden_layers=4, norm_eps=1e-5, use_expert_bias=True,
    ),
    "lfm2-moe-no-bias-untied": _hf(
        "lfm2_moe", **_new(rope_theta=3e4), **_MOE, num_dense_layers=0, layer_types=["conv", _F, "conv"],
        conv_bias=True, conv_L_cache=5, use_expert_bias=False, norm_topk_prob=False,
        routed_scaling_factor=1.5, tie_word_embeddings=False, num_key_value_heads=1,
    ),
    # lfm3: three kinds of layers, norms after them too, a gate of each head
    "lfm3-published-tied": _hf("lfm3", num_hidden_layers=5, sliding_window=9, head_dim=16,
        rms_norm_eps=1e-5, conv_L_cache=7),
    "lfm3-no-gate-bias-untied": _hf("lfm3", layer_types=["conv", _S, _F], sliding_window=12, head_dim=16,
        use_sandwich_norm=False, use_attention_gate=False, attention_bias=True, conv_bias=True,
        tie_word_embeddings=False, num_key_value_heads=1, rope_parameters={
            _F: dict(rope_type="default", rope_theta=1e5), _S: dict(rope_type="default", rope_theta=5e3)}),
    # granitemoe: the matrices of all experts in one tensor; granitemoeshared: an MLP beside them
    "granitemoe-published-tied": _hf("granitemoe", **_old(1e4), num_local_experts=6, num_experts_per_tok=2,
        intermediate_size=24, tie_word_embeddings=True, embedding_multiplier=1.5, residual_multiplier=1.4,
        attention_multiplier=0.3, logits_scaling=0.5),
    "granitemoe-bias-untied": _hf("granitemoe", **_new("llama3", 1e5, **_LLAMA3), num_local_experts=5,
        num_experts_per_tok=3, intermediate_size=40, attention_bias=True, num_key_value_heads=1,
        embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=3),
    "granitemoeshared-tied": _hf("granitemoeshared", **_old(1e4), num_local_experts=6, num_experts_per_tok=2,
        intermediate_size=24, shared_intermediate_size=20, tie_word_embeddings=True,
        embedding_multiplier=1.5, residual_multiplier=1.4, attention_multiplier=0.3, logits_scaling=0.5),
    "granitemoeshared-no-shared": _hf("granitemoeshared", **_new(rope_theta=3e4), num_local_experts=4,
        num_experts_per_tok=4, intermediate_size=40, shared_intermediate_size=0, attention_multiplier=0.3),
    # nemotron_h: one mixer or one feed-forward in each layer; experts without gates, and latent ones
    "nemotron-h-published": _hf(
        "nemotron_h", **_NEMOTRON, hybrid_override_pattern="ME*ME-", num_hidden_layers=6, moe_latent_size=20,
    ),
    "nemotron-h-bias-no-latent": _hf(
        "nemotron_h", **_NEMOTRON | dict(n_group=1, topk_group=1, n_groups=1), mlp_bias=True, use_bias=True,
        layers_block_type=["mamba", "moe", "attention", "mlp"], num_hidden_layers=4, num_key_value_heads=1,
        use_conv_bias=False, conv_kernel=3, norm_topk_prob=False,
    ),
    # bamba: attention in some layers, which rotates a half of each head
    "bamba-published": _hf("bamba", **_old(1e4), **_MAMBA, attn_layer_indices=[1], rms_norm_eps=1e-5,
        mamba_d_head="auto", mamba_n_heads=6),
    "bamba-bias-layer-types-tied": _hf("bamba", **_new(rope_theta=3e4), **_MAMBA, attn_layer_indices=[0, 2],
        mamba_n_groups=2, mamba_n_heads=4, mamba_d_head=24, mamba_proj_bias=True, attention_bias=True,
        mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True),
    # falcon_h1: Mamba-2 and attention side by side, with factors
    "falcon-h1-published": _hf("falcon_h1", **_old(1e11), **_MAMBA, **_FALCON, mamba_d_ssm=72,
        mamba_n_heads=6, mamba_d_head=12, rms_norm_eps=1e-5, head_dim=16),
    "falcon-h1-norm-after-gate-bias": _hf("falcon_h1", **_new(rope_theta=1e4), **_MAMBA,
        **_FALCON | dict(embedding_multiplier=0.9),
        mamba_d_ssm=96, mamba_n_heads=4, mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False,
        mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1,
        tie_word_embeddings=True),
    "falcon-h1-norm-before-gate": _hf("falcon_h1", **_new(rope_theta=1e4), **_MAMBA, mamba_d_ssm=None,
        mamba_n_heads=8, mamba_n_groups=4, mamba_rms_norm=True, mamba_conv_bias=False, mamba_d_conv=3),
    # granitemoehybrid: Granite's factors, Mamba-2 or attention, experts with a shared MLP or this MLP alone
    "granite-hybrid-published": _hf("granitemoehybrid", **_old(1e4), **_MAMBA, **_GRANITE,
        layer_types=["mamba", "attention", "mamba"], position_embedding_type="nope", mamba_n_heads=6,
        mamba_d_head=16, num_local_experts=6, num_experts_per_tok=2, intermediate_size=24,
        shared_intermediate_size=40, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "granite-hybrid-dense-rope": _hf("granitemoehybrid", **_new(rope_theta=3e4), **_MAMBA, **_GRANITE,
        layer_types=[_F, _L, _F], position_embedding_type="rope", mamba_n_heads=8, mamba_n_groups=2,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=56, attention_bias=True,
        mamba_proj_bias=True, num_key_value_heads=1),
    "granite-hybrid-attention-alone": _hf("granitemoehybrid", **_new(rope_theta=1e4), **_GRANITE,
        layer_types=["attention"] * 3, position_embedding_type="rope", num_local_experts=0, mamba_n_heads=3,
        shared_intermediate_size=80),
    # glm, glm4: interleaved RoPE of a part of each head; glm4 also norms after attention and MLP
    "glm-published": _hf("glm", **_old(1e4), attention_bias=True, head_dim=16, rms_norm_eps=1e-5,
        partial_rotary_factor=0.5),
    "glm-yarn-no-bias-tied": _hf("glm",
        **_new("yarn", 1e4, factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.75),
        attention_bias=False, num_key_value_heads=1, head_dim=24, tie_word_embeddings=True),
    "glm4-published": _hf("glm4", **_new(rope_theta=5e4, partial_rotary_factor=0.5), attention_bias=True,
        head_dim=24, rms_norm_eps=1e-5),
    "glm4-long-whole-heads-tied": _hf("glm4", **_old(1e4), attention_bias=False, head_dim=16,
        partial_rotary_factor=1.0, num_key_value_heads=1, tie_word_embeddings=True),
    # ernie4_5: interleaved RoPE, one setting for all biases
    "ernie4-5-published": _hf("ernie4_5", **_old(5e5), use_bias=False, head_dim=20, rms_norm_eps=1e-5),
    "ernie4-5-bias-llama3-untied": _hf("ernie4_5", **_new("llama3", 1e4, **_LLAMA3), use_bias=True,
        num_key_value_heads=1, head_dim=None, tie_word_embeddings=False),
    # ernie4_5_moe: experts by a softmax with a bias for the choice; some layers have none
    "ernie4-5-moe-published": _hf("ernie4_5_moe", **_old(5e5), use_bias=False, moe_num_experts=8, moe_k=3,
        moe_intermediate_size=24, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
        moe_layer_interval=1, rms_norm_eps=1e-5),
    "ernie4-5-moe-interval-untied": _hf("ernie4_5_moe", **_new(rope_theta=1e4), num_hidden_layers=6,
        moe_num_experts=6, moe_k=2, moe_intermediate_size=20, moe_num_shared_experts=0,
        moe_layer_start_index=2, moe_layer_end_index=4, moe_layer_interval=2, moe_norm_min=0.4,
        num_key_value_heads=1, tie_word_embeddings=False),
    # dots1: the router of DeepSeek-V3, windows in late layers
    "dots1-published": _hf("dots1", **_old(1e7), **_GROUPS | dict(n_group=1, topk_group=1),
        n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        sliding_window=None, max_window_layers=62, num_key_value_heads=4, rms_norm_eps=1e-5),
    "dots1-groups-windows-tied": _hf("dots1", **_new(rope_theta=1e4), **_GROUPS, n_shared_experts=1,
        norm_topk_prob=False, attention_bias=True, sliding_window=9, max_window_layers=2,
        tie_word_embeddings=True),
    # minimax_m2: sigmoid scores whose sum has no epsilon, joint norms, a part of each head is rotated
    "minimax-m2-published": _hf("minimax_m2", **_old(5e6), num_local_experts=8, num_experts_per_tok=3,
        intermediate_size=24, head_dim=16, rotary_dim=8),
    "minimax-m2-yarn-whole-heads-tied": _hf("minimax_m2",
        **_new("yarn", 1e4, factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=1.0),
        num_local_experts=5, num_experts_per_tok=1, intermediate_size=40, head_dim=24, rms_norm_eps=1e-5,
        num_key_value_heads=1, tie_word_embeddings=True),
    # olmoe: joint norms, weights of experts as they are
    "olmoe-published": _hf("olmoe", **_old(1e4), num_experts=8, num_experts_per_tok=3, intermediate_size=24,
        norm_topk_prob=False, clip_qkv=None, num_key_value_heads=4, rms_norm_eps=1e-5),
    "olmoe-bias-normed": _hf("olmoe", **_new(rope_theta=5e4), num_experts=5, num_experts_per_tok=2,
        intermediate_size=40, norm_topk_prob=True, attention_bias=True),
    # hunyuan: norms of heads after RoPE; alpha stretches all wavelengths
    "hunyuan-alpha-tied": _hf("hunyuan_v1_dense",
        **_old(1e4, dict(type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=1.0)),
        head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "hunyuan-bias-mqa": _hf("hunyuan_v1_dense", **_new(rope_theta=5e4), head_dim=24, attention_bias=True,
        num_key_value_heads=1),
    "hunyuan-moe-published": _hf("hunyuan_v1_moe",
        **_old(1e4, dict(type="dynamic", alpha=50.0, factor=1.0)), head_dim=16, num_experts=8,
        moe_topk=[3, 3, 3], intermediate_size=24, num_shared_expert=[1, 1, 1]),
    "hunyuan-moe-bias": _hf("hunyuan_v1_moe", **_new(rope_theta=5e4), head_dim=20, num_experts=5,
        moe_topk=2, intermediate_size=40, attention_bias=True, num_key_value_heads=1),
    # cohere2: LayerNorm, attention and MLP side by side, RoPE in sliding layers only
    "cohere2-published": _hf("cohere2", **_old(5e4), num_hidden_layers=5, sliding_window=8,
        sliding_window_pattern=4, logit_scale=0.25, layer_norm_eps=1e-5, tie_word_embeddings=True,
        use_parallel_block=True, use_qk_norm=False),
    "cohere2-bias-untied-long-window": _hf("cohere2", **_new(rope_theta=1e4), sliding_window=290,
        layer_types=[_F, _S, _S], attention_bias=True, num_key_value_heads=1, logit_scale=0.3,
        layer_norm_eps=1e-3, tie_word_embeddings=False),
    # apertus: xIELU without a gate, norms of heads, its own names of norms
    "apertus-published": _hf("apertus", **_old(1.2e7, dict(rope_type="llama3") | _LLAMA3), hidden_act="xielu",
        qk_norm=True, post_norm=False, mlp_bias=False, rms_norm_eps=1e-5),
    "apertus-bias-tied": _hf("apertus", **_new(rope_theta=1e4), hidden_act="xielu", attention_bias=True,
        num_key_value_heads=1, tie_word_embeddings=True),
    # smollm3: layers without rotary embedding
    "gemma-mqa-old": _hf("gemma", **_old(), hidden_act="gelu", num_key_value_heads=1, head_dim=20),
    "gemma-bias-untied-new": _hf("gemma", **_new(rope_theta=3e4), attention_bias=True, head_dim=16,
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=False),
    "mixtral-old": _hf("mixtral", **_old(1e6), num_local_experts=6, num_experts_per_tok=2,
        intermediate_size=24, head_dim=None),
    "mixtral-window-tied-new": _hf("mixtral", **_new(rope_theta=1e4), num_local_experts=4,
        num_experts_per_tok=3, intermediate_size=40, sliding_window=9, head_dim=16, tie_word_embeddings=True),
    "qwen2-moe-sparse-step": _hf("qwen2_moe", **_old(1e6), **_MOE, shared_expert_intermediate_size=20,
        decoder_sparse_step=2, tie_word_embeddings=True),
    "qwen2-moe-windows-no-bias": _hf("qwen2_moe", **_new(rope_theta=1e4), **_MOE | dict(norm_topk_prob=True),
        shared_expert_intermediate_size=36, mlp_only_layers=[1], qkv_bias=False, use_sliding_window=True,
        sliding_window=8, max_window_layers=2),
    "seed-oss-defaults": _hf("seed_oss", **_old(1e7), head_dim=16),
    "seed-oss-out-bias-tied": _hf("seed_oss", **_new(rope_theta=1e4), head_dim=20, attention_bias=False,
        attention_out_bias=True, mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True),
    "exaone4-windows": _hf("exaone4", **_old(1e6), num_hidden_layers=4, sliding_window=8, head_dim=16),
    "exaone4-all-full-tied": _hf("exaone4", **_new("llama3", 1e6, **_LLAMA3), sliding_window=None,
        layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    "smollm3-defaults": _hf("smollm3", num_hidden_layers=4),
    "smollm3-explicit-nope": _hf("smollm3", **_new(rope_theta=1e5), no_rope_layers=[0, 1, 0, 1],
        num_key_value_heads=4),
    "smollm3-window": _hf("smollm3", **_old(5e4), no_rope_layers=[1, 0, 1], use_sliding_window=True,
        sliding_window=7),
    "smollm3-window-layer-types": _hf(
        "smollm3", **_new(), no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=10,
        layer_types=[_S, _F, _S]
    ),
    "smollm3-bias-yarn": _hf(
        "smollm3", **_old(5e4, dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=64)),
        attention_bias=True, mlp_bias=True, head_dim=16, no_rope_layer_interval=3,
    ),
}  # fmt: skip
CASES = {name: Case(hf, _LONG if "-long-" in name else LENGTHS) for name, hf in _CASES.items()}
FIRST = {case.hf["model_type"]: name for name, case in reversed(CASES.items())}  # of each family

# Compiling the decode loop takes seconds: test_golden.py generates these through the cache, one of a family
# and of a kind of RoPE that the cache limits; test_parity_live.py those of other families.
CACHED = (
    "qwen2-gqa-tied-old", "qwen2-window-layer-types", "qwen3-window-layer-types-yarn", "qwen3-dynamic-old",
    "llama-bias", "mistral-window", "moe-some-layers-dense", "olmo3-yarn-old", "gemma2-long-caps",
    "gemma3-old", "phi3-longrope-beyond", "bitnet-bias-new",
)  # fmt: skip


def prompts(case: Case) -> list[list[int]]:
    """Returns random ids. They are the same in every call."""
    random = np.random.RandomState(7)  # numpy guarantees this generator's stream for ever
    return [random.randint(0, VOCAB, length).tolist() for length in case.lengths]


def random_tensors(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Returns float32 weights by checkpoint name. All of them affect the logits, of order 1 to 10."""
    random = np.random.RandomState(seed)
    specs = sorted(jax.tree.leaves(file_specs(config)), key=lambda spec: spec.hf_name)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = random.standard_normal(shape)
        if name.endswith(("act_fn.beta", "act_fn.eps")):  # constants of xIELU
            return np.array([0.4 if name.endswith("beta") else -0.2])
        if name.endswith("A_log"):
            # States that forget at once leave outputs near 0, whose rounding errors the norm enlarges.
            return np.log(random.uniform(0.01, 1, shape))
        near_one = ("layernorm_1.weight", "layernorm_2.weight", "scale", "layer_scalar")
        if name.endswith(("linear_attn.norm.weight", *near_one)):
            return 1 + 0.2 * noise
        if name.endswith("norm.weight"):
            return 1 - (config.norm_offset or 0) + 0.2 * noise
        if name.endswith("correction_bias"):  # some scores with it are negative
            return 0.25 * noise - 0.4
        if name.endswith("bias"):
            return 0.3 * _small_latents(name, config, noise)
        if name.endswith("sinks"):
            return noise
        if "embed_tokens" in name or "lm_head" in name:
            # With a large tied matrix the model repeats the last token forever.
            large = 0.12 if config.embed_scale > 1 else 0.25
            return (large if config.tie_word_embeddings else 0.4) * noise
        is_sharp = name.split(".")[-2] in ("q_proj", "query_proj", "k_proj")
        sharp = 1.5 if is_sharp else 1.0  # clearly different attention scores
        return sharp * _small_latents(name, config, noise) / np.sqrt(shape[-1])

    return {spec.hf_name: tensor(spec.hf_name, spec.shape).astype(np.float32) for spec in specs}


def _small_latents(name: str, config: ModelConfig, tensor: np.ndarray) -> np.ndarray:
    """The weight or bias, smaller where it makes latents: small ones show the epsilon of their norms. The
    last rows may make the part of keys that is rotated, which has no norm.
    """
    rotated = {"q_a_proj": 0, "kv_a_proj_with_mqa": config.head_dim}.get(name.split(".")[-2])
    if rotated is None:
        return tensor
    is_latent = np.arange(len(tensor)) < len(tensor) - rotated
    return (np.where(is_latent, 0.03, 1.5) * tensor.T).T


def params_from(config: ModelConfig, tensors: dict[str, np.ndarray]) -> Params:
    """Returns the parameter tree of these tensors."""
    return jax.tree.map(lambda spec: jax.numpy.asarray(tensors[spec.hf_name]), file_specs(config))


def fuse_tensors(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors as transformers stores them, some of them fused."""
    specs = sorted(jax.tree.leaves(file_specs(config)), key=lambda spec: spec.first_row)
    parts: dict[str, list[np.ndarray]] = {}
    fused = {spec.fused_name: spec for spec in specs if spec.fused_name}
    for spec in specs:
        parts.setdefault(spec.fused_name or spec.hf_name, []).append(_grouped(spec, tensors[spec.hf_name]))
    stored = {name: parts[name][0] for name in parts.keys() - fused.keys()}
    for name, spec in fused.items():
        shape = spec.tensor_shapes({name})[name]
        is_interleaved = spec.interleaved > 0
        joined = np.stack(parts[name], -1) if is_interleaved else np.concatenate(parts[name], 1)
        stored[name] = joined.reshape(shape)
    return stored


def split_tensors(config: ModelConfig, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns transformers' tensors as the library names them: the inverse of `fuse_tensors`."""
    state = {name.replace("mlp.gate.moe_statics", "mlp.moe_statics"): x for name, x in state.items()}
    state = {text_name(name) or name: x for name, x in state.items()}

    def part(spec: FileSpec) -> np.ndarray:
        if spec.fused_name is None:
            return state[spec.hf_name]
        if spec.interleaved:
            return np.moveaxis(state[spec.fused_name][..., spec.first_row :: spec.interleaved], -1, 1)
        whole = state[spec.fused_name].reshape(-1, spec.fused_rows, *spec.shape[1:][-1:])
        rows = _grouped(spec, np.empty(spec.shape)).shape[1]
        return whole[:, spec.first_row : spec.first_row + rows].reshape(spec.shape)

    return {spec.hf_name: part(spec) for spec in jax.tree.leaves(file_specs(config))}


def _grouped(spec: FileSpec, tensor: np.ndarray) -> np.ndarray:
    """A tensor by group of rows of the fused one with it, [groups, rows, ...]. Others as they are."""
    if spec.fused_name is None:
        return tensor
    if spec.interleaved:  # outputs last
        return np.moveaxis(tensor, 1, -1)
    groups = spec.fused_groups * int(np.prod(spec.shape[:-2]))
    return tensor.reshape(groups, -1, *spec.shape[1:][-1:])


def pad_prompts(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [B, T], padded on the right with a token that would change results, and counts [B]."""
    tokens_BT = np.full((len(rows), max(map(len, rows))), VOCAB - 1, np.int32)
    for row, ids in zip(tokens_BT, rows, strict=True):
        row[: len(ids)] = ids
    return tokens_BT, np.array([len(ids) for ids in rows], np.int32)


# --- transformers -------------------------------------------------------------------------------------------


def hf_model(hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """Returns transformers' model of a config.json and weights: float32, eager attention, no EOS ids."""
    import torch
    import transformers

    settings = copy.deepcopy(hf)
    config = transformers.CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    is_mistral4 = config.model_type == "mistral4"  # which the auto class knows only within mistral3
    kind = transformers.Mistral4ForCausalLM if is_mistral4 else transformers.AutoModelForCausalLM
    build = kind._from_config if is_mistral4 else kind.from_config
    model = build(config, attn_implementation="eager", dtype=torch.float32).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in fuse_tensors(from_hf(hf), tensors).items()}
    renamed = {"block_sparse_moe.gate": "mlp.gate", "mlp.moe_statics": "mlp.gate.moe_statics"}
    for published, own in renamed.items():  # of Mixtral and ERNIE 4.5
        state = {name.replace(published, own): x for name, x in state.items()}
    for name, empty in model.state_dict().items():  # a shared expert of width 0
        if ".shared_expert" in name:
            state.setdefault(name, torch.zeros_like(empty))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    of_model = {
        text_name(name): name for name in model.state_dict()
    }  # some have "backbone" in place of "model"
    model.load_state_dict({of_model.get(name, name): x for name, x in state.items()}, strict=True)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def hf_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Returns float32 logits [T, V] of one prompt."""
    import torch

    _forget_length(model)
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def hf_greedy(
    model: Any, ids: list[int], max_tokens: int = NEW_TOKENS, **options: Any
) -> tuple[list[int], np.ndarray]:
    """Returns the new ids of one prompt, and the margin of the best logit over the second at each step."""
    import torch

    _forget_length(model)
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        max_new_tokens=max_tokens,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    best = torch.stack(out.scores)[:, 0].topk(2).values
    return out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).numpy()


def _forget_length(model: Any) -> None:
    """Resets rope type dynamic, which keeps the frequencies of the longest sequence so far."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None or isinstance(rotary.rope_type, dict):  # none, or one for each kind of layer
        return
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq = rotary.original_inv_freq.clone()
