"""`Functions`: which functions may be called, and the JSON types of their parameters by their schemas."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from .json_values import type_names

_MAX_DEPTH = 64
_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment")


class Functions:
    """The functions that may be called."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None):
        """Makes the functions. schemas: the schema of the parameters of each function. None: any function may
        be called.
        """
        self.schemas = schemas
        self._parameters: dict[str, Parameters] = {}

    def __contains__(self, name: object) -> bool:
        return self.schemas is None or name in self.schemas

    def parameters(self, name: str) -> "Parameters":
        """Returns the parameters of one of the functions."""
        if self.schemas is None:
            return Parameters({})
        if name not in self._parameters:
            self._parameters[name] = Parameters(self.schemas[name])
        return self._parameters[name]


class Parameters:
    """The parameters that a JSON Schema of an object describes, also by $ref, allOf, anyOf and oneOf."""

    def __init__(self, schema: Mapping[str, Any]):
        self._root = schema
        self._of_reference: dict[str, set[str] | None] = {}

    @functools.cached_property
    def described(self) -> Mapping[str, list[Any]] | None:
        """The schemas of each parameter, by its name. None: the schema describes none."""
        found: dict[str, list[Any]] = {}
        parts = [*self._parts(self._root, ("allOf", "anyOf", "oneOf"))]
        of_properties = [part["properties"] for part in parts if isinstance(part.get("properties"), Mapping)]
        for key, value in (pair for properties in of_properties for pair in properties.items()):
            found.setdefault(key, []).append(value)
        return found if of_properties else None

    def types(self, name: str) -> set[str] | None:
        """Returns the names of the JSON types that a parameter may have. None: its schema does not say."""
        if self.described is not None and name in self.described:
            return self.json_types({"anyOf": self.described[name]})
        more = self._root.get("additionalProperties")
        return self.json_types(more) if isinstance(more, Mapping) else {"string"}

    def json_types(self, schema: Any, depth: int = _MAX_DEPTH) -> set[str] | None:
        """Returns the names of the JSON types that a schema allows. None: it does not say."""
        if not isinstance(schema, Mapping) or not depth:
            return None
        found = [self._own_types(schema), self._any_types(schema, depth - 1)]
        if isinstance(parts := schema.get("allOf"), list):
            found += [self.json_types(part, depth - 1) for part in parts]
        if isinstance(path := schema.get("$ref"), str):
            if path not in self._of_reference:
                self._of_reference[path] = None  # where it refers to itself
                self._of_reference[path] = self.json_types(self._target(path), depth - 1)
            found.append(self._of_reference[path])
        known = [types for types in found if types is not None]
        return set.intersection(*known) if known else None

    def _own_types(self, schema: Mapping[str, Any]) -> set[str] | None:
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if isinstance(types, list):
            names = {*map(str, types)}
            integer = {"integer"} if "number" in names else set()
            return names | integer | ({"null"} if schema.get("nullable") is True else set())
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if not isinstance(values, list) or not values:
            return None
        return set[str]().union(*map(type_names, values))

    def _any_types(self, schema: Mapping[str, Any], depth: int) -> set[str] | None:
        branches = schema.get("anyOf") or schema.get("oneOf")
        found = [self.json_types(branch, depth) for branch in branches] if isinstance(branches, list) else []
        if not found or any(types is None for types in found):
            return None
        return set[str]().union(*(types or () for types in found))

    def _target(self, path: str) -> Any:
        """Returns the schema that a $ref within this one names. None: there is none."""
        start, *keys = unquote(path).split("/")
        found: Any = self._root if start == "#" else None
        for key in keys:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _parts(self, schema: Any, keys: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
        """Yields the schema and the schemas that it combines by $ref and these keywords, each of them
        once.
        """
        pending = [schema]
        references = set[str]()
        while pending:
            part = pending.pop()
            if not isinstance(part, Mapping):
                continue
            yield part
            for key in keys:
                pending += part[key] if isinstance(part.get(key), list) else []
            if isinstance(path := part.get("$ref"), str) and path not in references:
                references.add(path)
                pending.append(self._target(path))

    def merged(self, schema: Any) -> Any:
        """Returns the schema with the keywords that it has by $ref and allOf. If two keywords differ, it
        returns the schema as it is.
        """
        if not isinstance(schema, Mapping) or not {"$ref", "allOf"} & schema.keys():
            return schema
        found: dict[str, Any] = {}
        for part in self._parts(schema, ("allOf",)):
            for key, value in part.items():
                if key in ("$ref", "allOf"):
                    continue
                if key not in _NOTES and found.get(key, value) != value:
                    return schema
                found.setdefault(key, value)
        return found
