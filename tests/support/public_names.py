"""All public names: those of the package, and those of its namespaces with a dot."""

import inspect
from typing import Any

import xinfer_jax as xj

SPACES = {
    name: space for name in xj.__all__ if inspect.ismodule(space := getattr(xj, name)) if name != "testing"
}
PUBLIC: dict[str, Any] = {name: getattr(xj, name) for name in xj.__all__ if name not in SPACES} | {
    f"{space}.{name}": getattr(module, name) for space, module in SPACES.items() for name in module.__all__
}
