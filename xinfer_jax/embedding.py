"""`embed_texts`: vectors of texts, of their final hidden states; `rerank`: how well texts answer a query."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checkpoint.conversation import check_text_length
from .checkpoint.embedding_modules import EmbeddingModules
from .checkpoint.loading import Model
from .checks import check_token_ids, is_sequence
from .config.model_config import ModelConfig
from .config.unsupported import check_causal
from .errors import ContextLengthError, InputError, format_value
from .generation.batch_arrays import pad_prompts
from .generation.executor import bucket, next_power_of_two
from .generation.executor_choice import executor_class
from .generation.loop import last_hidden
from .generation.validation import non_finite_reason
from .model.decoder import unembed
from .modes import in_default_modes
from .weights.params import Params

POOLINGS = ("mean", "last", "first")
_MAX_BATCH_TOKENS = 2048  # padding included; a longer text is a batch of its own
_WITHOUT = EmbeddingModules("mean", (), True, {}, "")  # where the checkpoint does not say
# As Qwen3-Reranker was trained.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@in_default_modes
def embed_texts(
    model: Model,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
) -> np.ndarray:
    """Computes one vector per text by pooling the model's final hidden states (`hidden_states`), as
    sentence-transformers does with the same checkpoint.

    A vector depends only on its own text (in float32 to 1e-5, whatever the other texts). Texts are grouped by
    length and padded to powers of two, so that few programs are compiled. A batch has at most 2,048 tokens,
    or one text. There is no cache.

    Args:
        model: from `load_model`.
        texts: a list of texts, of lists of token ids, or of both; a single text is [text]. The tokenizer adds
            its special tokens to a text (such as BOS), without a chat template; ids are taken as they are.
        pooling: "mean" over all tokens of a text, or its "last" or "first" token; None: as the checkpoint's
            modules.json says, else "mean". Its dense layers follow.
        normalize: scale each vector to length 1; None: as the checkpoint says, else True.
        prompt: goes before each text: the name of one of the checkpoint's prompts, or a text; None: its
            default, if it has one. Token ids get none.

    Returns:
        float32 [texts, D], or with the outputs of the last dense layer.

    Raises:
        InputError: not a list, an empty list, a text without tokens or with more tokens than the context
            limit, ids outside the vocabulary, texts without a tokenizer, an unknown pooling, or hidden states
            that are not finite.
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
    start = modules.default_prompt if prompt is None else modules.prompts.get(prompt, prompt)
    config = model.config
    limit = config.context_length
    given = (start + text if isinstance(text, str) else text for text in _check_texts(texts))
    rows = [text_token_ids(f"text {i}", text, model, limit) for i, text in enumerate(given)]
    width = modules.dense[-1].weight.shape[0] if modules.dense else config.hidden_size
    vectors_ND = np.zeros((len(rows), width), np.float32)
    for batch, hidden_BTD, num_tokens_B in _hidden_states(model, rows):
        vectors_BD = _pool(hidden_BTD, num_tokens_B, pooling)
        for layer in modules.dense:
            vectors_BD = vectors_BD @ layer.weight.T + (0 if layer.bias is None else layer.bias)
            vectors_BD = jnp.tanh(vectors_BD) if layer.activation == "Tanh" else vectors_BD
        vectors_BD = _unit(vectors_BD) if normalize else vectors_BD
        vectors_ND[batch] = np.asarray(vectors_BD)[: len(batch)]
    _check_finite("text", vectors_ND, model)
    return vectors_ND


