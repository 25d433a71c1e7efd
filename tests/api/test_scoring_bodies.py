"""Bodies of /v1/embeddings, /rerank and /score: forms of fields, and what is counted before it is encoded."""

import dataclasses

import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.api.embedding_body import parse_embedding_body
from xinfer_jax.api.fields import BodyError
from xinfer_jax.api.rerank_body import parse_pairs_body, parse_rerank_body, score_list_name
from xinfer_jax.checkpoint.embedding_modules import EmbeddingModules
from xinfer_jax.reranking import RerankEncoder

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    """Its yes and no are one token each. It has prompts, of which one is the default."""
    model = tiny.shallow_model(1)
    backend = tiny.tokenizer()
    backend.add_tokens(["yes", "no"])
    tokenizer = xj.Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=())
    prompts = dict(query="the end: ", document="")
    modules = EmbeddingModules("mean", (), True, prompts, prompts["query"], matryoshka_dimensions=(8,))
    return xj.Model(model.params, model.config, tokenizer, embedding=modules)


def embedding(model, **body):
    counted = []
    parsed = parse_embedding_body(model, body, 64, True, counted.append)
    assert counted == sorted(counted) and len(counted) == len(parsed.texts) + 1
    return parsed


def rerank(model, **body):
    return parse_rerank_body(model, body, True, lambda tokens: None)


def score(model, **body):
    return parse_pairs_body(model, body, True, lambda tokens: None)


def test_embeddings_have_the_checkpoints_prompt(model):
    encode = model.tokenizer.encode
    assert embedding(model, input=["a", [5, 6]]).texts == [encode("the end: a"), [5, 6]]
    assert embedding(model, input="a", prompt_name="document").texts == [encode("a")]
    assert tiny.IM_END not in embedding(model, input="<|im_end|>").texts[0]
    parsed = embedding(model, input="a b c", truncate_prompt_tokens=3, dimensions=8, encoding_format="base64")
    assert (parsed.texts, parsed.dimensions, parsed.as_base64) == ([encode("the end: a")[:3]], 8, True)
    last = embedding(model, input="a b c", truncate_prompt_tokens=3, truncation_side="left")
    assert last.texts == [encode("the end: a b c")[-3:]]
    assert len(embedding(model, input="a" * 100, truncate_prompt_tokens=-1).texts[0]) == 64
    for field, body in (
        ("dimensions", dict(dimensions=9)), ("dimensions", dict(dimensions="8")),
        ("prompt_name", dict(prompt_name="passage")), ("truncation_side", dict(truncation_side="both")),
        ("truncate_prompt_tokens", dict(truncate_prompt_tokens=0)),
        ("truncate_prompt_tokens", dict(truncate_prompt_tokens=65)),
        ("input", dict(input="a" * 100)), ("input", dict(input={"text": "a"})), ("input", dict(input=None)),
        ("input", dict(input=[])), ("input", dict(input=[""], prompt_name="document")),
        ("input", dict(input=[[-1]])), ("encoding_format", dict(encoding_format="int8")),
    ):  # fmt: skip
        with pytest.raises(BodyError) as error:
            embedding(model, **dict(input="a") | body)
        assert error.value.param == field, body
    without = dataclasses.replace(model, embedding=None)
    with pytest.raises(BodyError, match="prompt_name must be left out: the model has no prompts"):
        embedding(without, input="a", prompt_name="query")


def test_forms_of_documents(model):
    """Texts, objects of Jina and Cohere, whose other fields come back, and vLLM's parts."""
    parts = dict(content=[dict(type="text", text="a "), dict(type="text", text="b")])
    parsed = rerank(model, query={"text": "where?"}, documents=["a b", {"text": "a b", "id": 3}, parts])
    assert parsed.pairs.documents[0] == parsed.pairs.documents[1] == parsed.pairs.documents[2]
    assert parsed.documents == [{"text": "a b"}, {"text": "a b", "id": 3}, parts] and parsed.top == 3
    bare = rerank(model, query="where?", documents="a b", return_documents=False, top_n=7)
    assert bare.documents is None and bare.top == 7 and bare.pairs.queries == parsed.pairs.queries[:1]
    wanted = RerankEncoder(model).encode_query("query", "where?")
    assert bare.pairs.rows(slice(0, 1)) == [wanted + bare.pairs.documents[0]]
    assert bare.pairs.lengths() == [len(wanted) + len(bare.pairs.documents[0])]
    for field, body in (
        ("documents", dict(documents=[{"image": "x"}])), ("documents", dict(documents=[{"content": [3]}])),
        ("documents", dict(documents=[])), ("documents", dict(documents=["b", 3])), ("query", dict(query=3)),
        ("documents", dict(documents=["b " * 3000])), ("top_n", dict(top_n=0)),
        ("instruction", dict(instruction=[])),
        ("return_documents", dict(return_documents=1)), ("query", dict(query=["a", "b"])),
        ("truncate_prompt_tokens", dict(truncate_prompt_tokens=0)), ("documents", dict(documents={})),
    ):  # fmt: skip
        with pytest.raises(BodyError) as error:
            rerank(model, **dict(query="a", documents=["b", "c"]) | body)
        assert error.value.param == field, body


def test_pairs_of_a_score(model):
    """vLLM's four names: one query for all documents, or one for each."""
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        pairs = score(model, **{first: "a", second: ["b", "c"]})
        assert pairs.queries[0] is pairs.queries[1] and len(pairs.documents) == 2
        assert score_list_name(b'{"%s": "\\"items\\""}' % second.encode()) == second
    each = score(model, queries=["a", "b", "a"], items=["c", "c", "d"])
    assert each.queries[0] is each.queries[2] != each.queries[1] and each.documents[0] == each.documents[1]
    assert score(model, text_1="a", text_2="b").lengths() == [len(each.queries[0] + each.documents[0])]
    for field, body in (
        ("text_1", {}), ("text_1", dict(text_1="a")), ("text_1", dict(text_1="a", documents="b")),
        ("text_1", dict(text_1="a", text_2="b", items="c")), ("items", dict(queries="ab", items=3)),
        ("data_1", dict(data_1=["a", "b"], data_2=["c"])), ("data_2", dict(data_1="a", data_2=[3])),
    ):  # fmt: skip
        with pytest.raises(BodyError) as error:
            score(model, **body)
        assert error.value.param == field, body


def test_tokens_are_counted_before_documents_are_encoded(model, monkeypatch):
    """The query is encoded once, its tokens count for each document, and each document may be the last."""
    calls = []
    for name in ("encode_query", "encode_document"):
        encode = getattr(RerankEncoder, name)
        wrapped = lambda *given, name=name, encode=encode: calls.append(name) or encode(*given)  # noqa: E731
        monkeypatch.setattr(RerankEncoder, name, wrapped)
    body = dict(query="where? " * 9, documents=["a"] * 100)

    def counts(most):
        counted = []

        def count(tokens):
            counted.append(tokens)
            if len(counted) > most:
                raise RuntimeError

        calls.clear()
        try:
            pairs = parse_rerank_body(model, body, True, count).pairs
        except RuntimeError:
            return counted
        assert counted[-1] == sum(pairs.lengths())
        return counted

    counted = counts(1000)
    assert calls == ["encode_query", *["encode_document"] * 100]
    assert counted == sorted(counted) and counted[1] > 100 * len(model.tokenizer.encode(body["query"]))
    assert counts(1) == counted[:2] and calls == ["encode_query"]
    assert counts(3) == counted[:4] and calls == ["encode_query", "encode_document", "encode_document"]
