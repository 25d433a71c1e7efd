"""`PartMethod`: a method of an engine that one of its parts has."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class PartMethod(Generic[Parameters, Result]):
    """The method of a part as an attribute of its engine, with its signature, types and docstring."""

    def __init__(self, part: str, method: Callable[Concatenate[Any, Parameters], Result]):
        """Makes the attribute. part: the name of the engine's attribute that holds the part. method: a method
        of the class of the part.
        """
        self.part = part
        self.method = method

        @wraps(method)
        def unbound(owner: object, *args: Any, **kwargs: Any) -> Any:
            return self.__get__(owner, type(owner))(*args, **kwargs)

        self.unbound = unbound

    @overload
    def __get__(self, owner: None, owner_class: type) -> Callable[Concatenate[Any, Parameters], Result]: ...
    @overload
    def __get__(self, owner: object, owner_class: type) -> Callable[Parameters, Result]: ...
    def __get__(self, owner: object | None, owner_class: type) -> Any:
        if owner is None:
            return self.unbound
        return getattr(getattr(owner, self.part), self.method.__name__)
