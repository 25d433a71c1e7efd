"""`rerank`: how well texts answer a query, by a model that was trained to say yes or no."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checkpoint.loading import Model
from .checks import check_token_ids
from .config.model_config import ModelConfig
from .config.unsupported import check_causal
from .embedding import check_finite, check_texts, hidden_states_of, kept_tokens
from .errors import ContextLengthError, InputError, format_value
from .generation.loop import last_hidden
from .model.decoder import unembed
from .modes import in_default_modes
from .tokenization.conversation import check_text_length
from .tokenization.escaping import encode_wrapped
from .weights.params import Params

# As Qwen3-Reranker was trained.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
# It spells the control tokens that no text may become.
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@in_default_modes
def rerank(
    model: Model,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None = None,
    truncate_prompt_tokens: int | None = None,
    escape_control_tokens: bool = True,
) -> np.ndarray:
    """Scores how well each document answers a query, with a model that was trained to say "yes" or "no".

    Use it with checkpoints such as Qwen3-Reranker, for example to sort the results of a search.

    Args:
        model: a model from `load_model`.
        query: the text of the query.
        documents: a list of texts.
        instruction: the task that the query stands for. None asks for passages that answer a web search.
        truncate_prompt_tokens: the most tokens of a document together with the query and the template. A
            longer document loses its last tokens. -1 allows as many tokens as the context has. None raises
            `InputError` for a longer document.
        escape_control_tokens: True encodes control tokens that these texts spell, such as `<|im_end|>`, as
            ordinary text.

    Returns:
        A float32 array [documents] with the probability of "yes" against "no".

    Raises:
        InputError: the arguments are not texts, there are too many tokens, or the model has no tokenizer in
            which "yes" and "no" are one token each.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    texts = check_texts(documents)
    encoder = RerankEncoder(model, instruction, truncate_prompt_tokens, escape_control_tokens)
    query_ids = encoder.encode_query("query", query)
    document_ids = partial(encoder.encode_document, num_query_ids=len(query_ids))
    rows = [query_ids + document_ids(f"document {i}", text) for i, text in enumerate(texts)]
    return answer_scores(model, rows)


class RerankEncoder:
    """Encodes the prompt that asks whether a document answers a query, in two parts: a query is encoded once.

    Qwen's tokenizer gives both parts together the ids of the whole text: it splits texts after a newline.
    """

    def __init__(
        self, model: Model, instruction: Any = None, truncate_prompt_tokens: int | None = None,
        escape: bool = True,
    ):  # fmt: skip
        """Makes an encoder. It takes the arguments of `rerank`, and raises its errors."""
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: texts cannot be reranked")
        check_causal(model.config, "rerank")
        no_yes_ids(model)
        self._model = model
        self._tokenizer = model.tokenizer
        self._limit = model.config.context_length
        self._most = kept_tokens(truncate_prompt_tokens, self._limit)
        self._instruction = _checked(
            "instruction", _INSTRUCTION if instruction in (None, "") else instruction
        )
        self._escape = escape
        self._answer_ids = self._encode("the template", [_ANSWER])
        self.fewest = len(self._answer_ids)  # ids of a document

    def encode_query(self, name: str, query: Any) -> list[int]:
        """Returns the ids up to the document. Raises InputError with the query's name."""
        check_text_length(name, _checked(name, query), self._tokenizer, self._limit)
        return self._encode(name, [f"{_JUDGE}<Instruct>: ", self._instruction, "\n<Query>: ", query, "\n"])

    def encode_document(self, name: str, document: Any, num_query_ids: int) -> list[int]:
        """Returns the ids of a document and of the text after it, which follow this number of ids of its
        query. Raises InputError with the document's name.
        """
        if self._most is None:
            check_text_length(name, _checked(name, document), self._tokenizer, self._limit)
        ids = self._encode(name, ["<Document>: ", _checked(name, document)])
        others = num_query_ids + self.fewest
        if self._most is not None:
            if self._most <= others:
                raise InputError(
                    f"truncate_prompt_tokens {self._most} leaves no token of {name}: query and template have"
                    f" {others}"
                )
            ids = ids[: self._most - others]
        if (length := others + len(ids)) > self._limit:
            raise ContextLengthError(
                f"{name} with its query has {length} tokens, which exceeds the context limit {self._limit}:"
                " shorten it, or truncate it by truncate_prompt_tokens"
            )
        return ids + self._answer_ids

    def _encode(self, name: str, pieces: list[str]) -> list[int]:
        ids = encode_wrapped(self._tokenizer, pieces, self._escape, _ANSWER)
        config = self._model.config
        return check_token_ids(name, ids, config.vocab_size, config.placeholder_ids)


def _checked(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"{name} must be a text, got {format_value(text)}")
    return text


def no_yes_ids(model: Model) -> np.ndarray:
    """Returns the token ids of "no" and "yes". Raises InputError if one has several."""
    assert model.tokenizer is not None  # it encodes the rows
    answers = [model.tokenizer.encode(word, False) for word in ("no", "yes")]
    if any(len(ids) != 1 for ids in answers):
        raise InputError("the tokenizer has more than one token for yes or no: this model is no reranker")
    return np.ravel(answers)


def answer_scores(model: Model, rows: list[list[int]]) -> np.ndarray:
    """Returns float32 [rows]: the probability of "yes" against "no" after each row of ids. Raises
    InputError.
    """
    answer_ids = no_yes_ids(model)
    scores_N = np.zeros(len(rows), np.float32)
    for batch, hidden_BTD, num_tokens_B in hidden_states_of(model, rows):
        logits_B2 = _answer_logits(model.params, model.config, hidden_BTD, num_tokens_B, answer_ids)
        scores_N[batch] = np.asarray(jax.nn.softmax(logits_B2))[: len(batch), 1]
    check_finite("document", scores_N[:, None], model)
    return scores_N


@partial(jax.jit, static_argnums=1)
def _answer_logits(
    params: Params, config: ModelConfig, hidden_BTD: jax.Array, num_tokens_B: jax.Array, ids: jax.Array
) -> jax.Array:
    """Returns float32 [B, A]: the logits of these tokens after each row."""
    logits_BV = unembed(params, config, last_hidden(hidden_BTD, num_tokens_B))
    return logits_BV[:, ids].astype(jnp.float32)
