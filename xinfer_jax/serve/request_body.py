"""Receives and parses the body of a request.

Size and nesting are checked before parsing: `json.loads` of hostile text takes seconds and much memory, and
holds the GIL meanwhile.
"""

import json
from typing import Any

import numpy as np
from starlette.requests import Request as HTTPRequest

from ..errors import format_value
from .admission import Reservation
from .http_responses import APIError

SLOW_SECONDS = 30  # within which the head, and then the body, of a request must arrive
BYTES_PER_TOKEN = 64  # of the context, for each prompt of a body
MAX_LEVELS = 64  # of nested arrays and objects
_BYTES_PER_VALUE = 8  # of the largest body: 524,288 values in 4 MiB
_BYTES_PER_CONTAINER = 64  # arrays and objects take more memory than other values
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file
_QUOTE, _COMMA, _COLON, _LIST_NAME = (ord(c) for c in '",:\x01')
_ELEMENTS = (b'"', b"[", b"{", b"\x01")  # the first byte of a text, a list or an object
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


async def receive_body(request: HTTPRequest, reservation: Reservation, most: int) -> bytes:
    """Receives a JSON body of at most `most` bytes. When it is complete, reserves its bytes and an answer."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise APIError(415, "the body must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise APIError(415, f"content-encoding {format_value(encoding)}: send the body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise APIError(413, f"the body has {length[:20]} bytes: send at most {most}")
    data = bytearray()
    try:
        async with reservation.arrive(SLOW_SECONDS) as arrival:
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise APIError(413, f"the body has more than {most} bytes: send at most {most}")
                arrival.grow(len(part))
    except BaseException:
        data.clear()  # now: the error's traceback lives longer
        raise
    reservation.reserve(answers=1, bytes=len(data))
    if data.startswith(_GZIP):
        raise APIError(415, "the body is compressed by gzip: send it uncompressed")
    return bytes(data)


def load_json_body(
    data: bytes, max_length: int, most: int, list_name: str | None = "prompt"
) -> dict[str, Any]:
    """Returns the JSON object of a body, unless it is too large.

    Args:
        data: the body, of at most `most` bytes.
        max_length: the tokens of a prompt and its answer together.
        most: the most bytes of any body.
        list_name: the field that may have several prompts. Each prompt allows `BYTES_PER_TOKEN` bytes for
            each token of `max_length`. None: the body has one prompt.
    """
    levels, values, containers, prompts = scan_json(data, list_name)
    if levels > MAX_LEVELS:
        raise APIError(400, f"the body is nested {levels} levels deep: send at most {MAX_LEVELS}")
    for count, what, per_body in (
        (values, "values", most // _BYTES_PER_VALUE),
        (containers, "arrays and objects", most // _BYTES_PER_CONTAINER),
    ):
        if count > per_body:
            raise APIError(413, f"the body has {count} {what}: send at most {per_body}")
    _check_size(len(data), max_length, prompts)
    try:
        body = json.loads(data.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not readable JSON: {error}") from error
    if not isinstance(body, dict):
        raise APIError(400, "the body must be a JSON object")
    # Again: the scan does not find a field whose name is spelled with escapes.
    prompt = body.get(list_name) if list_name else None
    is_list = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list | dict)
    _check_size(len(data), max_length, len(prompt or ()) if is_list else 1)
    return body


def _check_size(size: int, max_length: int, prompts: int) -> None:
    if size > (allowed := BYTES_PER_TOKEN * max_length * max(1, prompts)):
        what = f"{prompts} prompts" if prompts > 1 else "one prompt"
        raise APIError(
            413,
            f"the body has {size} bytes: send at most {allowed}, {BYTES_PER_TOKEN} for each of the"
            f" {max_length} tokens of {what}",
        )


def scan_json(data: bytes, list_name: str | None = "prompt") -> tuple[int, int, int, int]:
    """Measures JSON text without parsing it.

    Returns:
        Four values: the levels of nesting, an upper bound of its values, its arrays and objects, and the
        elements of the list in the field `list_name` of the outermost object. These count only if they are
        texts, lists or objects (token ids are one prompt).
    """
    # Removes what a backslash escapes. The name of the list becomes one byte that JSON text cannot have.
    plain = bytes(data).replace(b"\\\\", b"_").replace(b'\\"', b"_").translate(None, b"\x01")
    if list_name:
        plain = plain.replace(b'"%s"' % list_name.encode(), b"\x01")
    plain = plain.translate(None, b" \t\r\n") + b" "  # so that every byte has a next one
    byte_N = np.frombuffer(plain, np.uint8)
    outside_N = ~np.bitwise_xor.accumulate(byte_N == _QUOTE)  # of strings
    steps_N = _STEPS[byte_N] * outside_N
    depth_N = np.cumsum(steps_N, dtype=np.int32)
    comma_N = (byte_N == _COMMA) & outside_N
    containers = int((steps_N > 0).sum())
    prompts = 0
    names = np.flatnonzero((byte_N == _LIST_NAME) & outside_N & (depth_N == 1))
    names = names[byte_N[names + 1] == _COLON]
    if len(names) > 1:
        raise APIError(400, f"the body has the field {list_name} more than once: send it once")
    if len(names):
        begin = int(names[0]) + 3
        if plain[begin - 1 : begin] == b"[" and plain[begin : begin + 1] in _ELEMENTS:
            end = begin + (int(np.argmax(depth_N[begin:] < 2)) or len(plain))  # of the list
            prompts = 1 + int((comma_N[begin:end] & (depth_N[begin:end] == 2)).sum())
    return int(depth_N.max()), int(comma_N.sum()) + containers + 1, containers, prompts


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
