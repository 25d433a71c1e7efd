"""Parameters of tests, of which some belong to the quick set, and some run with `--soak` alone."""

from collections.abc import Collection, Iterable

import pytest


def full_except(quick: Collection, values: Iterable, soak: Collection = ()) -> list:
    """Returns the values as parameters of a test. All but the quick ones are marked `full`, and those of
    `soak` are marked so.

    A tuple stands for several parameters.
    """
    parameters = []
    for value in values:
        marks = pytest.mark.soak if value in soak else () if value in quick else pytest.mark.full
        several = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*several, marks=marks))
    return parameters
