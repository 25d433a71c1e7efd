"""Small models without files: random parameters that give logits of order 10, and random prompts for them."""

import jax
import numpy as np

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

QWEN = dict(
    model_type="qwen2",
    vocab_size=120,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
CONFIGS = {
    "qwen2": QWEN,
    "windows-nope-untied": (
        QWEN
        | dict(model_type="smollm3", no_rope_layers=[1, 0], tie_word_embeddings=False, attention_bias=True)
        | dict(use_sliding_window=True, sliding_window=7)
    ),
}


def build(name):
    config = from_hf(CONFIGS[name])
    params = jax.jit(xj.init_params, static_argnums=(0, 2))(config, jax.random.key(len(name)), "float32")
    # Logits of order 10: few near ties.
    return jax.tree.map(lambda x: np.float32(2.5) * x if x.ndim > 1 else x, params), config


def prompts(*lengths, seed=0):
    draws = np.random.RandomState(seed)
    return [draws.randint(0, QWEN["vocab_size"], n).tolist() for n in lengths]
