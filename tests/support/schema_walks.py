"""Random answers that a grammar of a JSON Schema allows, byte by byte, and whether they are valid."""

import decimal
import json
import random
from collections.abc import Iterator
from typing import Any

import grammar_inputs
import jsonschema
import llguidance
import numpy as np

import xinfer_jax as xj
from xinfer_jax.errors import InputError

_END = 256
_MOST_BYTES = 600
_CLOSERS = b'"}]0'  # what ends an answer soon
_DECIMALS = decimal.Context(prec=2000, traps=[])


class _Bytes:
    tokens = [bytes([i]) for i in range(256)] + [b"<|end of text|>"]
    eos_token_id = _END
    bos_token_id = None
    special_token_ids = [_END]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_matcher(source: str) -> Any:
    """An `LLMatcher` of a JSON Schema, as JSON, whose tokens are the bytes and the end."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), _END + 1)
    grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {source}'
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0)


def walk_schemas(count: int, walks: int, seed: int = 0) -> dict[str, int]:
    """Draws schemas and answers to each, and validates those that end: how many schemas were served, and how
    many answers ended. Fails at an answer that is not valid for its schema.
    """
    served = 0
    ended = 0
    for i, schema in enumerate(grammar_inputs.schemas(count, seed, hard=True)):
        try:
            source = xj.grammar.json_schema(schema).source
        except InputError:
            continue
        matcher = byte_matcher(source)
        served += not matcher.is_error()
        rng = random.Random(f"{seed} {i}")
        parts = [*_parts(schema)]
        for _ in range(0 if matcher.is_error() else walks):
            text = walk(matcher.deep_copy(), parts, rng)
            if text is not None:
                ended += 1
                check_answer(schema, text, json.loads(source).get("additionalProperties") is False)
    return dict(schemas=count, served=served, ended=ended)


def walk(matcher: Any, parts: list[bytes], rng: random.Random) -> str | None:
    """A text that the grammar allows, with these parts where they may stand. None: it did not end."""
    text = bytearray()
    mask = np.zeros(9, np.uint32)
    while True:
        part = rng.choice(parts)
        if rng.random() < 0.3 and (length := matcher.validate_tokens([*part])):
            chosen = part[:length]
        else:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: _END + 1])
            token = _choose(allowed.tolist(), len(text), rng)
            if token == _END:
                return text.decode() if matcher.is_accepting() else None
            chosen = bytes([token])
        for byte in chosen:
            assert matcher.consume_token(byte)
        text += chosen
        if len(text) > 2 * _MOST_BYTES:
            return None


def _choose(allowed: list[int], length: int, rng: random.Random) -> int:
    """Each kind of byte as likely as the others. What ends the answer, where it is long."""
    if _END in allowed and (length > _MOST_BYTES or rng.random() < 0.4):
        return _END
    if length > _MOST_BYTES and (closers := [byte for byte in allowed if byte in _CLOSERS]):
        return closers[0]
    kinds: dict[Any, list[int]] = {}
    for byte in allowed:
        kind = "high" if byte > 0x7F else chr(byte)
        kinds.setdefault("0" if kind.isdigit() else "a" if kind.isalpha() else kind, []).append(byte)
    return rng.choice(kinds[rng.choice([*kinds])])


def _parts(value: Any) -> Iterator[bytes]:
    """Yields the parts that answers to a schema may have: its texts, keys with escapes, numbers about its
    bounds.
    """
    yield from (rb"\"", b"\\\\", rb"\u0022", rb"\u005c", b"-0", b"1e5", b".000", b"999999999", b'","', b'{"')
    found = [value]
    for one in found:  # grows
        if isinstance(one, dict):
            found += [*one, *one.values()]
        elif isinstance(one, list):
            found += one
        elif isinstance(one, str):
            yield json.dumps(one, ensure_ascii=False).encode()
            escaped = "".join(rf"\u{ord(letter):04x}" for letter in one[:2])
            yield f'"{escaped}{one[2:]}":'.encode("utf-8", "ignore")
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield from (str(number).encode() for number in (one, int(one), one - 1, one + 1, one / 2))
            yield f"{one}{'' if '.' in str(one) else '.0'}0000000000000001".encode()


def check_answer(schema: Any, text: str, is_closed: bool) -> None:
    """Fails where an answer is not valid, with Python's numbers and with decimals, which divide exactly; or
    where a key repeats in the outermost object, which is closed.
    """
    objects: list[list[tuple[str, Any]]] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        objects.append(found)
        return dict(found)

    written = json.dumps(schema)
    of_floats = json.loads(written, object_hook=_without_multiples)
    jsonschema.Draft202012Validator(of_floats).validate(json.loads(text, object_pairs_hook=pairs))
    with decimal.localcontext(_DECIMALS):
        of_decimals = json.loads(written, parse_float=decimal.Decimal)
        answer = json.loads(text, parse_float=decimal.Decimal)
        jsonschema.Draft202012Validator(of_decimals).validate(answer)
    if is_closed and objects:
        assert len(dict(objects[-1])) == len(objects[-1]), f"a key repeats: {text!r}, {schema}"


def _without_multiples(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in schema.items() if key != "multipleOf"}
