"""Every text that the grammar of a call allows is one: of a tool, with arguments that are valid."""

import itertools
import json
import random

import numpy as np
import pytest
import tool_models
from quick import full_except
from tool_models import tool

import xinfer_jax as xj
from xinfer_jax.grammar.compiler import vocabulary_of
from xinfer_jax.tool_calls.gemma_call import GEMMA_TOKENS
from xinfer_jax.tool_calls.harmony import CONTROL_TOKENS
from xinfer_jax.tool_calls.tool_call_form import tool_call_form, tool_call_forms
from xinfer_jax.tool_calls.tool_messages import check_tools, parameter_schemas

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

FORMATS = [form.name for form in tool_call_forms()]

_KIND = dict(type="object", properties=dict(q=dict(enum=[1, "é"])), required=["q"])
_KINDS = dict(type="array", items={"$ref": "#/$defs/kind"}, maxItems=2)
TOOLS = [
    *tool_models.TOOLS,
    dict(type="function", function=dict(name="now")),
    tool("set", zip=dict(type="string", pattern="^[0-9]{2,4}$")),
    tool("move", path=dict(type="string", pattern="a/b", maxLength=5)),
    tool("put", text=dict(type="string", minLength=1, maxLength=4), quote=dict(enum=['"', "x\ny"])),
    tool("tint", shade={"$ref": "#/$defs/shade"}),
    tool("add.all", kinds=_KINDS, sure=dict(type="boolean")),
]
TOOLS[-2]["function"]["parameters"] |= {"$defs": dict(shade=dict(type="string", enum=["1", "true", '"x"']))}
TOOLS[-1]["function"]["parameters"] |= {
    "$defs": dict(kind=_KIND | dict(additionalProperties=False)),
    "required": ["kinds"],
}
SCHEMAS = parameter_schemas(TOOLS)


