"""Text embeddings: `embed_texts` pools a model's final hidden states over each text's tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checkpoint.conversation import check_text_length
from .checkpoint.loading import Model
from .checks import check_token_ids, is_sequence
from .errors import ContextLengthError, InputError, format_value
from .generation.batch_arrays import pad_prompts
from .generation.executor import bucket, next_power_of_two
from .generation.executor_choice import executor_class
from .generation.loop import last_hidden
from .generation.validation import non_finite_reason

POOLINGS = ("mean", "last")
_MAX_BATCH_TOKENS = 2048  # padding included; a longer text is a batch of its own


def embed_texts(
    model: Model, texts: Sequence[str | Sequence[int]], *, pooling: str = "mean", normalize: bool = True
) -> np.ndarray:
    """Computes one vector per text by pooling the model's final hidden states (`hidden_states`).

    A vector depends only on its own text (in float32 to 1e-5, whatever the other texts). Texts are grouped by
    length and padded to powers of two, so that few programs are compiled. A batch has at most 2,048 tokens,
    or one text. There is no cache.

    Args:
        model: from `load_model`.
        texts: a list of texts, of lists of token ids, or of both; a single text is [text]. The tokenizer adds
            its special tokens to a text (such as BOS), without a chat template; ids are taken as they are.
        pooling: "mean" over all tokens of a text, or its "last" token.
        normalize: scale each vector to length 1.

    Returns:
        float32 [texts, D].

    Raises:
        InputError: not a list, an empty list, a text without tokens or with more tokens than the context
            limit, ids outside the vocabulary, texts without a tokenizer, an unknown pooling, or hidden states
            that are not finite.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    if pooling not in POOLINGS:
        raise InputError(f"pooling must be 'mean' or 'last', got {format_value(pooling)}")
    if not isinstance(normalize, bool | np.bool_):
        raise InputError(f"normalize must be True or False, got {format_value(normalize)}")
    params = model.params
    config = model.config
    limit = config.context_length
    rows = [text_token_ids(f"text {i}", text, model, limit) for i, text in enumerate(_check_texts(texts))]
    executor = executor_class(params)(None)
    vectors_ND = np.zeros((len(rows), config.hidden_size), np.float32)
    for batch in _batches([min(bucket(len(row)), limit) for row in rows]):
        tokens_BT, num_tokens_B = pad_prompts([rows[i] for i in batch], limit, next_power_of_two(len(batch)))
        hidden_BTD = executor.hidden((params, config), (tokens_BT, num_tokens_B))
        pooled_BD = np.asarray(_pool(hidden_BTD, num_tokens_B, pooling, bool(normalize)))
        vectors_ND[batch] = pooled_BD[: len(batch)]
    if len(broken := np.flatnonzero(~np.isfinite(vectors_ND).all(-1))):
        raise InputError(f"text {broken[0]}: its hidden states are not finite: {non_finite_reason(params)}")
    return vectors_ND


def _check_texts(texts: Any) -> Any:
    if not is_sequence(texts):
        raise InputError(
            f"texts must be a list of texts or of token ids, got {format_value(texts)}: give [text]"
        )
    if not len(texts):
        raise InputError("no texts: give at least one")
    if isinstance(texts, jax.Array):
        texts = np.asarray(texts)  # iterating over it would slice it on the device
    return texts


def text_token_ids(name: str, text: Any, model: Model, limit: int) -> list[int]:
    """The token ids of a text, or of its ids: at least one and at most `limit`. Raises InputError with the
    text's name.
    """
    if isinstance(text, str):
        if model.tokenizer is None:
            raise InputError(f"{name}: this checkpoint has no tokenizer.json: give lists of token ids")
        check_text_length(name, text, model.tokenizer, limit)
        ids = model.tokenizer.encode(text)
    elif is_sequence(text):
        ids = check_token_ids(name, text, model.config.vocab_size)
    else:
        raise InputError(f"{name} must be a text or a list of token ids, got {format_value(text)}")
    if not ids:
        raise InputError(f"{name} has no tokens: got {format_value(text)}, give some text")
    if len(ids) > limit:
        raise ContextLengthError(
            f"{name} has {len(ids)} tokens, which exceeds the context limit {limit}: shorten it"
        )
    return ids


def _batches(widths: list[int]) -> Iterator[list[int]]:
    """Batches as lists of indices: texts of the same padded width, as many as fit."""
    for width in sorted(set(widths)):
        same_width = [i for i, w in enumerate(widths) if w == width]
        size = max(1, _MAX_BATCH_TOKENS // width)
        for start in range(0, len(same_width), size):
            yield same_width[start : start + size]


@partial(jax.jit, static_argnums=(2, 3))
def _pool(hidden_BTD: jax.Array, num_tokens_B: jax.Array, pooling: str, normalize: bool) -> jax.Array:
    """float32 [B, D]: the mean over each row's tokens, or the state of its last one."""
    if pooling == "last":
        pooled_BD = last_hidden(hidden_BTD, num_tokens_B).astype(jnp.float32)
    else:
        real_BT1 = (jnp.arange(hidden_BTD.shape[1]) < num_tokens_B[:, None])[..., None]
        sum_BD = jnp.sum(hidden_BTD, 1, dtype=jnp.float32, where=real_BT1)
        pooled_BD = sum_BD / jnp.maximum(num_tokens_B, 1)[:, None]
    if not normalize:
        return pooled_BD
    length_B1 = jnp.linalg.norm(pooled_BD, axis=-1, keepdims=True)
    return pooled_BD / jnp.maximum(length_B1, jnp.finfo(jnp.float32).tiny)
