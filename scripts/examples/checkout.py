"""Imported first by the examples. It finds scripts/launcher.py, which finds the package in a checkout in
which it is not installed. A copy of an example elsewhere does not need it: call `main` directly.
"""

import sys
from pathlib import Path
from types import TracebackType

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from launcher import exit_with_error, start as start

from xinfer_jax.errors import InputError

_OF_TRAINING = ("optax", "orbax")  # packages of the extra `train`


def _name_the_extra(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in _OF_TRAINING:
        remedy = "run pip install '.[train]' in the checkout"
        exit_with_error(InputError(f"{error.name} is not installed: {remedy}"))
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _name_the_extra
