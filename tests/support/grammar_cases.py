"""Schemas and regular expressions for tests of grammars, and a slow reference of their masks."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tiny

import xinfer_jax as xj
from xinfer_jax.config.model_config import from_hf
from xinfer_jax.grammar.vocabulary import token_bytes

TEXTS = ("yes", "yesterday", "no", "né", "日本")
CAPACITY = 128


def random_model(**changes: Any) -> xj.Model:
    """A model of random weights whose tokenizer has 272 tokens; its vocabulary has 288."""
    config = from_hf(tiny.CONFIG | dict(num_hidden_layers=1) | changes)
    config = dataclasses.replace(config, eos_token_ids=(tiny.IM_END, tiny.ENDOFTEXT))
    tokenizer = xj.Tokenizer(
        tiny.tokenizer(), chat_template=None, special_tokens={}, eos_token_ids=config.eos_token_ids
    )
    params = xj.init_params(config, jax.random.key(2), "float32")
    bundled = xj.load_model()
    return dataclasses.replace(
        bundled, params=params, config=config, tokenizer=tokenizer, generation_config={}, name="random"
    )


def allowed_in_choice(model: xj.Model, texts: Sequence[str], ids: Sequence[int]) -> np.ndarray:
    """bool [V]: the tokens that may come after these ids in one of the texts."""
    tokens, special = token_bytes(model.tokenizer, model.config.vocab_size)
    wanted = [text.encode() for text in texts]
    begun = b"".join(tokens[i] for i in ids)
    allowed = [bool(token) and any(w.startswith(begun + token) for w in wanted) for token in tokens]
    for i in (*special, *model.config.eos_token_ids):
        allowed[i] = i in model.config.eos_token_ids and begun in wanted
    return np.array(allowed)


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Schemas whose every string, number and array is bounded: enums, nesting, $ref, anyOf, patterns, bounds,
    Unicode.
    """
    draw = random.Random(seed)
    return [_object(draw, depth=2, with_refs=True) for _ in range(count)]


_NAMES = ("name", "age", "größe", "名前", "tags", "ok", "items", "a b", 'quote"d', "back\\slash", "😀")
_PATTERNS = (r"^[a-z]{1,5}$", r"^\d{2}-\d{2}$", r"^[A-F0-9]{4}$", r"^(ab|cd){1,3}$", r"^x?y{2}$")


def _object(draw: random.Random, depth: int, with_refs: bool = False) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 3))
    schema: dict[str, Any] = dict(
        type="object",
        properties={name: _value(draw, depth - 1, with_refs) for name in names},
        required=[name for name in names if draw.random() < 0.8],
        additionalProperties=False,
    )
    if with_refs:
        schema["$defs"] = {"point": _object(draw, 1)}
    return schema


def _value(draw: random.Random, depth: int, with_refs: bool) -> Any:
    least = draw.randint(-50, 50)
    kinds: list[Any] = [
        {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 8)},
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": draw.randint(2, 99)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "blau", "緑", 3, None, True]},
        {"const": draw.choice(["fixed", 7, "ü"])},
    ]
    if depth > 0:
        inner = _value(draw, depth - 1, with_refs)
        few = draw.randint(0, 1)
        kinds += [
            {"type": "array", "items": inner, "minItems": few, "maxItems": few + draw.randint(0, 2)},
            {"anyOf": [inner, {"type": "boolean"}, {"type": "null"}]},
            _object(draw, depth),
        ]
        if with_refs:
            kinds.append({"$ref": "#/$defs/point"})
    return draw.choice(kinds)


def regexes(count: int, seed: int = 0) -> list[str]:
    """Regular expressions of bounded length, each of a few parts."""
    draw = random.Random(seed)
    return ["".join(_part(draw, 2) for _ in range(draw.randint(1, 3))) for _ in range(count)]


def _part(draw: random.Random, depth: int) -> str:
    atoms = [
        "a", "b", "é", "日", "th", r"\d", r"\w", r"\s", "[a-f]", "[^a-y\\s]", "[0-9A-F]", r"[\d_-]", r"\.",
        r"\+", ".", r"\n", r"\x41", "[é-ü]", r"\D", r"[^\W\d]", r"\/", r"\u65e5",
    ]  # fmt: skip
    part = draw.choice(atoms)
    if depth and draw.random() < 0.4:
        parts = ["".join(_part(draw, depth - 1) for _ in range(draw.randint(1, 2))) for _ in range(2)]
        part = f"({draw.choice(('', '?:'))}{'|'.join(parts)})"
    return part + draw.choice(["", "", "", "?", "{2}", "{1,3}", "{0,2}"])
