"""The choice of the executor that runs the calls of `generate`, and the compilation of its programs ahead of
time.
"""

from collections.abc import Callable
from typing import Any, Protocol

from ..registry import plugin
from ..weights.params import Params
from .loop import TracedExecutor


def executor_class(params: Params) -> Any:
    """Returns the executor that prefills prompts and decodes streams: one that is plugged in for the devices
    of the parameters, or `TracedExecutor`. The parameters may be shapes.
    """
    choice = plugin("executor", "choice")
    return choice and choice(params) or TracedExecutor


class NothingAhead:
    """Takes the place of a `Precompiler` if programs compile when they run."""

    def wait(self, programs: int | None = None) -> None:
        pass


class Compilation(Protocol):
    """Programs that threads compile."""

    def wait(self, programs: int | None = None) -> None:
        """Waits until the first programs, this number of them, are compiled. None: all. Raises the error of a
        program that failed.
        """


def compile_ahead(params: Any, signature: Any, dry_run: Callable[[Any], int]) -> tuple[Compilation, int]:
    """Begins to compile the programs of calls of a signature, in threads, once for each signature.

    Args:
        params: the parameters of the model.
        signature: a pytree. Calls with equal values and shapes run the same programs.
        dry_run: runs the call with an executor of the `run` that it gets, on shapes. It returns the number of
            programs that come before the first token.

    Returns:
        A `Precompiler`, whose `wait` waits for this number of first programs, and the result of `dry_run`.
    """
    precompile_once = plugin("compiler", "ahead")
    return (NothingAhead(), 0) if precompile_once is None else precompile_once(params, signature, dry_run)
