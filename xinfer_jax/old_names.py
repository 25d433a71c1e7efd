"""Names and orders of arguments of version 0.1. They work, or raise an error that gives the new ones, until
version 0.3: then this module goes, with its uses.
"""

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

from .errors import InputError, format_value

F = TypeVar("F", bound=Callable)
C = TypeVar("C", bound=type)
NAMESPACES = dict(
    grammar="Dfa Grammar choice json_object json_schema lark regex",
    tools="AnswerDelta AnswerParser ParsedAnswer ToolCall ToolCallDelta parse_tool_calls tool_grammar",
    lora="Adapter LowRank init_adapter load_adapter merge_adapter save_adapter split_adapter with_adapter"
    " with_adapters",
    params="ParamName dequantize param_names params_from_tensors params_to_tensors reshard shardings"
    " stack_layers unstack_layers",
    rollouts="PackedRollout continue_rows map_logits pack_rollout",
    types="Answer BeamOutput DecodeState Decoded EngineStats GenerateOutput GenerateStats LoadStats"
    " ModelOutput Prefix Request RopeConfig SampleOutput SamplingContext Scores Stream TextStream"
    " TokenLogprobs",
)
MOVED = (
    dict(Engines="Engine", plugin="plugins.load", Processor="LogitsProcessor")
    | dict(dfa="grammar.compile_dfa", from_hf="ModelConfig.from_hf")
    | dict(truncate="KVCache.truncate", repeat_rows="KVCache.repeat_rows")
    | {name: f"{space}.{name}" for space, names in NAMESPACES.items() for name in names.split()}
)


def _warn(old: str, new: str, stacklevel: int) -> None:
    text = f"{old} is now {new}; the old name works until version 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def moved_name(package: Any, name: str) -> Any:
    """Returns the value of an old name of the package. AttributeError: there is none."""
    if name not in MOVED:
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
    _warn(f"xj.{name}", f"xj.{MOVED[name]}", 3)
    first, *rest = MOVED[name].split(".")
    found = (
        getattr(package, first) if first in package.__all__ else import_module(f".{first}", package.__name__)
    )
    return functools.reduce(getattr, rest, found)


def _renamed(owner: str, names: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments by their new names. owner: the owner of the arguments. An old name comes before a new
    one, which `dataclasses.replace` gives with the present value.
    """
    by_old_names = {names[old]: value for old, value in given.items() if old in names}
    for old in names.keys() & given.keys():
        _warn(f"{owner}({old}=)", f"{names[old]}=", 3)
    return {name: value for name, value in given.items() if name not in names} | by_old_names


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """Returns a decorator of a function that takes its arguments by their old names too.

    Args:
        names: old names, with the new ones.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            return function(*args, **_renamed(function.__name__, names, kwargs))

        return cast(F, call)

    return decorate


def keyword_options(**names: str) -> Callable[[C], C]:
    """Returns a decorator of a dataclass of options, which takes its fields by keyword, and by their old
    names too. Positional values, as version 0.1 took them, raise InputError.
    """

    def decorate(options: C) -> C:
        init = options.__init__  # type: ignore[misc]
        name = options.__name__

        @functools.wraps(init)
        def create(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            if args:
                field = next(iter(options.__dataclass_fields__))  # type: ignore[attr-defined]
                call = f"{name}({field}={format_value(args[0])})"
                raise InputError(f"{name} takes keyword arguments since version 0.2: write {call}, and so on")
            init(self, **_renamed(name, names, kwargs))

        options.__init__ = create  # type: ignore[misc]
        add_old_names(options, **names)
        return options

    return decorate


class OldAttribute:
    """An attribute by its old name."""

    def __init__(self, new: str, old: str = ""):
        self._new = new
        self._old = old

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        _warn(f"{owner.__name__}.{self._old}", self._new, 2)
        return getattr(instance, self._new)


def add_old_names(owner: type, **names: str) -> None:
    """Gives a NamedTuple attributes by their old names.

    Args:
        owner: the NamedTuple.
        names: old names, with the new ones.
    """
    for old, new in names.items():
        setattr(owner, old, OldAttribute(new, old))


def check_order(call: str, first: Any, path: Any) -> None:
    """Raises InputError if the first argument is a path, as in version 0.1, or if the path argument is none.

    Args:
        call: the call in today's order.
        first: the first argument.
        path: the argument that is a path.
    """
    if isinstance(first, str | os.PathLike):
        got = f"{format_value(first)} first"
    elif not isinstance(path, str | os.PathLike):
        got = f"{format_value(path)} as the path"
    else:
        return
    raise InputError(f"{call} is the order of the arguments since version 0.2: got {got}")
