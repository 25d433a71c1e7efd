"""Texts to vectors: `embed_texts` pools a model's final hidden states over each text's tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checkpoint.loading import Model
from .checkpoint.tokenizer import Tokenizer
from .checks import in_order, token_ids
from .errors import InputError, shown
from .generation.batches import padded
from .generation.loop import bucket, last, power_of_two
from .generation.options import why_not_finite
from .generation.programs import NOW
from .generation.rows import road

POOLINGS = ("mean", "last")
_MOST_TOKENS = 2048  # of a batch, padding included; a longer text is a batch of its own


def embed_texts(
    model: Model, texts: Sequence[str | Sequence[int]], *, pooling: str = "mean", normalize: bool = True
) -> np.ndarray:
    """One vector per text, pooled from the model's final hidden states (`hidden_states`).

    A vector depends on its own text only (in float32 to 1e-5, whatever the other texts). Texts are grouped by
    length and padded to powers of two, so that few programs are compiled; a batch has at most 2,048 tokens,
    or one text. No cache is kept.

    Args:
        model: from `load_model`.
        texts: a list of texts, of lists of token ids, or of both; one text alone is [text]. A text gets the
            special tokens that the tokenizer adds (BOS, say), and no chat template; ids are taken as they
            are.
        pooling: "mean" of the hidden states of all tokens of a text, or that of its "last" token.
        normalize: scale each vector to length 1.

    Returns:
        float32 [texts, D].

    Raises:
        InputError: no list, an empty list, a text without tokens or of more tokens than the context limit,
            ids outside the vocabulary, texts without a tokenizer, an unknown pooling, or hidden states that
            are not finite.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    if pooling not in POOLINGS:
        raise InputError(f"pooling must be 'mean' or 'last', got {shown(pooling)}")
    if not isinstance(normalize, bool | np.bool_):
        raise InputError(f"normalize must be True or False, got {shown(normalize)}")
    rows = _ids_of_texts(model, texts)
    limit = model.config.context_length
    params = model.params
    config = model.config
    runner = road(params)(NOW, None)
    vectors_ND = np.zeros((len(rows), config.hidden_size), np.float32)
    for batch in _batches([min(bucket(len(row)), limit) for row in rows]):
        tokens_BT, num_tokens_B = padded([rows[i] for i in batch], limit, power_of_two(len(batch)))
        hidden_BTD = runner.hidden((params, config), (tokens_BT, num_tokens_B))
        pooled_BD = np.asarray(_pooled(hidden_BTD, num_tokens_B, pooling, bool(normalize)))
        vectors_ND[batch] = pooled_BD[: len(batch)]
    if len(broken := np.flatnonzero(~np.isfinite(vectors_ND).all(-1))):
        raise InputError(f"text {broken[0]}: its hidden states are not finite: {why_not_finite(params)}")
    return vectors_ND


def _ids_of_texts(model: Model, texts: Any) -> list[list[int]]:
    """The token ids of each text, or an InputError that names it by its index."""
    if not in_order(texts):
        raise InputError(f"texts must be a list of texts or of token ids, got {shown(texts)}: give [text]")
    if not len(texts):
        raise InputError("no texts: give at least one")
    if isinstance(texts, jax.Array):
        texts = np.asarray(texts)  # iterating over it would slice it on the device
    return [_ids_of_text(model, i, text) for i, text in enumerate(texts)]


def _ids_of_text(model: Model, i: int, text: Any) -> list[int]:
    limit = model.config.context_length
    if isinstance(text, str):
        if model.tokenizer is None:
            raise InputError(f"text {i}: this checkpoint has no tokenizer.json: give lists of token ids")
        count, ids = _encoded(model.tokenizer, text, limit)
    elif in_order(text):
        ids = token_ids(f"text {i}", text, model.config.vocab_size)
        count = len(ids)
    else:
        raise InputError(f"text {i} must be a text or a list of token ids, got {shown(text)}")
    if not count:
        raise InputError(f"text {i} has no tokens: got {shown(text)}, give some text")
    if count > limit:
        raise InputError(
            f"text {i} has at least {count} tokens, which exceeds the model's context limit {limit}:"
            " shorten it"
        )
    return ids


def _encoded(tokenizer: Tokenizer, text: str, limit: int) -> tuple[int, list[int]]:
    """How many token ids the text has at least, and the ids; none where its length alone says too many."""
    # Far beyond the limit tokenizing takes long.
    if len(text) > 16 * limit and (fewest := tokenizer.fewest_ids(text)) > limit:
        return fewest, []
    ids = tokenizer.encode(text)
    return len(ids), ids


def _batches(widths: list[int]) -> Iterator[list[int]]:
    """Indices of texts that are padded to the same width, as many as a batch takes."""
    for width in sorted(set(widths)):
        alike = [i for i, w in enumerate(widths) if w == width]
        most = max(1, _MOST_TOKENS // width)
        for at in range(0, len(alike), most):
            yield alike[at : at + most]


@partial(jax.jit, static_argnums=(2, 3))
def _pooled(hidden_BTD: jax.Array, num_tokens_B: jax.Array, pooling: str, normalize: bool) -> jax.Array:
    """float32 [B, D]: the mean over each row's real tokens, or that of the last one."""
    if pooling == "last":
        pooled_BD = last(hidden_BTD, num_tokens_B).astype(jnp.float32)
    else:
        real_BT1 = (jnp.arange(hidden_BTD.shape[1]) < num_tokens_B[:, None])[..., None]
        sum_BD = jnp.sum(hidden_BTD, 1, dtype=jnp.float32, where=real_BT1)
        pooled_BD = sum_BD / jnp.maximum(num_tokens_B, 1)[:, None]
    if not normalize:
        return pooled_BD
    length_B1 = jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True)
    return pooled_BD / jnp.maximum(length_B1, jnp.finfo(jnp.float32).tiny)
