"""Lines of input: what each asks for, or why it cannot be served."""

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

from ..errors import InputError, shown

DIGEST = 16  # bytes
_LONGEST = 2**25  # bytes of a line
_GZIP = b"\x1f\x8b"  # what every such file begins with
_URLS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class Line(NamedTuple):
    """One line that is not blank.

    Attributes:
        number: in the whole file, from 1.
        digest: the first 16 bytes of its sha256.
        identity: its custom_id, or its number.
        api: it has the form of the OpenAI batch API.
        kind: of its body, as `read_body` takes it.
        body: what is asked for.
        error: why it cannot be served; "": it may.
    """

    number: int
    digest: bytes
    identity: int | str
    api: bool = False
    kind: str = "plain"
    body: dict[str, Any] = {}  # noqa: RUF012  never written to
    error: str = ""


def hash_of(data: bytes, size: int = 8) -> int:
    """The first bytes of its sha256."""
    return int.from_bytes(sha256(data).digest()[:size], "little")


def digest_of(identity: int | str) -> bytes:
    """The first 16 bytes of the sha256 of a custom_id or a number."""
    return sha256(str(identity).encode()).digest()[:DIGEST]


def plain(value: Any) -> Any:
    """What JSON lacks: arrays and their numbers as lists and numbers."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | jax.Array) else repr(value)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A file to read, `-`: standard input; one that ends in .gz is unpacked.

    Raises:
        InputError: there is none, or it cannot be read to its end.
    """
    try:
        if str(path) == "-":
            yield sys.stdin.buffer
        else:
            with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
                yield file  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is no whole gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def read_lines(path: str | Path) -> Iterator[Line]:
    """Every line; of two with one custom_id the second is an error.

    Raises:
        InputError: as `opened`; the file is packed, and its name does not say so.
    """
    known = _Digests()
    number = 0
    with opened(path) as file:
        while data := file.readline(_LONGEST + 1):
            number = number + 1
            sha = sha256(data.rstrip(b"\r\n"))
            part = data
            while len(part) > _LONGEST and not part.endswith(b"\n"):
                part = file.readline(_LONGEST + 1)
                sha.update(part)
            if not data.strip():
                continue
            if number == 1 and data.startswith(_GZIP):
                raise InputError(
                    f"{path} is packed by gzip: give a file whose name ends in .gz, or unpack it"
                )
            digest = sha.digest()[:DIGEST]
            try:
                if part is not data:
                    raise InputError(f"the line has more than {_LONGEST} bytes")
                line = _parsed(number, digest, data)
            except (ValueError, RecursionError) as error:
                line = Line(number, digest, number, error=str(InputError(error)))
            if isinstance(line.identity, str) and known.add(digest_of(line.identity)):
                line = line._replace(error=f"the custom_id {shown(line.identity)} has come before")
            yield line


def _parsed(number: int, digest: bytes, data: bytes) -> Line:
    value = json.loads(data.decode("utf-8-sig"), parse_constant=_no_number)
    if not isinstance(value, dict):
        raise InputError(f"a line must hold a JSON object, got {shown(value)}")
    given = value.pop("custom_id", None)
    identity = number if given is None else given
    if not isinstance(identity, int | str) or given is not None and not isinstance(given, str):
        raise InputError(f"custom_id must be a text, got {shown(given)}")
    str(identity).encode()  # half a surrogate pair has no bytes
    line = Line(number, digest, identity, "url" in value or "body" in value, "plain", value)
    if not line.api:
        return line
    url = value.get("url")
    method = value.get("method", "POST")
    body = value.get("body")
    if given is None:
        error = "a line with a url must have a custom_id"
    elif method != "POST" or not isinstance(url, str) or url not in _URLS:
        error = (
            f"method and url must be POST and one of {', '.join(_URLS)}, got {shown(method)}, {shown(url)}"
        )
    elif not isinstance(body, dict):
        error = f"body must be an object, got {shown(body)}"
    else:
        return line._replace(kind=_URLS[url], body=body)
    return line._replace(error=error)


def _no_number(text: str) -> None:
    raise InputError(f"{text} is no JSON number")


class _Digests:
    """A set of digests in 16 bytes each, but for the last added."""

    def __init__(self) -> None:
        self._old = np.zeros(0, f"S{DIGEST}")
        self._new = set[bytes]()

    def add(self, value: bytes) -> bool:
        """Whether it was there."""
        key = np.array(value, self._old.dtype)
        at = np.searchsorted(self._old, key)
        found = value in self._new or bool(at < len(self._old) and self._old[at] == key)
        self._new.add(value)
        if len(self._new) >= 2**15:
            new = np.sort(np.array([*self._new], self._old.dtype))
            self._old = np.insert(self._old, np.searchsorted(self._old, new), new)
            self._new = set()
        return found
