"""Messages of errors: one line, at most 300 characters, no control characters."""

import pytest

from xinfer_jax import InputError
from xinfer_jax.errors import format_names

pytestmark = [pytest.mark.unit, pytest.mark.oldest]


@pytest.mark.parametrize(
    "message, printed",
    [
        ("one line", "one line"),
        ("two\n   lines", "two lines"),
        ("bell \x07, escape \x1b[31m, tab\t", r"bell \x07, escape \x1b[31m, tab"),
        ("right-to-left \u202e, lone \ud800", r"right-to-left \u202e, lone \ud800"),
        ("Brasília 東京 🙂", "Brasília 東京 🙂"),
    ],
)
def test_an_error_is_one_line(message, printed):
    assert str(InputError(message)) == printed


def test_a_long_error_keeps_its_remedy():
    message = str(InputError(f"prompt {'x' * 10_000!r} is bad: leave it out"))
    assert (
        len(message) <= 300
        and message.startswith("prompt 'xxx")
        and message.endswith("x' is bad: leave it out")
    )


def test_many_names_are_counted():
    assert format_names(["a", "b"]) == "a, b"
    assert format_names(f"t{i}" for i in range(1000)) == "t0, t1, t2 and 997 more"
