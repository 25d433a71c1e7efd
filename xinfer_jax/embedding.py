"""`embed_texts`: vectors of texts, of their final hidden states."""

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checkpoint.embedding_modules import EmbeddingModules
from .checkpoint.loading import Model
from .checks import check_integer, check_token_ids, is_sequence
from .config.run_config import DEFAULT
from .errors import ContextLengthError, InputError, format_value
from .generation.batch_arrays import pad_prompts
from .generation.executor import RunnableModel, bucket, next_power_of_two
from .generation.executor_choice import executor_class
from .generation.loop import last_hidden
from .generation.validation import non_finite_reason
from .modes import in_default_modes
from .tokenization.conversation import check_text_length
from .tokenization.escaping import encode_wrapped
from .tokenization.tokenizer import Tokenizer

POOLINGS = ("mean", "last", "first")
_MAX_BATCH_TOKENS = 2048  # padding included; a longer text is a batch of its own
_WITHOUT = EmbeddingModules("mean", (), True, {}, "")  # where the checkpoint does not say


@in_default_modes
def embed_texts(
    model: Model,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    dimensions: int | None = None,
    truncate_prompt_tokens: int | None = None,
    escape_control_tokens: bool = True,
) -> np.ndarray:
    """Computes one vector per text, from the final hidden states of the model.

    sentence-transformers computes the same vectors with the same checkpoint. A vector depends only on its own
    text: in float32 it changes by at most 1e-5 with the other texts of the call.

    To compile few programs, the function groups texts by length and pads them to powers of two. A batch has
    at most 2,048 tokens, or one text. No KV cache is used.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> vectors = xj.embed_texts(model, ["a cat", "a dog"])
        >>> vectors.shape
        (2, 128)

    Args:
        model: a model from `load_model`.
        texts: a list of texts, of lists of token ids, or of both. Write `[text]` for a single text. The
            tokenizer adds its special tokens, for example BOS, to a text, and uses no chat template. Ids are
            taken as they are.
        pooling: "mean" over all tokens of a text, or the "last" or the "first" token. None follows the
            checkpoint's modules.json, and takes "mean" if there is none. The dense layers of modules.json
            follow the pooling.
        normalize: True scales each vector to length 1. None follows the checkpoint, and is True if the
            checkpoint does not say.
        prompt: a text that goes before each text, or the name of one of the checkpoint's prompts, for example
            "query". None takes the checkpoint's default prompt, if it has one. Token ids get no prompt.
        dimensions: the number of leading entries of each vector to keep. The shorter vectors are normalized
            again (Matryoshka vectors, Kusupati et al. 2022). None keeps all entries, or the number that the
            checkpoint says.
        truncate_prompt_tokens: the number of tokens to keep of a longer text, special tokens included. They
            are the first tokens, or the last ones if the tokenizer's `truncation_side` is "left". -1 keeps as
            many tokens as the limit allows. None raises `InputError` for a longer text, unlike
            sentence-transformers.
        escape_control_tokens: True encodes control tokens that a text after a prompt spells as ordinary text.
            A text without a prompt is never escaped.

    Returns:
        A float32 array [texts, D]. With dense layers, D is the number of outputs of the last one. With
        `dimensions`, it is that number.

    Raises:
        InputError: `texts` is not a list or is empty, or a text has no tokens.
        InputError: a text has more tokens than the context or the checkpoint's `max_seq_length` allows.
        InputError: ids are outside the vocabulary, or texts are given and the model has no tokenizer.
        InputError: the pooling is unknown, or the checkpoint does not have these dimensions.
        InputError: hidden states are not finite.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    modules = model.embedding or _WITHOUT
    pooling = modules.pooling if pooling is None else pooling
    normalize = modules.normalize if normalize is None else normalize
    if pooling not in POOLINGS:
        raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {format_value(pooling)}")
    if not isinstance(normalize, bool | np.bool_):
        raise InputError(f"normalize must be True or False, got {format_value(normalize)}")
    size = embedding_size(model, dimensions)
    encoder = TextEncoder(model, prompt, truncate_prompt_tokens, escape=escape_control_tokens)
    rows = [encoder.encode(f"text {i}", text) for i, text in enumerate(check_texts(texts))]
    vectors_ND = np.zeros((len(rows), size), np.float32)
    for batch, hidden_BTD, num_tokens_B in hidden_states_of(model, rows):
        vectors_BD = _pool(hidden_BTD, num_tokens_B, pooling)
        for layer in modules.dense:
            vectors_BD = vectors_BD @ layer.weight.T + (0 if layer.bias is None else layer.bias)
            vectors_BD = jnp.tanh(vectors_BD) if layer.activation == "Tanh" else vectors_BD
        vectors_BD = (_unit(vectors_BD) if normalize else vectors_BD)[:, :size]
        vectors_BD = _unit(vectors_BD) if normalize and dimensions is not None else vectors_BD
        vectors_ND[batch] = np.asarray(vectors_BD)[: len(batch)]
    check_finite("text", vectors_ND, model)
    return vectors_ND


def embedding_size(model: Model, dimensions: int | None = None) -> int:
    """Returns the number of values in a vector. dimensions: see `embed_texts`. Raises InputError if the model
    has no vectors of this size.
    """
    modules = model.embedding or _WITHOUT
    width = modules.dense[-1].weight.shape[0] if modules.dense else model.config.hidden_size
    if dimensions is None:
        return min(width, modules.truncate_dim or width)
    size = check_integer("dimensions", dimensions, 1, width)
    sizes = modules.matryoshka_dimensions
    if sizes is not None and size not in (*sizes, width):
        have = f"{', '.join(map(str, sizes))} are" if sizes else f"only {width} is"
        raise InputError(f"dimensions {size} is no size that the model was trained for: {have}")
    return size


class TextEncoder:
    """Encodes texts of which vectors are made."""

    def __init__(
        self,
        model: Model,
        prompt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        *,
        max_length: int | None = None,
        truncation_side: str | None = None,
        escape: bool = True,
    ):
        """Makes an encoder. prompt, truncate_prompt_tokens and escape are described in `embed_texts`.

        Args:
            max_length: the most tokens of a text. None: as the model allows.
            truncation_side: the side that loses tokens. None: the tokenizer's.
        """
        if not isinstance(prompt, str | None):
            raise InputError(f"prompt must be a text, got {format_value(prompt)}")
        modules = model.embedding or _WITHOUT
        limits = (model.config.context_length, modules.max_seq_length, max_length)
        self._model = model
        self._limit = min(limit for limit in limits if limit is not None)
        self._prompt = modules.default_prompt if prompt is None else modules.prompts.get(prompt, prompt)
        self._most = kept_tokens(truncate_prompt_tokens, self._limit)
        self._side = truncation_side or modules.truncation_side
        self._escape = escape

    def encode(self, name: str, text: Any) -> list[int]:
        """Returns the ids of a text with its prompt, or of a list of ids: at least one. Raises InputError
        with the text's name.
        """
        model = self._model
        if isinstance(text, str):
            ids = self._encode_text(name, text)
        elif is_sequence(text):
            ids = text
        else:
            raise InputError(f"{name} must be a text or a list of token ids, got {format_value(text)}")
        ids = check_token_ids(name, ids, model.config.vocab_size, model.config.placeholder_ids)
        ids = ids if isinstance(text, str) else self._truncated(ids, self._most)
        if not ids:
            raise InputError(f"{name} has no tokens: got {format_value(text)}, give some text")
        if len(ids) > self._limit:
            raise ContextLengthError(
                f"{name} has {len(ids)} tokens, which exceeds the context limit {self._limit}: shorten it, or"
                " truncate it by truncate_prompt_tokens"
            )
        return ids

    def _encode_text(self, name: str, text: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            raise InputError(f"{name}: this checkpoint has no tokenizer.json: give lists of token ids")
        if self._most is None:
            check_text_length(name, self._prompt + text, tokenizer, self._limit)
        first, last = _special_ids(tokenizer)
        ids = encode_wrapped(tokenizer, [self._prompt, text], bool(self._prompt) and self._escape)
        most = None if self._most is None else self._most - len(first) - len(last)
        if most is not None and most < 1:
            raise InputError(f"truncate_prompt_tokens {self._most} leaves no token of {name}: give more")
        return [*first, *self._truncated(ids, most), *last]

    def _truncated(self, ids: list[int], most: int | None) -> list[int]:
        if most is None or len(ids) <= most:
            return ids
        return ids[-most:] if self._side == "left" else ids[:most]


def kept_tokens(truncate_prompt_tokens: int | None, limit: int) -> int | None:
    """Returns the number of tokens of a text that are kept, or None if all are kept. Raises InputError for
    more than the limit.
    """
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens == -1:
        return limit
    return check_integer("truncate_prompt_tokens", truncate_prompt_tokens, 1, limit)


@functools.lru_cache(4)
def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids of the special tokens before each text, and after it."""
    plain, whole = (tokenizer.encode("a", special) for special in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:at], whole[at + len(plain) :]


