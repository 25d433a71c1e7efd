"""Parses the lines of an input file: the request of each line, or the reason why it cannot be served."""

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from ..errors import InputError, format_value

DIGEST_BYTES = 16
_MAX_LINE_BYTES = 2**25
_GZIP = b"\x1f\x8b"  # the first bytes of every gzip file
_URLS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class Line(NamedTuple):
    """One line that is not blank."""

    number: int  # in the whole file, from 1
    digest: bytes  # the first 16 bytes of its sha256
    identity: int | str  # its custom_id, or its number
    api: bool = False  # it has the form of the OpenAI batch API
    kind: str = "plain"  # of its body, as in `parse_request_body`
    body: dict[str, Any] = {}
    error: str = ""  # why it cannot be served; "": no error was found yet


def sha256_int(data: bytes, size: int = 8) -> int:
    """Returns the first `size` bytes of the sha256, as an integer."""
    return int.from_bytes(sha256(data).digest()[:size], "little")


def identity_digest(identity: int | str) -> bytes:
    """Returns the first 16 bytes of the sha256 of a custom_id or a number."""
    return sha256(str(identity).encode()).digest()[:DIGEST_BYTES]


def json_default(value: Any) -> Any:
    """Converts a value for `json.dumps(default=)`: arrays to lists, their scalars to numbers, other objects
    to their repr.
    """
    return value.tolist() if isinstance(value, np.ndarray | np.generic | jax.Array) else repr(value)


@contextmanager
def open_input(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file for reading. `-` is standard input. A name that ends in .gz is decompressed. Raises
    InputError if it does not exist, or cannot be read to its end.
    """
    try:
        if str(path) == "-":
            yield sys.stdin.buffer
        else:
            with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
                yield file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a complete gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_lines(path: str | Path) -> Iterator[Line]:
    """Yields every line that is not blank. A custom_id that an earlier line has is an error of the line."""
    known = _DigestSet()
    number = 0
    with open_input(path) as file:
        while data := file.readline(_MAX_LINE_BYTES + 1):
            number = number + 1
            sha = sha256(data.rstrip(b"\r\n"))
            part = data
            while len(part) > _MAX_LINE_BYTES and not part.endswith(b"\n"):
                part = file.readline(_MAX_LINE_BYTES + 1)
                sha.update(part)
            if not data.strip():
                continue
            if number == 1 and data.startswith(_GZIP):
                raise InputError(
                    f"{path} is compressed by gzip: give a file whose name ends in .gz, or decompress it"
                )
            digest = sha.digest()[:DIGEST_BYTES]
            try:
                if part is not data:
                    raise InputError(f"the line has more than {_MAX_LINE_BYTES} bytes")
                line = _parse_line(number, digest, data)
            except (ValueError, RecursionError) as error:
                line = Line(number, digest, number, error=str(InputError(error)))
            if isinstance(line.identity, str) and known.add(identity_digest(line.identity)):
                line = line._replace(error=f"the custom_id {format_value(line.identity)} has come before")
            yield line


def _parse_line(number: int, digest: bytes, data: bytes) -> Line:
    value = json.loads(data.decode("utf-8-sig"), parse_constant=_reject_constant)
    if not isinstance(value, dict):
        raise InputError(f"a line must hold a JSON object, got {format_value(value)}")
    custom_id = value.pop("custom_id", None)
    identity = number if custom_id is None else custom_id
    if not isinstance(identity, int | str) or custom_id is not None and not isinstance(custom_id, str):
        raise InputError(f"custom_id must be a text, got {format_value(custom_id)}")
    str(identity).encode()  # raises ValueError for an unpaired surrogate
    line = Line(number, digest, identity, "url" in value or "body" in value, "plain", value)
    if not line.api:
        return line
    url = value.get("url")
    method = value.get("method", "POST")
    body = value.get("body")
    if custom_id is None:
        error = "a line with a url must have a custom_id"
    elif method != "POST" or not isinstance(url, str) or url not in _URLS:
        got = f"{format_value(method)}, {format_value(url)}"
        error = f"method and url must be POST and one of {', '.join(_URLS)}, got {got}"
    elif not isinstance(body, dict):
        error = f"body must be an object, got {format_value(body)}"
    else:
        return line._replace(kind=_URLS[url], body=body)
    return line._replace(error=error)


def _reject_constant(text: str) -> None:
    raise InputError(f"{text} is not a JSON number")


class _DigestSet:
    """A set of digests that takes 16 bytes for each, except for the newest."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, f"S{DIGEST_BYTES}")
        self._new = set[bytes]()

    def add(self, value: bytes) -> bool:
        """Adds a digest. Returns True if it was in the set before."""
        key = np.array(value, self._sorted.dtype)
        at = np.searchsorted(self._sorted, key)
        found = value in self._new or bool(at < len(self._sorted) and self._sorted[at] == key)
        self._new.add(value)
        if len(self._new) >= 2**15:
            new = np.sort(np.array([*self._new], self._sorted.dtype))
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, new), new)
            self._new = set()
        return found
