"""All public names: those of the package, and those of its namespaces with a dot."""

import inspect
from typing import Any

import xinfer_jax as xj

VALUES = {name: getattr(xj, name) for name in xj.__all__}
SPACES = {name: x for name, x in VALUES.items() if inspect.ismodule(x) and name != "testing"}
PUBLIC: dict[str, Any] = {name: x for name, x in VALUES.items() if not inspect.ismodule(x)} | {
    f"{space}.{name}": getattr(module, name) for space, module in SPACES.items() for name in module.__all__
}