def hidden_states_of(
    model: Model, rows: list[list[int]]
) -> Iterator[tuple[list[int], jax.Array, np.ndarray]]:
    """Yields batches of rows, as indices, their final hidden states [B, T, D], padded, and lengths [B]."""
    tree = RunnableModel(model.params, model.config)
    limit = model.config.context_length
    executor = executor_class(model.params)(DEFAULT)
    for batch in _batches([min(bucket(len(row)), limit) for row in rows]):
        inputs = pad_prompts([rows[i] for i in batch], limit, next_power_of_two(len(batch)))
        yield batch, executor.hidden(tree, inputs).hidden, inputs[1]


def check_finite(name: str, vectors_ND: np.ndarray, model: Model) -> None:
    """Raises InputError for a row with a number that is not finite. name: the name of a row."""
    if len(broken := np.flatnonzero(~np.isfinite(vectors_ND).all(-1))):
        reason = non_finite_reason(model.params)
        raise InputError(f"{name} {broken[0]}: its hidden states are not finite: {reason}")


def check_texts(texts: Any) -> Any:
    """Returns a list of texts that is not empty, or raises InputError."""
    if not is_sequence(texts):
        raise InputError(
            f"texts must be a list of texts or of token ids, got {format_value(texts)}: give [text]"
        )
    if not len(texts):
        raise InputError("no texts: give at least one")
    if isinstance(texts, jax.Array):
        texts = np.asarray(texts)  # iterating over it would slice it on the device
    return texts


