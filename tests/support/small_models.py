"""Small models without files: random parameters that give logits of order 10, and random prompts for them."""

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

QWEN = dict(
    model_type="qwen2", vocab_size=120, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "qwen2": QWEN,
    "windows-nope-untied": (
        QWEN
        | dict(model_type="smollm3", no_rope_layers=[1, 0], tie_word_embeddings=False, attention_bias=True)
        | dict(use_sliding_window=True, sliding_window=7)
    ),
}


def build(name, **changes):
    """Returns params and config of a model of CONFIGS. changes: of its config.json."""
    config = from_hf(CONFIGS[name] | changes)
    draws = np.random.RandomState(len(name))
    shapes = jax.eval_shape(lambda key: xj.init_params(config, key, "float32"), jax.random.key(0))

    def leaf(path, x):
        """Makes a leaf without a compilation. The factor gives logits of order 10, of which few are nearly
        equal.
        """
        if x.ndim == 1:
            return np.full(x.shape, "norm" in jax.tree_util.keystr(path), np.float32)
        return (2.5 * draws.standard_normal(x.shape) / np.sqrt(x.shape[-1])).astype(np.float32)

    return jax.tree.map(jnp.asarray, jax.tree.map_with_path(leaf, shapes)), config


def prompts(*lengths, seed=0):
    draws = np.random.RandomState(seed)
    return [draws.randint(0, QWEN["vocab_size"], n).tolist() for n in lengths]
