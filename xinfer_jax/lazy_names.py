"""Names of a package that are imported when they are first used, so that commands reject flags before they
import jax. The list of names is the package's `__init__.pyi`, which type checkers and editors read too.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its name.
        file: its `__init__.py`, next to which the `__init__.pyi` lies. Each name stands there once, in a
            statement like `from .grammars import Grammar as Grammar`.
    """
    places: dict[str, tuple[str, str]] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            module = "." * node.level + (node.module or "")
            places |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}

    def find(name: str) -> object:
        if name in places:
            module, attribute = places[name]
            if module == ".":  # a package or a module
                value = import_module(f".{attribute}", package)
            else:
                value = getattr(import_module(module, package), attribute)
            setattr(sys.modules[package], name, value)  # later uses find it directly
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places} - {"lazy_names"})

    return find, names, sorted(places)
