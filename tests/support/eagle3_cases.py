"""EAGLE-3 heads of several forms with random parameters, and a target for them."""

import jax
import numpy as np

from xinfer_jax.draft_heads.eagle3 import Eagle3
from xinfer_jax.families.reading import from_hf

V, C, D, D_TARGET = 72, 40, 32, 40
TARGET = from_hf(
    dict(
        model_type="qwen3",
        vocab_size=V,
        hidden_size=D_TARGET,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_theta=1e4,
    )
)
LAYER = dict(
    model_type="llama",
    vocab_size=V,
    hidden_size=D,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_theta=1e3,
)
OWN = dict(target_hidden_size=D_TARGET, draft_vocab_size=C, has_offsets=True, has_embed=True)
SHARED = dict(target_hidden_size=D_TARGET)
HEADS = {
    "llama": Eagle3(from_hf(LAYER), **OWN),
    "speculators": Eagle3(from_hf(LAYER), **OWN, norm_before_residual=True, feature_norm="joint"),
    "qk-norms-recycled-norm": Eagle3(
        from_hf(LAYER | dict(model_type="qwen3")), **OWN, feature_norm="each", recycles_norm=True
    ),
    "two-layers-matrices-of-target": Eagle3(
        from_hf(LAYER | dict(num_hidden_layers=2, hidden_size=D_TARGET)), **SHARED
    ),
}


def random_params(specs, seed=0):
    draws = np.random.RandomState(seed)

    def leaf(path, spec):
        if spec.dtype == "int32":
            ids = np.sort(draws.permutation(V)[: len(np.empty(spec.shape))])
            return (ids - np.arange(len(ids))).astype(np.int32)
        noise = draws.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            return (1 + 0.3 * noise).astype(np.float32)
        return (1.5 * noise / np.sqrt(spec.shape[-1])).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=lambda x: hasattr(x, "axes"))
