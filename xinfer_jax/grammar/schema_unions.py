"""`exclusive_as_any`: `oneOf` of schemas that exclude each other becomes `anyOf`, which llguidance serves. So
pydantic and zod write unions with a discriminator.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_MOST_REFERENCES = 8  # one to another


def path_names(path: str) -> list[str]:
    """Returns the names in the path of a reference (RFC 6901)."""
    return [unquote(name).replace("~1", "/").replace("~0", "~") for name in path.split("/")]


def exclusive_as_any(node: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Returns the schema with `anyOf` in place of `oneOf`, if no value is valid for two of its branches: all
    are of objects, and require one property with constants that no other branch has. root: has the
    definitions.
    """
    found = dict(node)
    branches = found.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in found:
        objects = [_resolved(branch, root) for branch in branches]
        names = objects[0].get("properties") if objects else None
        if any(_tells_apart(name, objects) for name in (names if isinstance(names, Mapping) else ())):
            found["anyOf"] = found.pop("oneOf")
    return found


def _tells_apart(name: str, objects: list[Mapping[str, Any]]) -> bool:
    constants: list[Any] = []
    for one in objects:
        properties = one.get("properties")
        required = one.get("required")
        value = properties.get(name) if isinstance(properties, Mapping) else None
        is_required = isinstance(required, list) and name in required and one.get("type") == "object"
        if not is_required or not isinstance(value, Mapping):
            return False
        own = value.get("enum", [value["const"]] if "const" in value else None)
        if not isinstance(own, list) or not all(isinstance(constant, str) for constant in own):
            return False
        constants += {*own}
    return len({*constants}) == len(constants)


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Returns the schema to which a reference within the schema leads, or {} if it is not known."""
    for _ in range(_MOST_REFERENCES):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        schema = root
        for name in path_names(path)[1:]:
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}
