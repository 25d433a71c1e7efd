"""The order of arguments: parameters or a model, then the config, then data."""

import os
from typing import Any

from .errors import InputError, format_value


def check_order(call: str, first: Any) -> None:
    """Raises InputError if the first argument is a path, as in version 0.1.

    Args:
        call: the call in today's order.
        first: the first argument.
    """
    if isinstance(first, str | os.PathLike):
        raise InputError(
            f"{call} is the order of the arguments since version 0.2: got {format_value(first)} first"
        )
