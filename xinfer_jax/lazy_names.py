"""Names of a package that are imported when they are first used, so that commands reject flags before they
import jax. The list of names is the package's `__init__.pyi`, which type checkers and editors read too.
"""

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path


def lazy_names(
    package: str, file: str, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its name.
        file: its `__init__.py`, next to which the `__init__.pyi` lies. Each name stands there once, in a
            statement like `from .grammars import Grammar as Grammar`.
        moved: old names of the package, each with its new name, which may have dots ("grammar.choice"). An
            old name works, with a DeprecationWarning.
    """
    places: dict[str, tuple[str, str]] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            module = "." * node.level + (node.module or "")
            places |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    short = package.replace("xinfer_jax", "xj", 1)

    def find(name: str) -> object:
        if name in places:
            module, attribute = places[name]
            if module == ".":  # a package or a module
                value = import_module(f".{attribute}", package)
            else:
                value = getattr(import_module(module, package), attribute)
            setattr(sys.modules[package], name, value)  # later uses find it directly
            return value
        if moved and name in moved:
            text = f"{short}.{name} is now {short}.{moved[name]}; the old name works until version 0.3"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            found: object = sys.modules[package]
            for part in moved[name].split("."):
                found = getattr(found, part)
            return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, "__version__"} - {"lazy_names"})

    return find, names, sorted(places)
