"""The choice of the executor that runs the calls of `generate`, and the compilation of its programs ahead of
time.
"""

from collections.abc import Callable
from typing import Any, Protocol

from ..registry import plugin
from ..weights.params import Params
from .loop import TracedExecutor


def executor_class(params: Params) -> Any:
    """The executor that prefills prompts and decodes streams: one that is plugged in for the devices of the
    parameters, or `TracedExecutor`. The parameters may be shapes.
    """
    choice = plugin("executor", "choice")
    return choice and choice(params) or TracedExecutor


class NothingAhead:
    """Stands for a `Precompiler` where programs compile when they run."""

    def wait(self, programs: int | None = None) -> None:
        pass


class Compilation(Protocol):
    """Programs that threads compile."""

    def wait(self, programs: int | None = None) -> None:
        """Waits until the first so many programs are compiled. None: all. Raises what made one fail."""


def compile_ahead(params: Any, signature: Any, dry_run: Callable[[Any], int]) -> tuple[Compilation, int]:
    """Begins to compile what calls of a signature run, in threads, once for each signature.

    Args:
        params: of the model.
        signature: a pytree; calls with equal values and shapes run the same programs.
        dry_run: runs the call with an executor of the `run` that it gets, on shapes; returns how many
            programs come before the first token.

    Returns:
        A `Precompiler`, whose `wait` waits for the first so many programs; and what `dry_run` returned.
    """
    precompile_once = plugin("compiler", "ahead")
    return (NothingAhead(), 0) if precompile_once is None else precompile_once(params, signature, dry_run)
