"""Parses bodies that ask how well documents answer queries: bodies of /rerank (the fields of Jina, Cohere and
vLLM) and of /score (vLLM's fields).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..checkpoint.loading import Model
from ..errors import format_value
from ..reranking import RerankEncoder
from .embedding_body import MAX_TEXTS
from .fields import BodyError, Fields, errors_of

_COMMON = {"model", "instruction", "truncate_prompt_tokens", "user"}
RERANK_FIELDS = _COMMON | {"query", "documents", "top_n", "return_documents"}
# The fields of queries and of documents in a body of /score.
SCORE_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
SCORE_FIELDS = _COMMON.union(*SCORE_PAIRS)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Token ids of queries and documents. A query that several documents have is one list."""

    queries: list[list[int]]  # for each document
    documents: list[list[int]]  # what follows the query, to its end

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each pair."""
        return [len(query) + len(rest) for query, rest in zip(self.queries, self.documents, strict=True)]

    def rows(self, at: slice) -> list[list[int]]:
        """Returns the ids of some pairs, each as one row."""
        return [a + b for a, b in zip(self.queries[at], self.documents[at], strict=True)]


@dataclasses.dataclass(frozen=True)
class RerankBody:
    """A body of /rerank after its checks."""

    pairs: Pairs
    documents: list[dict[str, Any]] | None  # that the response repeats; None: it does not
    top: int  # how many results


def parse_rerank_body(
    model: Model, body: dict[str, Any], escape: bool, count: Callable[[int], None]
) -> RerankBody:
    """Checks a body without null fields, and encodes its texts. Raises BodyError.

    Args:
        escape: True: control tokens that texts spell stay ordinary text.
        count: a function that is called with the least number of tokens, as far as it is known, before each
            text is encoded. It raises if there are too many, or if nobody needs the body.
    """
    fields = Fields(body)
    documents = _listed(body, "documents")
    top = fields.integer("top_n", 1, 2**31 - 1) or len(documents)
    shown = [one if isinstance(one, dict) else dict(text=one) for one in documents]
    query = _text("query", body.get("query"))
    pairs = _encode_pairs(model, fields, ("query", [query]), ("documents", documents), escape, count)
    return RerankBody(pairs, shown if fields.boolean("return_documents", True) else None, top)


def parse_pairs_body(model: Model, body: dict[str, Any], escape: bool, count: Callable[[int], None]) -> Pairs:
    """Checks a body of /score without null fields: one query for all documents, or one for each. It takes the
    arguments of `parse_rerank_body`, and raises its errors.
    """
    given = [names for names in SCORE_PAIRS if all(name in body for name in names)]
    others = SCORE_FIELDS - _COMMON
    if len(given) != 1 or any(name in body for name in others.difference(*given)):
        wanted = ", or ".join(" and ".join(names) for names in SCORE_PAIRS)
        raise BodyError("text_1", f"the body must have {wanted}, one of these pairs")
    first, second = given[0]
    both = (first, _listed(body, first)), (second, _listed(body, second))
    return _encode_pairs(model, Fields(body), *both, escape, count)


def score_list_name(data: bytes) -> str:
    """Returns the field of a body of /score that may have many texts."""
    names = [name for _, name in SCORE_PAIRS]
    return next((name for name in names if b'"%s"' % name.encode() in data), names[0])


def _encode_pairs(
    model: Model,
    fields: Fields,
    queries: tuple[str, Sequence[Any]],
    documents: tuple[str, Sequence[Any]],
    escape: bool,
    count: Callable[[int], None],
) -> Pairs:
    """Encodes the pairs. queries, documents: the name of the field, and its texts."""
    query_name, first = queries
    document_name, second = documents
    if len(first) not in (1, len(second)):
        said = f"{query_name} must have one text, or one for each of {len(second)} {document_name}"
        raise BodyError(query_name, f"{said}, got {len(first)}")
    encoder = _encoder(model, fields, escape)
    known: dict[str, list[int]] = {}
    tokens = 0
    found = Pairs([], [])
    for one in first:
        count(tokens)
        text = _text(query_name, one)
        if text not in known:
            known[text] = _named(query_name, encoder.encode_query, "a query", text)
        found.queries.append(known[text])
        tokens += (len(known[text]) + encoder.fewest) * (len(second) if len(first) == 1 else 1)
    found.queries.extend(found.queries * (len(second) - len(first)))
    for one, query in zip(second, found.queries, strict=True):
        count(tokens)
        text = _text(document_name, one)
        ids = _named(document_name, encoder.encode_document, "a document", text, len(query))
        tokens += len(ids) - encoder.fewest
        found.documents.append(ids)
    count(tokens)
    return found


def _encoder(model: Model, fields: Fields, escape: bool) -> RerankEncoder:
    most = fields.integer("truncate_prompt_tokens", -1, model.config.context_length)
    name = "truncate_prompt_tokens" if most == 0 else "documents"
    return _named(name, RerankEncoder, model, fields.string("instruction"), most, escape)


def _named(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function and returns its result. An `InputError` gets the name of the field at fault."""
    with errors_of(name):
        return function(*arguments)


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    texts = [value] if isinstance(value, str | dict) else value
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_TEXTS:
        wanted = f"a list of 1 to {MAX_TEXTS} texts"
        raise BodyError(name, f"{name} must be {wanted}, got {format_value(value)}")
    return texts


def _text(name: str, value: Any) -> str:
    """Returns a text, or the text of an object: {"text": …}, or vLLM's {"content": [{"type": "text", "text":
    …}]}.
    """
    text = value.get("text") if isinstance(value, dict) else value
    if isinstance(value, dict) and isinstance(parts := value.get("content"), list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
        text = "".join(texts) if all(isinstance(one, str) for one in texts) else None
    if not isinstance(text, str):
        raise BodyError(name, f'{name}: a text or {{"text": …}} is needed, got {format_value(value)}')
    return text
