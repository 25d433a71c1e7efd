"""Names and signatures of the public API, without the modules in which they are defined."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import xinfer_jax as xj

# Methods with these names are public although they begin with an underscore.
PROTOCOLS = (
    "__call__", "__iter__", "__next__", "__len__", "__getitem__", "__contains__", "__enter__", "__exit__",
    "__getattr__",
)  # fmt: skip


def without_places(text: str) -> str:
    """Returns a text without the modules of this library's names, and without addresses."""
    text = re.sub(r"\b(?:xinfer_jax|kernels_pallas)\.(?:\w+\.)*(?=\w)", "", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def signature_of(thing: Any) -> str:
    """Returns the parameters of a callable with their defaults and annotations, and the annotation of its
    result.
    """
    try:
        return without_places(str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return "unknown"


def members_of(kind: type) -> dict[str, str]:
    """Returns the members of a class: its fields, properties and methods, also those that it inherits."""
    members = {}
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            members[field.name] = without_places(f"field: {field.type}")
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") and name not in PROTOCOLS or name in members:
            continue
        if isinstance(value, property):
            members[name] = f"property{signature_of(value.fget)}"
        elif isinstance(value, staticmethod | classmethod):
            members[name] = f"{type(value).__name__}{signature_of(value.__func__)}"
        elif callable(value) or hasattr(value, "func"):
            members[name] = signature_of(getattr(value, "func", value))
        else:
            members[name] = without_places(f"value: {value!r}")
    return members


def described(thing: Any) -> Any:
    """Returns the signature of a function, or of a class also its members."""
    if inspect.isclass(thing):
        return dict(signature=signature_of(thing), members=members_of(thing))
    return signature_of(thing) if callable(thing) else type(thing).__name__


def typed_names() -> list[str]:
    """Returns the names that `__init__.pyi` gives to type checkers, functions with their arguments."""
    tree = ast.parse(Path(xj.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname]
        elif isinstance(node, ast.FunctionDef):
            names.append(ast.unparse(node).split("\n")[0])
        elif isinstance(node, ast.AnnAssign):
            names.append(ast.unparse(node))
    return sorted(names)


def api_records() -> dict[str, Any]:
    """Returns a record for each public name."""
    records: dict[str, Any] = {"api: names": xj.__all__, "api: names of types": typed_names()}
    for name in xj.__all__:
        records[f"api: {name}"] = described(getattr(xj, name))
    for name, thing in sorted(vars(xj.testing).items()):
        if not name.startswith("_") and getattr(thing, "__module__", "") == xj.testing.__name__:
            records[f"api: testing.{name}"] = described(thing)
    return records
