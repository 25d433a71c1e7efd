"""Text of models that also see, as transformers' own classes write them, with small vision towers."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import xinfer_jax as xj

torch = pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip(
    "transformers", reason="the live comparison needs transformers: pip install -e '.[parity]'"
)
pytestmark = [pytest.mark.full, pytest.mark.oldest]

TEXT = dict(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)  # fmt: skip
SEES = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
    patch_size=14,
)  # fmt: skip
QWEN_SEES = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=48, patch_size=14
)
QWEN3_SEES = QWEN_SEES | dict(num_position_embeddings=16)
ROPE = dict(mrope_section=[2, 2, 2], rope_type="default", rope_theta=1e4)
WIDE = dict(head_dim=16, rope_parameters=ROPE | dict(mrope_section=[2, 3, 3], mrope_interleaved=True))
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=16, mscale=1.0,
    mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
)  # fmt: skip
TOKENS = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
# By name of the class without its end, and of the text model where there are several: settings of text, of
# vision, and others.
MODELS = {
    "Gemma3": (
        dict(head_dim=16, sliding_window=8), SEES,
        dict(mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7),
    ),
    "Gemma4Unified": (
        dict(head_dim=16, global_head_dim=24, sliding_window=8, num_hidden_layers=6, pad_token_id=0),
        dict(mm_embed_dim=12, mm_posemb_size=16, patch_size=4, output_proj_dims=12),
        dict(audio_config=dict(audio_embed_dim=20), image_token_id=5, audio_token_id=6, video_token_id=7),
    ),
    "Mistral3": (
        dict(head_dim=16, model_type="mistral"), SEES | dict(model_type="pixtral", head_dim=8),
        dict(image_token_index=5),
    ),
    "Mistral3-ministral3": (
        dict(head_dim=16, model_type="ministral3", rope_parameters=YARN),
        SEES | dict(model_type="pixtral", head_dim=8), dict(image_token_index=5),
    ),
    "Qwen2VL": (dict(rope_parameters=ROPE), QWEN_SEES | dict(embed_dim=16, hidden_size=48), TOKENS),
    "Qwen2_5_VL": (dict(rope_parameters=ROPE), QWEN_SEES | dict(fullatt_block_indexes=[0]), TOKENS),
    "Qwen3VL": (WIDE, QWEN3_SEES | dict(deepstack_visual_indexes=[0]), TOKENS),
    "Qwen3VLMoe": (WIDE | EXPERTS, QWEN3_SEES | dict(deepstack_visual_indexes=[0]), TOKENS),
    "Qwen3_5": (dict(head_dim=16) | LINEAR, QWEN3_SEES, TOKENS),
    "Qwen3_5Moe": (
        dict(head_dim=16, shared_expert_intermediate_size=16) | LINEAR | EXPERTS, QWEN3_SEES, TOKENS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_text_of_a_model_that_sees(tmp_path, name):
    """Its logits are those of the whole. Saved next to the whole, all of it is there again, bit by bit."""
    (text, vision, others) = MODELS[name]
    name = name.split("-")[0]
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, vision_config=vision, **others)
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    whole.save_pretrained(tmp_path / "whole")
    tokens_BT = np.random.RandomState(0).randint(10, 96, (1, 60))
    with torch.no_grad():
        want = whole(torch.tensor(tokens_BT)).logits.numpy()
    model = xj.load_model(tmp_path / "whole", "float32")
    logits_BTV, _ = jax.jit(xj.forward, static_argnums=1)(model.params, model.config, tokens_BT)
    np.testing.assert_allclose(logits_BTV, want, atol=1e-4)
    xj.save_model(model.params, model.config, tmp_path / "again", like=tmp_path / "whole")
    (stored, again) = (load_file(tmp_path / path / "model.safetensors") for path in ("whole", "again"))
    jax.tree.map(np.testing.assert_array_equal, stored, again)
    xj.save_model(model.params, model.config, tmp_path / "text")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    with torch.no_grad():
        np.testing.assert_allclose(alone(torch.tensor(tokens_BT)).logits.numpy(), want, atol=1e-4)
