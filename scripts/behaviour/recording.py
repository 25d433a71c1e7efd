"""Records of values, arrays and errors: in JSON, and equal wherever the code lies."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from behaviour.public_api import without_places

Records = dict[str, Any]
Calls = dict[str, Callable[[], Any]]

CACHE_DTYPES = ("float32", "bfloat16", "int8", "int4", "float8_e4m3fn", "gear")
CAPACITY = 48  # of caches that calls get: the smallest limit of a rope of type dynamic
_FOLDERS = re.compile(r"[^\s'\"]*/(?=(?:parity|wide|quantized)/|saved\b)")


def attempt(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the type and the text of the error with which it ends. Returns
    "begins" if it ends as `without_tracing` says.
    """
    try:
        return call()
    except Exception as error:
        text = _FOLDERS.sub("", without_places(str(error)))
        return "begins" if "no_tracing" in text else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """Inside, a call that would trace a program raises RuntimeError."""
    jax.config.update("jax_no_tracing", True)
    try:
        yield
    finally:
        jax.config.update("jax_no_tracing", False)


def array_type(x: Any) -> str:
    """Returns dtype and shape, for example float32[2,3]."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def shapes(tree: Any) -> dict[str, str]:
    """Returns the type of each array of a tree, by its path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): array_type(x) for path, x in leaves if hasattr(x, "dtype")}


def result_types(call: Callable[[], Any]) -> list[str]:
    """Returns the types of the arrays that a traced call returns, sorted. Nothing is compiled."""
    return sorted(array_type(x) for x in jax.tree.leaves(jax.eval_shape(call)))


def num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