class Bytes:
    """A tokenizer whose tokens are the bytes, the end of a text, and control tokens of Harmony and Gemma."""

    tokens = [bytes([i]) for i in range(256)] + [b"<|end of text|>"]
    tokens += [x.encode() for x in (*CONTROL_TOKENS, *GEMMA_TOKENS)]
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = [*range(256, len(tokens))]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def sample():
    """Draws a text from a grammar."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), len(Bytes.tokens))

    def draw(grammar: str, rng: random.Random) -> str:
        matcher = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        text = bytearray()
        mask = np.zeros(9, np.uint32)
        while True:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = [i for i in range(len(Bytes.tokens)) if mask[i // 32] >> np.uint32(i % 32) & 1]
            token = 256 if 256 in allowed and rng.random() < 0.3 else rng.choice(allowed)
            if token == 256:
                return text.decode()
            assert matcher.consume_token(token)
            text += Bytes.tokens[token]

    return draw


@pytest.mark.parametrize("form", full_except(["hermes", "harmony"], FORMATS))
@pytest.mark.parametrize("several", full_except([True], [False, True]))
def test_every_text_is_a_call_with_valid_arguments(sample, form, several):
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(2)
    grammar = tool_call_form(form).grammar(SCHEMAS, several)
    seen = set()
    most = 0
    for _ in range(40):
        text = sample(grammar, rng)
        parsed = xj.tools.AnswerParser(form, TOOLS).parse(text)
        assert parsed.content is None and parsed.tool_calls, text
        for call in parsed.tool_calls:
            schema = SCHEMAS[call.name] or dict(maxProperties=0)
            jsonschema.validate(call.arguments, schema)
        seen |= {call.name for call in parsed.tool_calls}
        most = max(most, len(parsed.tool_calls))
    assert seen == {*SCHEMAS} and (most > 1) == (several and form not in ("llama3_json", "harmony"))
    named = dict(itertools.islice(SCHEMAS.items(), 1))
    text = sample(tool_call_form(form).grammar(named, False), rng)
    (call,) = xj.tools.AnswerParser(form, TOOLS).parse(text).tool_calls
    assert call.name == "add"


@pytest.mark.parametrize("form", FORMATS)
def test_annotations_constrain_nothing(sample, form):
    """The schema, its parts and the values of a record have the annotations that OpenAPI and zod write next
    to the keywords.
    """
    jsonschema = pytest.importorskip("jsonschema")
    notes = {"x-order": 1, "nullable": True, "readOnly": True, "example": "a", "xml": {"name": "a"}}
    notes |= {"discriminator": {"propertyName": "q"}, "externalDocs": {"url": "u"}, "contentEncoding": "x"}
    texts = dict(type="array", items=dict(type="string", maxLength=3, **notes), **notes)
    record = dict(type="object", additionalProperties=dict(type="integer", **notes), **notes)
    sure = dict(anyOf=[dict(type="null", **notes), dict(type="boolean")], **notes)
    parts = dict(texts=texts, sure=sure, record=record, kind=dict(enum=["a", "b"], **notes))
    schema = dict(type="object", properties=parts, required=["record", "kind"], **notes)
    tools = [dict(type="function", function=dict(name="f", parameters=schema))]
    grammar = tool_call_form(form).grammar(dict(f=schema), False)
    for seed in range(3):
        text = sample(grammar, random.Random(seed))
        (call,) = xj.tools.AnswerParser(form, tools).parse(text).tool_calls or pytest.fail(text)
        jsonschema.validate(call.arguments, schema)
        assert call.arguments.keys() <= parts.keys()


NOT_EXPRESSED = [
    ("qwen3_coder", dict(allOf=[{}]), "tool 'f': 'allOf' cannot be"),
    *(
        (form, dict(properties=properties), said)
        for form in ("qwen3_coder", "glm45")
        for properties, said in (
            (dict(a={"type": "string", "not": {"const": "x"}}), "parameter 'a': 'not'"),
            (dict(a=dict(type="string", pattern=3)), "pattern must be a regular expression"),
            ({"a b": dict(type="string")}, "has no spaces"),
        )
    ),
    *(
        ("gemma4", dict(properties=dict(a=value)), said)
        for value, said in (
            (dict(type="array", uniqueItems=True), "'uniqueItems' cannot be"),
            ({"$ref": "#/$defs/a"}, "is not one of its"),
            (dict(enum=[[1]]), "the constant"),
            (dict(type="text"), "is not one of JSON Schema"),
            (False, "must be an object"),
        )
    ),
]


@pytest.mark.parametrize("form, parameters, said", NOT_EXPRESSED)
def test_what_a_form_cannot_express(form, parameters, said):
    with pytest.raises(xj.InputError, match=said):
        tool_call_form(form).grammar(dict(f=parameters), False)


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def compile_tools(tmp_path_factory, request):
    """Compiles the grammar of tools for a checkpoint with a template of each form."""
    pytest.importorskip("llguidance")
    path = tmp_path_factory.mktemp(request.param)
    checkpoint = tool_models.write_calling_checkpoint(path)
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | dict(chat_template=tool_models.TEMPLATES[request.param])
    config.write_text(json.dumps(settings))
    tokenizer = xj.Tokenizer.from_dir(checkpoint)
    vocabulary = vocabulary_of(tokenizer, tokenizer.backend.get_vocab_size())
    return lambda tools: vocabulary.matcher(xj.tools.tool_grammar(tools, tokenizer))


def test_a_call_may_have_many_texts(compile_tools):
    """Unlike those of a caller's grammar, the operators & and ~ of calls are not limited."""
    compile_tools([tool("f", **{f"text{i}": dict(type="string", pattern="[a-z]") for i in range(9)})])


def test_tools_of_real_servers_are_served(compile_tools):
    """Keywords that are null, a type that may be null, formats and uniqueItems that nothing enforces."""
    for parameters in (
        dict(type="object", properties=None, required=None),
        dict(type=["object", "null"], properties=dict(a=dict(type="integer", minimum=None)), required=None),
        dict(properties=dict(a=dict(type="string", format="uri-reference"), b=dict(uniqueItems=True))),
    ):
        one = dict(type="function", function=dict(name="f", parameters=parameters))
        compile_tools([one])
    (checked,) = check_tools([dict(type="function", function=dict(name="f", parameters=dict(required=None)))])
    assert checked["function"]["parameters"] == {}
    one["function"]["strict"] = True
    with pytest.raises(xj.InputError, match="tool 'f': (format 'uri-ref|uniqueItems)"):
        compile_tools([one])


def test_a_tools_schema_at_fault_is_named(compile_tools):
    for schema, words in (
        (dict(type="array", contains={}), r"the schema of tool 'g' is not served: Unimplemented keys: \["),
        (
            dict(type="array", items=dict(pattern="[a")),
            "'g' is not served: a pattern is no regular expr.*unclosed",
        ),
        (dict(const=2**53 + 1), "tool 'g': 9007199254740993 of const"),
    ):
        with pytest.raises(xj.InputError, match=words) as caught:
            compile_tools([tool("f"), tool("g", a=schema)])
        assert "%json" not in str(caught.value)
