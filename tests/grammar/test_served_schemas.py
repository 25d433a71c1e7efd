r"""JSON Schemas as they are compiled: every answer that a grammar allows is valid, byte by byte."""

import json
import re
import time

import pytest

import xinfer_jax as xj
from xinfer_jax.errors import GrammarError
from xinfer_jax.grammar.served_schemas import served_schema
from xinfer_jax.grammar.token_masks import lark_text

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
pytest.importorskip("jsonschema", reason="the extra `test` is not installed")
import schema_walks

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:Possible"),  # of `re`, about & and - in classes
]
A = dict(type="integer")


def matcher(schema, **how):
    found = schema_walks.byte_matcher(xj.grammar.json_schema(schema, **how).source)
    assert not found.is_error(), found.get_error()
    return found


def allows(found, text):
    one = found.deep_copy()
    ids = [*text.encode()]
    return one.validate_tokens(ids) == len(ids) and one.consume_tokens(ids) and one.is_accepting()


def test_random_answers_to_random_schemas_are_valid():
    """A tenth of these answers are not valid without `served_schema`."""
    counts = schema_walks.walk_schemas(100, 4)
    print(counts)
    assert counts["served"] > 60 and counts["ended"] > 250


# A schema, texts that it allows, and texts that it may not allow.
CASES = [
    (dict(type="number", exclusiveMinimum=0, maximum=0.5), "0.1 0.5", "0 0.0 -0 0.6 0.50000000000000001"),
    (
        dict(type="number", exclusiveMinimum=1, exclusiveMaximum=1.1),
        "1.05",
        "1 1.0 1.1 1.10 1.00000000000000001 1.099999999999999999",
    ),
    (
        dict(type="number", exclusiveMinimum=-1, exclusiveMaximum=1),
        "-0.99 0.9 0.990 0",
        "1 -1 0.99999999999999999",
    ),
    (dict(type="number", minimum=-5, exclusiveMaximum=-0.1), "-5 -4.2", "-0.1 0 -0.0 -0.10000000000000001"),
    (dict(type="number", maximum=0.9999999999999999), "0.990 0 -5.5", "1 1.0 0.99999999999999999"),
    (dict(type="number", minimum=-(10.0**300), maximum=1e300), "1 -2.5", ""),
    (dict(type="number", minimum=3, exclusiveMinimum=True), "3.5 4", "3 3.0"),  # Draft 4
    (dict(type="integer", exclusiveMinimum=0.5, exclusiveMaximum=3), "1 2", "0 3"),
    (dict(type="integer", minimum=2**53 + 1, maximum=2**60), str(2**53 + 2), str(2**53)),
    (dict(type="integer", minimum=-(2**63), maximum=2**63 - 1), "0 -7", str(2**63)),
    (dict(const=2**60), str(2**60), f"{2**60 + 1} {2**60 - 1}"),
    (dict(enum=[1.0, "a", 2**53]), f'1 "a" {2**53}', f'{2**53 + 1} "b"'),
    (dict(type="string", pattern='^[^"]*$'), r'"" "\\" "é"', r'"\"" "\u0022"'),
    (dict(type="string", pattern=r"^[^\\]*$"), r'"\"" "/"', r'"\\" "\u005c"'),
    (dict(type="string", pattern=r'^(?:x|[^"\\\n])$'), '"x" "é"', r'"\"" "\\" "\n"'),
    (dict(type="string", pattern=r"^a[\x00-\x1fb]\x01?$"), r'"ab" "a\n"', r'"a\"" "a" "a\\"'),
    (dict(type="string", pattern=r"^\P{L}+$"), r'"1" "\""', r'"a" "é"'),
    (dict(type="string", pattern="^[^+--/]$"), '"a"', '"," "+" "-" "/"'),
    (
        dict(type="object", properties=dict(a=A)),
        '{} {"a":1}',
        r'{"a":"x"} {"\u0061":"x"} {"b":1} {"a":1,"a":2}',
    ),
    (dict(properties=dict(a=A), required=["b"], type="object"), '{"b":[]}', '{"a":1} {} {"b":1,"b":2}'),
    (
        dict(type="object", properties=dict(a=A), additionalProperties=True),
        '{"b":"x"} {"a":1,"b":2}',
        r'{"\u0061":"x"} {"a":1,"\u0061":"x"} {"a":"x"}',
    ),
    (dict(type="object", patternProperties={"^x": A}), '{"x":1} {"y":"1"}', r'{"x":"1"} {"\u0078":"1"}'),
    (
        dict(allOf=[dict(properties=dict(a=A)), dict(properties=dict(b=A))], type="object"),
        '{"a":1,"b":2,"c":0}',
        '{"a":""}',
    ),
    (dict(type="object", properties=None, required=None, minProperties=1), '{"a":null}', "{}"),
    (True, '{"a":[1]}', r'{"\u0061":1} [1,'),
    (
        dict(type="object", propertyNames=dict(type="string"), additionalProperties=A),
        '{} {"a":1,"b":2}',
        '{"a":""}',
    ),
    (
        dict(propertyNames=dict(enum=["a", "b"], description="c"), additionalProperties=A, type="object"),
        '{} {"a":1} {"a":1,"b":2}',
        '{"c":1} {"a":""}',
    ),
    (dict(propertyNames=dict(pattern="^x"), type="object"), '{"x":1,"xy":""}', '{"y":1}'),
    (
        {"$ref": "#/x-kinds/pets~1cats", "x-kinds": {"pets/cats": {"type": "integer", "maximum": 3}}},
        "3",
        '4 "a"',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts", "others"), CASES)
def test_what_a_schema_allows(schema, texts, others):
    found = matcher(schema)
    assert [text for text in texts.split() if allows(found, text)] == texts.split()
    assert not [text for text in others.split() if allows(found, text)]


@pytest.mark.parametrize(
    "pattern",
    [
        '[^"]', r"[^\\]", r'[^"\\n]', r'[^"\n]', r"[\x00-!#-~]", r"[\x00-\x1f]", "[^+--/]", "[a&&b]",
        "[[a]", r"[]-]", "[~~^]", r"[\w.-]", r"[^\s\d]", r"[\S]", "[^^]", r"\x41",
        r"[\]\[-]", r"[a\-z]", "[*--]",
        "[^]]", ".", r"\D",
    ],
)  # fmt: skip
def test_classes_are_those_of_python(pattern):
    """The classes are compared on characters that stand in strings, ASCII and others."""
    schema = matcher(dict(type="string", pattern=f"^{pattern}$"))
    for char in map(chr, [*range(0x7F), 0xE9, 0x65E5, 0x1F600]):
        if char >= " " or char in "\b\t\n\f\r":
            found = allows(schema, json.dumps(char, ensure_ascii=False))
            assert found == bool(re.fullmatch(pattern, char, re.ASCII)), repr(char)


REJECTED = [
    (dict(const=2**53 + 1), "9007199254740993 of const or enum is not served"),
    (dict(enum=[1, dict(a=[2**64])]), "18446744073709551616 of const"),
    (dict(const=0.12345678901234567), "of const or enum"),
    (dict(const="a\x01"), "a text without control"),
    (dict(properties=dict(a=dict(minimum=2**63))), "beyond 64 bits"),
    (dict(type="object", minProperties=2), "minProperties 2 is not served where keys may repeat"),
    (dict(allOf=[dict(multipleOf=65536), dict(multipleOf=65537)]), "multipleOf is not served in several"),
    ({"type": "object", "x-guidance": dict(lenient=True)}, "x-guidance in a JSON schema is not served"),
    (
        dict(items=dict(uniqueItems=True)),
        "uniqueItems True is not enforced: leave it out, or give strict false",
    ),
    (dict(anyOf=[dict(type="string", format="password")]), "format 'password' is not enforced"),
    (
        json.dumps(json.dumps({"type": "object", "x-guidance": dict(lenient=True)})),
        "a JSON schema must be an object",
    ),
]


@pytest.mark.parametrize(("schema", "words"), REJECTED)
def test_what_would_be_wrong_is_rejected_by_name(schema, words):
    with pytest.raises(xj.InputError, match=re.escape(words)):
        xj.grammar.json_schema(schema)


def test_sources_are_searched_in_linear_time():
    """The server searches in its own process, and one search there stops all threads. These sources once took
    56 and 40 seconds.
    """
    began = time.process_time()
    assert served_schema(dict(type="string", pattern=r"\p{" * 120_000), False)
    assert lark_text("lark", 'start: "' + r"\"" * 40_000).startswith("%llguidance")
    assert time.process_time() - began < 10  # 0.1 s on a quiet machine
    for text in (r'"a & \" b" & "c"', r'"a" & "b & \"', '"a" & /b/'):
        with pytest.raises(GrammarError, match="the lark grammar has (9|10) of"):
            lark_text("lark", f"{text} {' ~' * 8}")


# What OpenAPI, zod, pydantic and langchain write beside the keywords that constrain; none is a schema.
ANNOTATIONS = {
    "x-order": 1, "x-wrong": {"format": "weird", "const": 2**64, "oneOf": [], "uniqueItems": True},
    "nullable": True, "readOnly": True, "writeOnly": False, "example": {"a": 2**64}, "examples": ["\x01"],
    "discriminator": {"propertyName": "a"}, "deprecated": True, "externalDocs": {"url": "u"},
    "xml": {"name": "a"}, "$comment": "a", "title": "A", "description": "a", "default": None,
    "contentEncoding": "base64", "contentMediaType": "text/plain", "errorMessage": {"format": "weird"},
    "$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "propertyOrdering": ["a"],
}  # fmt: skip


def annotated(schema):
    """The schema with all annotations in it, and in each property and item."""
    found = {**schema, **ANNOTATIONS}
    found |= {key: annotated(schema[key]) for key in ("items", "propertyNames") if key in schema}
    if "properties" in schema:
        found["properties"] = {name: annotated(one) for name, one in schema["properties"].items()}
    return found


def test_annotations_change_nothing():
    """This includes annotations whose names are names of properties, which stay."""
    words = dict(type="object", propertyNames=dict(type="string"))
    texts = dict(type="array", items=dict(type="string", pattern="^a"))
    schema = dict(
        type="object", properties=dict(example=A, nullable=words, texts=texts), required=["example"]
    )
    for strict in (True, False):
        plain = served_schema(schema, strict)
        assert served_schema(annotated(schema), strict) == plain
    assert plain["properties"].keys() == schema["properties"].keys()


def test_unions_with_a_discriminator():
    """The unions are written as pydantic and zod write them. Another `oneOf` stays: a value may be valid for
    two of its schemas.
    """
    kinds = {
        name: dict(type="object", properties=dict(kind=dict(const=name), size=A), required=["kind"])
        for name in ("cat", "dog")
    }
    branches = [{"$ref": f"#/$defs/{name}"} for name in kinds]
    union = {"oneOf": branches, "discriminator": {"propertyName": "kind"}, "$defs": kinds}
    found = matcher(union)
    assert allows(found, '{"kind":"cat","size":1}') and allows(found, '{"kind":"dog"}')
    assert not allows(found, '{"kind":"cow"}') and not allows(found, '{"kind":"cat","other":1}')
    for changed in (dict(required=[]), dict(type=["object", "null"]), dict(properties=dict(kind=A))):
        kinds["dog"] = kinds["dog"] | changed
        assert "oneOf" in served_schema(union, False)


def test_deep_schemas_are_rejected():
    deep = dict(type="object")
    for _ in range(3000):
        deep = dict(items=deep)
    with pytest.raises(xj.InputError, match="nested too deeply|must be JSON"):
        xj.grammar.json_schema(deep)
    with pytest.raises(xj.InputError, match="nested too deeply"):
        served_schema(deep, False)


def test_models_of_pydantic():
    """The schemas are not strict: rules that nothing enforces are left out. Objects have only their
    properties.
    """
    pydantic = pytest.importorskip("pydantic", reason="the extra `clients` is not installed")

    class Item(pydantic.BaseModel):
        kinds: set[str]
        path: pydantic.FilePath
        price: float = pydantic.Field(gt=0, lt=1)

    class Order(pydantic.BaseModel):
        items: list[Item]
        note: str | None = None

    with pytest.raises(xj.InputError, match="not enforced"):
        xj.grammar.json_schema(Order)
    text = '{"items":[{"kinds":["a","a"],"path":"/x","price":0.5}],"note":null}'
    found = matcher(Order, strict=False)
    assert allows(found, text) and not allows(found, text.replace("0.5", "1"))
    assert allows(found, '{"items":[]}') and not allows(found, '{"items":[],"other":1}')


def test_integers_have_formats_that_assert_nothing():
    assert allows(matcher(dict(type="integer", format="int64")), "1")
