"""`Precompiler`: compiles jitted functions in parallel, in a dry run on shapes."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ..config.model_config import is_config
from ..device import cpu_count
from ..sharding import concrete_mesh_of
from ..stats import release_free_memory


class CompilerStoppedError(Exception):
    """A precompiler was stopped, or the process ends: no more programs are compiled ahead."""


class Precompiler:
    """Compiles jitted functions in a pool of threads, and returns the shapes of their results. Tracing and
    lowering run in the caller's thread, with its jax settings. Several threads may call it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(cpu_count())
        self._seen: dict[Any, tuple[Future[None], Any]] = {}
        self._compiling: list[Future[None]] = []
        self._lock = threading.Lock()
        self._dry_run_lock = threading.Lock()
        self._used: list[Future[None]] = []  # by the dry run of `compile_all`

    def __call__(self, program: Any, *args: Any) -> Any:
        return self._begin(program, args)[1]

    def wait_for(self, program: Any, *args: Any) -> None:
        """Waits until the program that these arguments need is compiled, or has failed to compile. Begins to
        compile it if nobody has.
        """
        with contextlib.suppress(Exception):
            self._begin(program, args)[0].result()

    def is_compiled(self, program: Any, *args: Any) -> bool:
        """Returns True if the program that these arguments need is compiled, and compiling did not fail."""
        seen = self._seen.get((program, call_signature(args)))
        return seen is not None and seen[0].done() and not _has_failed(seen[0])

    def compile_all(self, dry_run: Callable[[], Any]) -> None:
        """Compiles the programs that a dry run needs, and waits for them. Raises the error of a program that
        failed, once the others are compiled.
        """
        with self._dry_run_lock:
            self._used = []
            dry_run()
            used = self._used
        if failed := [future for future in used if _has_failed(future)]:
            failed[0].result()

    def _begin(self, program: Any, args: tuple) -> tuple[Future[None], Any]:
        key = program, call_signature(args)
        with self._lock:
            if key not in self._seen:
                traced = program.trace(*jax.tree.map(shape_struct, args))
                future = self._submit(traced.lower())
                self._compiling.append(future)
                shardings = (_committed_sharding(x) for x in jax.tree.leaves(args))
                device = next((s for s in shardings if isinstance(s, SingleDeviceSharding)), None)
                # One committed argument commits the results.
                self._seen[key] = future, with_sharding(traced.out_info, device)
            self._used.append(self._seen[key][0])
            return self._seen[key]

    def _submit(self, lowered: Any) -> Future[None]:
        try:
            return self._pool.submit(_compile, lowered)
        except RuntimeError as error:  # of a pool that was shut down
            raise CompilerStoppedError from error

    @property
    def num_programs(self) -> int:
        return len(self._compiling)

    @property
    def num_compiled(self) -> int:
        return sum(future.done() for future in self._compiling)

    @property
    def failed(self) -> bool:
        return any(_has_failed(future) for future in self._compiling if future.done())

    def close(self) -> None:
        """Ends the pool once all programs are compiled."""
        self._pool.shutdown(wait=False)
        self._seen.clear()

    def stop(self, wait: bool) -> None:
        """Cancels compilations that have not begun. wait: True: wait for the ones that run, so that jax's
        cache gets them whole.
        """
        self._pool.shutdown(wait=wait, cancel_futures=True)

    def wait(self, programs: int | None = None) -> None:
        """Waits until the first programs, this number of them, are compiled, or all. Raises the error of a
        program that failed.
        """
        try:
            for future in self._compiling[:programs]:
                future.result()
        except BaseException:  # Ctrl-C too: nothing waits for the others now
            self.stop(wait=False)
            raise


def _has_failed(future: Future[None]) -> bool:
    """Returns True if compiling failed or was cancelled. Waits for its end."""
    try:
        return future.exception() is not None
    except CancelledError:
        return True


_MAX_SIGNATURES = 256
_precompiled: dict[Any, tuple[Precompiler, int]] = {}


def precompile_once(
    params: Any, signature: Any, dry_run: Callable[[Precompiler], int]
) -> tuple[Precompiler, int]:
    """Runs `executor_choice.compile_ahead`. Nothing is compiled for committed parameters: output shardings
    are known only by running.
    """
    signature = call_signature(signature)
    committed = (leaf.committed for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
    if any(committed) or concrete_mesh_of(params):
        return Precompiler(), 0
    if signature not in _precompiled or _precompiled[signature][0].failed:
        precompiler = Precompiler()
        first = dry_run(precompiler)
        precompiler.close()
        while len(_precompiled) >= _MAX_SIGNATURES:
            _precompiled.pop(next(iter(_precompiled)), None)
        _precompiled[signature] = precompiler, first
    return _precompiled[signature]


def stop_compiling() -> None:
    """Cancels and waits for all compilations, before the process ends."""
    for precompiler, _ in list(_precompiled.values()):
        precompiler.stop(wait=True)


def _compile(lowered: Any) -> None:
    lowered.compile()  # jax caches it; a result kept here would survive jax.clear_caches()
    release_free_memory()  # now: loading the weights may take seconds more


def shape_struct(x: Any) -> Any:
    """Returns the shape and dtype of an array, and its sharding if it is committed. Other values stay as they
    are.
    """
    if not hasattr(x, "dtype"):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_committed_sharding(x))


def call_signature(tree: Any) -> tuple:
    """Returns the structure of a pytree, and the result of `shape_struct` for each leaf. Configs are compared
    by `==`, so configs that differ only in EOS ids share their programs.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_config)
    return structure, *(
        (x.shape, x.dtype, _committed_sharding(x)) if hasattr(x, "dtype") else x for x in leaves
    )


def _committed_sharding(x: Any) -> Any:
    """Returns the sharding of a committed array, or of a shape, or None if it is not committed."""
    return getattr(x, "sharding", None) if getattr(x, "committed", True) else None


def with_sharding(tree: Any, sharding: Any) -> Any:
    """Returns the shapes of the arrays of a tree, with this sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
