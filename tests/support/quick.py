"""Parameters of tests, of which some belong to the quick set."""

from collections.abc import Collection, Iterable

import pytest


def full_except(quick: Collection, values: Iterable) -> list:
    """Returns the values as parameters of a test; all but the quick ones are marked `full`.

    A tuple stands for several parameters.
    """
    parameters = []
    for value in values:
        marks = () if value in quick else pytest.mark.full
        several = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*several, marks=marks))
    return parameters
