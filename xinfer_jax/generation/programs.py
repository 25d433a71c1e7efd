"""How the programs of a call are run: `NOW`; or `Ahead`, on shapes alone, which compiles them together."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
from jax.sharding import SingleDeviceSharding

from ..host import cores
from ..sharding import lies_over
from ..stats import give_back_memory


class Do(Protocol):
    """Runs a jitted function; or tells what it would give."""

    def __call__(self, program: Any, *args: Any) -> Any:
        """What program(*args) gives."""

    def make(self, function: Callable[[], Any], device: jax.Device | None = None) -> Any:
        """What a function of nothing gives; device: where it is put, and stays."""

    def holds(self, x: Any) -> bool:
        """Whether an array of one bool is true."""


class Now:
    """Runs it."""

    def __call__(self, program: Any, *args: Any) -> Any:
        return program(*args)

    def make(self, function: Callable[[], Any], device: jax.Device | None = None) -> Any:
        if device is None:
            return function()
        with jax.default_device(device):  # another might have no room for it
            return jax.device_put(function(), device)

    def holds(self, x: Any) -> bool:
        return bool(x)


NOW = Now()


class Ahead:
    """Compiles it, in a pool of threads, and gives the shapes of what it would give. Tracing and lowering are
    done in the caller's thread, whose settings hold.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(cores())
        self._seen: dict[Any, Any] = {}
        self._compiling: list[Future[None]] = []

    def __call__(self, program: Any, *args: Any) -> Any:
        key = program, kinds(args)
        if key not in self._seen:
            traced = program.trace(*jax.tree.map(struct, args))
            self._compiling.append(self._pool.submit(_compile, traced.lower()))
            places = (_place(x) for x in jax.tree.leaves(args))
            one = next((place for place in places if isinstance(place, SingleDeviceSharding)), None)
            self._seen[key] = _put(traced.out_info, one)  # there all else comes to, and stays
        return self._seen[key]

    def make(self, function: Callable[[], Any], device: jax.Device | None = None) -> Any:
        return _put(jax.eval_shape(function), device and SingleDeviceSharding(device))

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

    @property
    def broken(self) -> bool:
        """Whether any of them failed, or was not begun and will not be."""
        ended = (future for future in self._compiling if future.done())
        return any(future.cancelled() or future.exception() for future in ended)

    def end(self) -> None:
        """No more will come."""
        self._pool.shutdown(wait=False)
        self._seen.clear()

    def stop(self, wait: bool) -> None:
        """Drops what has not begun; waits for what is under way, so that jax's cache gets it whole."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def wait(self, programs: int | None = None) -> None:
        """Until the first so many are compiled, or all; what broke one off is raised."""
        try:
            for future in self._compiling[:programs]:
                future.result()
        except BaseException:  # Ctrl-C too: nobody waits for the rest any more
            self.stop(wait=False)
            raise


_MOST_PREPARED = 256  # kinds of calls
_prepared: dict[Any, tuple[Ahead, int]] = {}


def prepared(params: Any, kind: Any, rehearse: Callable[[Ahead], int]) -> tuple[Ahead, int]:
    """Begins to compile what calls of a kind run, once for each kind: that of `rehearse`, which says how many
    programs come before the first token. Nothing where a caller has put the parameters in their place: only
    running tells where what is made of them will lie.
    """
    placed = (leaf.committed for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    if any(placed) or lies_over(params):
        return Ahead(), 0
    if kind not in _prepared or _prepared[kind][0].broken:
        ahead = Ahead()
        first = rehearse(ahead)
        ahead.end()
        while len(_prepared) >= _MOST_PREPARED:
            _prepared.pop(next(iter(_prepared)), None)
        _prepared[kind] = ahead, first
    return _prepared[kind]


def settle() -> None:
    """Before the process ends: no compilation is left half done."""
    for ahead, _ in list(_prepared.values()):
        ahead.stop(wait=True)


def _compile(lowered: Any) -> None:
    lowered.compile()  # jax keeps it; who holds a result would keep it beyond jax.clear_caches()
    give_back_memory()  # at once: weights may be read for seconds yet


def struct(x: Any) -> Any:
    """Shape and type of an array, and where it lies if it was put there; what is none stays."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_place(x)) if hasattr(x, "dtype") else x


def kinds(tree: Any) -> tuple:
    """The structure of a pytree, and of each array what `struct` says."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(_kind, leaves)


def _kind(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return x
    return x.shape, x.dtype, _place(x)


def _place(x: Any) -> Any:
    """Where an array, or what stands for it, was put; None: wherever it is wanted."""
    return getattr(x, "sharding", None) if getattr(x, "committed", True) else None


def _put(tree: Any, place: Any) -> Any:
    """Shapes of arrays that are put into a place."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
