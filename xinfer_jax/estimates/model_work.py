"""The least number of bytes and operations that a model has to read and to compute."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ..config.model_config import ModelConfig
from ..mixers.latent_attention import LatentAttention
from ..mixers.softmax_attention import SoftmaxAttention
from ..weights.params import Params, param_specs, tree_bytes


class Work(NamedTuple):
    """The least bytes and FLOP of a prefill or of one decode step."""

    bytes: float  # bytes read: weights and, in a decode step, keys and values
    flop: float


def bytes_per_pass(params: Params) -> int:
    """Returns the weight bytes that every forward pass reads. A tied embedding matrix counts, because it is
    also the head. If the embedding is untied, a pass reads only a few rows of it. The same holds for an
    embedding of the inputs of layers.
    """
    rows_only = [params.get("layer_embed"), params["embed"] if "lm_head" in params else None]
    return tree_bytes(params) - tree_bytes(rows_only)


def prefill_work(config: ModelConfig, weight_bytes: int, lengths: Sequence[int]) -> Work:
    """Returns the work of a prefill: (2 x non-embedding weights x tokens + attention + one vocabulary row for
    the last position) FLOP. It reads the weights once.
    """
    pairs = [
        sum(int(np.minimum(np.arange(1, n + 1), mixer.window or n).sum()) for n in lengths)
        for mixer in attention_mixers(config)
    ]
    flop = (
        2 * _layer_weights(config, sum(lengths)) * sum(lengths)
        + _attention_flop(config, pairs)
        + _head_flop(config) * len(lengths)
    )
    return Work(weight_bytes, flop)


def decode_work(
    config: ModelConfig, weight_bytes: int, cache_itemsize: int, lengths: Sequence[int], new_tokens: int
) -> Work:
    """Returns the work of one decode step of all rows, as the mean of the steps after the first token. It
    reads the weights once, and each row's keys and values up to its length.
    """
    keys = np.array(lengths)[:, None] + np.arange(1, max(new_tokens, 2))  # includes the token of the step
    mixers = attention_mixers(config)
    pairs = [float(np.minimum(keys, mixer.window or keys).mean(1).sum()) for mixer in mixers]
    numbers = sum(math.prod(stored_vectors(x)) * n for x, n in zip(mixers, pairs, strict=True))
    cache_bytes = cache_itemsize * numbers
    weights = _layer_weights(config, len(lengths))
    flop = (2 * weights + _head_flop(config)) * len(lengths) + _attention_flop(config, pairs)
    return Work(weight_bytes + cache_bytes, flop)


def expert_fraction(config: ModelConfig, tokens: int) -> float:
    """Returns the fraction of the experts that a pass over this many tokens reads. At 1 every expert computes
    every token.
    """
    return min(1, tokens * config.num_experts_per_tok / max(config.num_experts, 1))


def _layer_weights(config: ModelConfig, tokens: int) -> float:
    """Returns the number of weights that each token of a pass is multiplied by."""
    all_experts = expert_fraction(config, tokens) == 1
    share = {2: 1, 3: 1 if all_experts else config.num_experts_per_tok / max(config.num_experts, 1)}
    shapes = (spec.shape for spec in jax.tree.leaves(param_specs(config)["layers"]))
    return sum(math.prod(shape) * share[len(shape)] for shape in shapes if len(shape) > 1)


def _head_flop(config: ModelConfig) -> int:
    return 2 * config.vocab_size * config.hidden_size


def attention_mixers(config: ModelConfig) -> list[SoftmaxAttention | LatentAttention]:
    """Returns the attention of each layer that has it."""
    mixers = (mixer for layer in range(config.num_hidden_layers) for mixer in config.mixers(layer))
    return [mixer for mixer in mixers if isinstance(mixer, SoftmaxAttention | LatentAttention)]


def stored_vectors(mixer: SoftmaxAttention | LatentAttention) -> tuple[int, int]:
    """Returns the number of vectors of a token in the cache of an attention layer, and their width."""
    if isinstance(mixer, LatentAttention):
        return mixer.num_kv_heads, mixer.key_width
    return 2 * mixer.num_kv_heads, mixer.head_dim


def _attention_flop(config: ModelConfig, pairs: Sequence[float]) -> float:
    """Returns the FLOP of the scores and weighted values of this many (query, key) pairs of each attention
    layer, all heads.
    """

    def widths(mixer: SoftmaxAttention | LatentAttention) -> int:  # of a key and its value
        if isinstance(mixer, LatentAttention):
            return mixer.key_width + mixer.spec.kv_lora_rank
        return 2 * mixer.head_dim

    numbers = sum(widths(x) * n for x, n in zip(attention_mixers(config), pairs, strict=True))
    return 2 * config.num_attention_heads * numbers
