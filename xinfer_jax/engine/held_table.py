"""`HeldTable`: the things that an engine holds by name, and that its requests name: adapters, logits
processors, vectors.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ..errors import InputError, format_names, format_value

Held = TypeVar("Held")
_MAX_NAME = 256  # characters


class HeldTable(Mapping[str, Held], Generic[Held]):
    """Held things of one kind, by name. A change gives the table another dict, so threads that read it find
    all or nothing of the change.

    Attributes:
        noun: the word for one of them in messages.
    """

    noun: str

    def __init__(self) -> None:
        self._held: Mapping[str, Held] = {}

    def __getitem__(self, name: str) -> Held:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @classmethod
    def check_given(cls, given: Any, contents: str) -> Mapping[str, Any]:
        """Returns the things that an engine is given, {} for None. Raises InputError if it is not a dict of
        names.
        """
        what = f"{cls.noun}s of an engine must be a dict of names and {contents}"
        return _checked_mapping({} if given is None else given, what, cls.check_name)

    @classmethod
    def check_name(cls, name: Any) -> None:
        """Raises InputError if nothing may have this name."""
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _MAX_NAME:
            raise InputError(f"the name of a {cls.noun} must be a short text, got {format_value(name)}")

    def find(self, name: Any) -> Held:
        """Returns the thing with this name. Raises InputError if there is none."""
        held = self._held
        if not isinstance(name, str) or name not in held:
            known = f"has {format_names(sorted(held), 8)}" if held else "has none"
            raise InputError(f"no {self.noun} is called {format_value(name)}: the engine {known}")
        return held[name]

    @property
    def in_words(self) -> str:
        """Names the things that the engine holds: the end of a sentence."""
        return f"holds {format_names(self, 8)}" if self else "holds none"

    def check_request(self, given: Any, values: str) -> Mapping[str, Any]:
        """Returns the values that a request gives by name. Raises InputError if a name is unknown."""
        what = f"{self.noun}s of a request must be {values} by name of the engine's"
        return _checked_mapping(given, what, self.find)

    def replace_all(self, held: Mapping[str, Held]) -> None:
        """Replaces all entries of the table."""
        self._held = held


def _checked_mapping(given: Any, what: str, check: Callable[[Any], object]) -> Mapping[str, Any]:
    """Returns a mapping whose names pass the check. Raises InputError, which says which form it must have."""
    if not isinstance(given, Mapping):
        raise InputError(f"{what}, got {format_value(given)}")
    for name in given:
        check(name)
    return given
