"""A body's size and nesting, known before it is parsed: `json.loads` of hostile text takes seconds and much
memory, and holds the interpreter's lock meanwhile.
"""

import json
from typing import Any

import numpy as np

from .admission import Refused

BYTES_PER_TOKEN = 64  # of context, for each prompt of a body
MOST_LEVELS = 64  # arrays and objects within each other
_BYTES_PER_VALUE = 8  # of the largest body: 524,288 values in 4 MiB
_BYTES_PER_CONTAINER = 64  # arrays and objects take more memory than other values
_SLICE = 2**18
_QUOTE, _COMMA, _COLON, _LIST_NAME = (ord(c) for c in '",:\x01')
_TEXT_OR_LIST = (b'"', b"[", b"\x01")  # the beginning of one
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def parse_body(data: bytes, room: int, most: int, list_name: str | None = "prompt") -> dict[str, Any]:
    """The JSON object of a body that is small enough.

    Args:
        data: as it came, of at most `most` bytes.
        room: tokens of a prompt and its answer together.
        most: bytes of any body.
        list_name: the field of the prompts; each allows `BYTES_PER_TOKEN` bytes for each token of `room`.
            None: there is one prompt.

    Raises:
        Refused: 413 for too many bytes or values; 400 for too many levels, and for what is no JSON object.
    """
    levels, values, containers, prompts = measure(data, list_name)
    if levels > MOST_LEVELS:
        raise Refused(400, f"the body is nested {levels} levels deep: send at most {MOST_LEVELS}")
    for count, what, per_body in (
        (values, "values", most // _BYTES_PER_VALUE),
        (containers, "arrays and objects", most // _BYTES_PER_CONTAINER),
    ):
        if count > per_body:
            raise Refused(413, f"the body has {count} {what}: send at most {per_body}")
    _check_size(len(data), room, prompts)
    try:
        body = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not readable JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    several = body.get(list_name) if list_name else None  # its name may have been spelled with escapes
    is_list = isinstance(several, list) and bool(several) and isinstance(several[0], str | list)
    _check_size(len(data), room, len(several or ()) if is_list else 1)
    return body


def _check_size(size: int, room: int, prompts: int) -> None:
    if size > (allowed := BYTES_PER_TOKEN * room * max(1, prompts)):
        counted = f"{prompts} prompts" if prompts > 1 else "one prompt"
        raise Refused(
            413,
            f"the body has {size} bytes: send at most {allowed}, {BYTES_PER_TOKEN} for each of the"
            f" {room} tokens of {counted}",
        )


def measure(data: bytes, list_name: str | None = "prompt") -> tuple[int, int, int, int]:
    """Of JSON text, without parsing it: the levels of nesting, at least as many values as it has, its arrays
    and objects, and the elements of the list that the field `list_name` of the outermost object holds, where
    they are texts or lists (ids are one prompt).
    """
    # A backslash escapes what follows it; the name of the list becomes one byte that JSON text cannot have.
    plain = bytes(data).replace(b"\\\\", b"_").replace(b'\\"', b"_").translate(None, b"\x01")
    if list_name:
        plain = plain.replace(b'"%s"' % list_name.encode(), b"\x01")
    plain = plain.translate(None, b" \t\r\n") + b" "  # something follows each byte
    whole_N = np.frombuffer(plain, np.uint8)
    depth = levels = commas = containers = prompts = begin = times = 0
    inside = counting = False
    for at in range(0, len(plain), _SLICE):
        part_N = np.frombuffer(plain, np.uint8, min(_SLICE, len(plain) - at), at)
        inside_N = np.bitwise_xor.accumulate(part_N == _QUOTE) ^ inside
        steps_N = _STEPS[part_N] * ~inside_N
        depth_N = np.cumsum(steps_N, dtype=np.int32) + depth
        comma_N = (part_N == _COMMA) & ~inside_N
        levels = max(levels, int(depth_N.max()))
        commas += int(comma_N.sum())
        containers += int((steps_N > 0).sum())
        # The field of the list on the outermost level.
        named_N = np.flatnonzero((part_N == _LIST_NAME) & ~inside_N & (depth_N == 1)) + at
        named_N = named_N[whole_N[named_N + 1] == _COLON]
        times += len(named_N)
        if times > 1:
            raise Refused(400, f"the body has the field {list_name} more than once: send it once")
        if len(named_N):
            begin = int(named_N[0]) + 3
            counting = plain[begin - 1 : begin] == b"[" and plain[begin : begin + 1] in _TEXT_OR_LIST
            prompts = int(counting)
        if counting:  # up to where the outermost level goes on
            first = max(0, begin - at)
            outside_N = np.flatnonzero(depth_N[first:] < 2)
            stop = first + int(outside_N[0]) if outside_N.size else None
            prompts += int((comma_N[first:stop] & (depth_N[first:stop] == 2)).sum())
            counting = not outside_N.size
        depth = int(depth_N[-1])
        inside = bool(inside_N[-1])
    return levels, commas + containers + 1, containers, prompts


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
