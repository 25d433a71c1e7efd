"""Paths that requests name: directories below the one of a flag, once links are resolved."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..api.fields import BodyError
from ..errors import format_value


def directory_below(
    root: str, flag: str, field: str, given: Any, files: Callable[[Path], Iterable[Path]]
) -> Path:
    """Returns a directory below the one of a flag, as are the files that will be read of it.

    Args:
        root: the directory of the flag.
        flag: its name, for errors.
        field: the field of the body that names the path.
        given: the value of that field.
        files: returns the files that will be read of a directory.

    Raises:
        BodyError: there is no such directory, or a link leads out of the root.
    """
    base = Path(root).resolve()
    try:
        path = (base / given).resolve()
        parts = path, *files(path)
        is_inside = path.is_dir() and all(part.resolve().is_relative_to(base) for part in parts)
    except (TypeError, ValueError, OSError, RuntimeError):  # no text, NUL, too long, a loop of links
        is_inside = False
    if not is_inside:
        raise BodyError(field, f"{field}={format_value(given)} is no directory below --{flag}")
    return path
