"""DFlash and DSpark heads: files, drafts against transformers and NumPy, and kinds of caches."""

import jax
import numpy as np
import pytest

import xinfer_jax as xj
from xinfer_jax.checkpoint.draft_loading import is_draft
from xinfer_jax.families.dflash_files import DFLASH_FILES

HF = dict(
    architectures=["DFlashDraftModel"], model_type="qwen3", vocab_size=120, hidden_size=48,
    intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, block_size=5, rope_theta=1e4,
    dflash_config=dict(mask_token_id=119, target_layer_ids=[0, 2]),
)  # fmt: skip
DSPARK = dict(
    {name: x for name, x in HF.items() if name != "dflash_config"}, architectures=["Qwen3DSparkModel"],
    mask_token_id=119, target_layer_ids=[0, 2], markov_rank=8, markov_head_type="vanilla",
)  # fmt: skip


def random_draft(hf, seed=0, tensors=()):
    head = DFLASH_FILES.read(hf, dict.fromkeys(tensors))
    draws = np.random.RandomState(seed)

    def leaf(spec):
        if spec.init == "norm":
            return 1 + 0.3 * draws.standard_normal(spec.shape).astype(np.float32)
        return (1.5 * draws.standard_normal(spec.shape) / np.sqrt(spec.shape[-1])).astype(np.float32)

    return xj.Draft(jax.tree.map(leaf, head.param_specs()), head)


@pytest.mark.parametrize("hf", [HF, DSPARK], ids=["dflash", "dspark"])
def test_saved_heads_load_as_they_were(hf, tmp_path):
    draft = random_draft(hf, tensors=["embed_tokens.weight"])
    xj.save_draft(draft, tmp_path / "head")
    again = xj.load_draft(tmp_path / "head")
    assert again.head == draft.head and is_draft(tmp_path / "head")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, draft.params))
    assert xj.load_draft(tmp_path / "head", dtype="bfloat16").params["final_norm"].dtype == "bfloat16"
