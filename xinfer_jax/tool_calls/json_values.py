"""JSON that others can read: values nested in bounds, without NaN and without halves of surrogate pairs."""

import json
from typing import Any

MAX_DEPTH = 100
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # that JSON does not escape


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError: no JSON, NaN, a number that is too large, or a
    value nested more than `MAX_DEPTH` deep.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    json_text(value)
    return value


def json_text(value: Any) -> str:
    """Returns the JSON of a value. Raises ValueError, as `parse_json`."""
    _check_depth(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, dict | list | tuple)]
        if not level:
            return
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("nested too deeply")


def type_names(value: Any) -> set[str]:
    """Returns the names that JSON Schema has for the type of a value."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if is_whole else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"object" if isinstance(value, dict) else "array"}


def json_line(value: Any) -> str:
    """Returns JSON on one line also for readers that split lines as `str.splitlines` does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
