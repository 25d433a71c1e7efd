"""What an error says: one line, 300 characters at most, nothing that a terminal obeys."""

import pytest

from xinfer_jax import InputError
from xinfer_jax.errors import few


@pytest.mark.parametrize(
    "given, said",
    [
        ("one line", "one line"),
        ("two\n   lines", "two lines"),
        ("bell \x07, escape \x1b[31m, tab\t", r"bell \x07, escape \x1b[31m, tab"),
        ("right-to-left \u202e, lone \ud800", r"right-to-left \u202e, lone \ud800"),
        ("Brasília 東京 🙂", "Brasília 東京 🙂"),
    ],
)
def test_one_line(given, said):
    assert str(InputError(given)) == said


def test_a_long_one_keeps_its_remedy():
    said = str(InputError(f"prompt {'x' * 10_000!r} is bad: leave it out"))
    assert len(said) <= 300 and said.startswith("prompt 'xxx") and said.endswith("x' is bad: leave it out")


def test_many_names():
    assert few(["a", "b"]) == "a, b"
    assert few(f"t{i}" for i in range(1000)) == "t0, t1, t2 and 997 more"