@in_default_modes
def rerank(
    model: Model, query: str, documents: Sequence[str], *, instruction: str | None = None
) -> np.ndarray:
    """Scores how well each document answers a query, by a model that was trained to say "yes" or "no", as
    Qwen3-Reranker.

    Args:
        model: from `load_model`.
        query: a text.
        documents: a list of texts.
        instruction: what the query asks for; None: passages that answer a web search.

    Returns:
        float32 [documents]: the probability of "yes" against "no".

    Raises:
        InputError: not texts, too many tokens, or no tokenizer whose "yes" and "no" are one token each.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    numbered = enumerate(_check_texts(documents))
    rows = [rerank_token_ids(f"document {i}", model, query, text, instruction) for i, text in numbered]
    return answer_scores(model, rows)


def rerank_token_ids(
    name: str, model: Model, query: Any, document: Any, instruction: str | None = None
) -> list[int]:
    """The token ids that ask whether a document answers a query. Raises InputError with its name."""
    for what, text in (("query", query), (name, document), ("instruction", instruction or "")):
        if not isinstance(text, str):
            raise InputError(f"{what} must be a text, got {format_value(text)}")
    asked = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return text_token_ids(name, f"{_JUDGE}{asked}{_ANSWER}", model, model.config.context_length)


def no_yes_ids(model: Model) -> np.ndarray:
    """The token ids of "no" and "yes". Raises InputError where one has several."""
    assert model.tokenizer is not None  # it encodes the rows
    answers = [model.tokenizer.encode(word, False) for word in ("no", "yes")]
    if any(len(ids) != 1 for ids in answers):
        raise InputError("the tokenizer has more than one token for yes or no: this model is no reranker")
    return np.ravel(answers)


def answer_scores(model: Model, rows: list[list[int]]) -> np.ndarray:
    """float32 [rows]: the probability of "yes" against "no" after each row of ids. Raises InputError."""
    check_causal(model.config, "rerank")
    answer_ids = no_yes_ids(model)
    scores_N = np.zeros(len(rows), np.float32)
    for batch, hidden_BTD, num_tokens_B in _hidden_states(model, rows):
        logits_B2 = _answer_logits(model.params, model.config, hidden_BTD, num_tokens_B, answer_ids)
        scores_N[batch] = np.asarray(jax.nn.softmax(logits_B2))[: len(batch), 1]
    _check_finite("document", scores_N[:, None], model)
    return scores_N


def _hidden_states(model: Model, rows: list[list[int]]) -> Iterator[tuple[list[int], jax.Array, np.ndarray]]:
    """Batches of rows, as indices, their final hidden states [B, T, D], padded, and lengths [B]."""
    tree = (model.params, model.config)
    limit = model.config.context_length
    executor = executor_class(model.params)(None)
    for batch in _batches([min(bucket(len(row)), limit) for row in rows]):
        inputs = pad_prompts([rows[i] for i in batch], limit, next_power_of_two(len(batch)))
        yield batch, executor.hidden(tree, inputs), inputs[1]


def _check_finite(name: str, vectors_ND: np.ndarray, model: Model) -> None:
    if len(broken := np.flatnonzero(~np.isfinite(vectors_ND).all(-1))):
        reason = non_finite_reason(model.params)
        raise InputError(f"{name} {broken[0]}: its hidden states are not finite: {reason}")


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
        ids = text
    else:
        raise InputError(f"{name} must be a text or a list of token ids, got {format_value(text)}")
    ids = check_token_ids(name, ids, model.config.vocab_size, model.config.placeholder_ids)
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


@partial(jax.jit, static_argnums=2)
def _pool(hidden_BTD: jax.Array, num_tokens_B: jax.Array, pooling: str) -> jax.Array:
    """float32 [B, D]: the mean over each row's tokens, or the state of its last or first one."""
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


@partial(jax.jit, static_argnums=1)
def _answer_logits(
    params: Params, config: ModelConfig, hidden_BTD: jax.Array, num_tokens_B: jax.Array, ids: jax.Array
) -> jax.Array:
    """float32 [B, A]: the logits of these tokens after each row."""
    logits_BV = unembed(params, config, last_hidden(hidden_BTD, num_tokens_B))
    return logits_BV[:, ids].astype(jnp.float32)