def _batches(widths: list[int]) -> Iterator[list[int]]:
    """Yields batches as lists of indices: texts of the same padded width, as many as fit."""
    for width in sorted(set(widths)):
        same_width = [i for i, w in enumerate(widths) if w == width]
        size = max(1, _MAX_BATCH_TOKENS // width)
        for start in range(0, len(same_width), size):
            yield same_width[start : start + size]


@partial(jax.jit, static_argnums=2)
def _pool(hidden_BTD: jax.Array, num_tokens_B: jax.Array, pooling: str) -> jax.Array:
    """Returns float32 [B, D]: the mean over each row's tokens, or the state of its last or first one."""
    if pooling == "last":
        return last_hidden(hidden_BTD, num_tokens_B).astype(jnp.float32)
    if pooling == "first":
        return hidden_BTD[:, 0].astype(jnp.float32)
    real_BT1 = (jnp.arange(hidden_BTD.shape[1]) < num_tokens_B[:, None])[..., None]
    sum_BD = jnp.sum(hidden_BTD, 1, dtype=jnp.float32, where=real_BT1)
    return sum_BD / jnp.maximum(num_tokens_B, 1)[:, None]


@jax.jit
def _unit(vectors_BD: jax.Array) -> jax.Array:
    length_B1 = jnp.linalg.norm(vectors_BD, axis=-1, keepdims=True)
    return vectors_BD / jnp.maximum(length_B1, jnp.finfo(jnp.float32).tiny)
