"""How the programs of a call are run: `NOW`; or `Ahead`, on shapes alone, which compiles them together."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from ..stats import give_back_memory


class Do(Protocol):
    """Runs a jitted function; or tells what it would give."""

    def __call__(self, program: Any, *args: Any) -> Any:
        """What program(*args) gives."""

    def make(self, function: Callable[[], Any]) -> Any:
        """What a function of nothing gives."""

    def holds(self, x: Any) -> bool:
        """Whether an array of one bool is true."""


class Now:
    """Runs it."""

    def __call__(self, program: Any, *args: Any) -> Any:
        return program(*args)

    def make(self, function: Callable[[], Any]) -> Any:
        return function()

    def holds(self, x: Any) -> bool:
        return bool(x)


NOW = Now()


class Ahead:
    """Compiles it, in a pool of threads, and gives the shapes of what it would give. Tracing and lowering are
    done in the caller's thread, whose settings hold.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._seen: dict[Any, Any] = {}
        self._compiling: list[Future[None]] = []

    def __call__(self, program: Any, *args: Any) -> Any:
        key = program, kinds(args)
        if key not in self._seen:
            traced = program.trace(*jax.tree.map(struct, args))
            self._compiling.append(self._pool.submit(_compile, traced.lower()))
            self._seen[key] = jax.tree.map(struct, traced.out_info)
        return self._seen[key]

    def make(self, function: Callable[[], Any]) -> Any:
        return jax.eval_shape(function)

    def holds(self, x: Any) -> bool:
        return True

    @property
    def programs(self) -> int:
        """How many there are so far."""
        return len(self._compiling)

    @property
    def done(self) -> int:
        """How many of them are compiled."""
        return sum(future.done() for future in self._compiling)

    def end(self) -> None:
        """No more will come."""
        self._pool.shutdown(wait=False)

    def wait(self, programs: int | None = None) -> None:
        """Until the first so many are compiled, or all; what broke one off is raised."""
        for future in self._compiling[:programs]:
            future.result()


_MOST_PREPARED = 256  # kinds of calls
_prepared: dict[Any, tuple[Ahead, int]] = {}


def prepared(kind: Any, rehearse: Callable[[Ahead], int]) -> tuple[Ahead, int]:
    """Begins to compile what calls of a kind run, once for each kind: that of `rehearse`, which says how many
    programs come before the first token.
    """
    if kind not in _prepared:
        ahead = Ahead()
        first = rehearse(ahead)
        ahead.end()
        while len(_prepared) >= _MOST_PREPARED:
            _prepared.pop(next(iter(_prepared)), None)
        _prepared[kind] = ahead, first
    return _prepared[kind]


def _compile(lowered: Any) -> None:
    lowered.compile()  # jax keeps it; who holds a result would keep it beyond jax.clear_caches()
    give_back_memory()  # at once: weights may be read for seconds yet


def struct(x: Any) -> Any:
    """Shape and type of an array, and where it lies if it lies on several devices; what is none stays."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_division(x)) if hasattr(x, "dtype") else x


def kinds(tree: Any) -> tuple:
    """The structure of a pytree, and of each array what `struct` says."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(_kind, leaves)


def _kind(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return x
    return x.shape, x.dtype, _division(x)


def _division(x: Any) -> Any:
    """Where an array lies if it lies on several devices."""
    divided = isinstance(x, jax.Array) and not isinstance(x.sharding, SingleDeviceSharding)
    return x.sharding if divided else None
