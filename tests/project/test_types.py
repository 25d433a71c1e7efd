"""Types of the public API: no result is of type Any, and keyword arguments have the names and types of the
options that they stand for. `tests/support/typed_client.py` has what type checkers find.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from public_names import PUBLIC

import xinfer_jax as xj
from xinfer_jax import annotations, testing
from xinfer_jax.engine import engine_options, request_options
from xinfer_jax.engine.part_method import PartMethod
from xinfer_jax.generation.scoring import score
from xinfer_jax.sampling import typed_settings

pytestmark = [pytest.mark.oldest, pytest.mark.unit]

# Any is what JSON has, or a leaf of the parameters: arrays and quantized matrices.
OBJECTS = r"(dict|Mapping)\[str, Any\]"
NAMES = [*PUBLIC.items()] + [
    (f"testing.{name}", value)
    for name, value in vars(testing).items()
    if not name.startswith("_") and getattr(value, "__module__", "") == testing.__name__
]


def text_of(annotation: object) -> str:
    """An annotation as it is written, without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b[a-z_][\w.]*\.(?=[A-Za-z])", "", text)


def own_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("xinfer_jax")]


def functions_of(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The functions that a public name is or has, with private ones left out."""
    if not inspect.isclass(value):
        yield name, inspect.unwrap(value)
        return
    for base in own_classes(value):
        for key, member in vars(base).items():
            if key.startswith("_") and key not in (
                "__init__",
                "__call__",
                "__enter__",
                "__next__",
            ):
                continue
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, PartMethod):
                member = member.method
            if inspect.isfunction(member):
                yield f"{name}.{key}", inspect.unwrap(member)


FUNCTIONS = {name: function for args in NAMES for name, function in functions_of(*args)}
FIELDS = {
    f"{name}.{field}": text_of(annotation)
    for name, value in NAMES
    if inspect.isclass(value)
    for base in own_classes(value)
    for field, annotation in inspect.get_annotations(base).items()
    if not field.startswith("_")
}
# Fields that are pytrees or functions of a caller, and take anything.
CALLERS_OWN = {
    "Tap.args", "Tap.edit", "LogitsProcessor.init", "LogitsProcessor.apply", "LogitsProcessor.update",
    "EngineOptions.processors", "GenerateOptions.processors",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_annotated_and_return_no_any(name):
    function = FUNCTIONS[name]
    given = inspect.get_annotations(function)
    missing = {*inspect.signature(function).parameters} - {*given, "self", "cls"}
    assert not missing and ("return" in given or name.endswith("__init__"))
    returned = text_of(given.get("return"))
    assert "Any" not in re.sub(OBJECTS, "", returned), returned


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keyword_arguments_have_names(name):
    """`**fields: Any` would let a misspelled name pass a type checker."""
    function = FUNCTIONS[name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD and name != "Tokenizer.apply_chat_template":
            assert typing.get_origin(parameter.annotation) is typing.Unpack
        if parameter.kind == parameter.VAR_POSITIONAL:
            assert parameter.annotation is not typing.Any


def test_fields_are_typed():
    known = rf"{OBJECTS}|type\[Any\]|Callable\[\.\.\., Any\]"  # `Dtype` and `Remat` have the last two
    loose = {name for name, text in FIELDS.items() if re.search(r"\bAny\b", re.sub(known, "", text))}
    assert loose - CALLERS_OWN <= {"Engine.core"} and len(FIELDS) > 150


# --- keyword arguments stand for fields of options ----------------------------------------------------------


def texts_of_fields(kind: type) -> dict[str, str]:
    return {name: text_of(annotation) for name, annotation in kind.__annotations__.items()}


def texts_of_typed_dict(kind: type) -> dict[str, str]:
    hints = {}
    for name, hint in kind.__annotations__.items():
        hints[name] = text_of(hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint)
    return hints


def test_settings_of_an_engine_are_the_fields_of_its_options():
    own, fields = engine_options.EngineSettings, engine_options.EngineOptions
    assert texts_of_typed_dict(own) == texts_of_fields(fields) and not own.__required_keys__


def test_settings_of_sampling_are_the_fields_of_its_config():
    own = texts_of_typed_dict(typed_settings.SamplingSettings)
    assert own == texts_of_fields(xj.SamplingConfig) and not typed_settings.SamplingSettings.__required_keys__


def test_fields_of_requests_are_those_of_their_options():
    fields = texts_of_fields(xj.RequestOptions)
    one, many, sample = (
        texts_of_typed_dict(getattr(request_options, name))
        for name in ("RequestFields", "ManyRequestFields", "SampleFields")
    )
    assert one == fields
    assert many == fields | dict(adapter="str | Sequence[str | None] | None")
    named = {*inspect.signature(xj.Engine.sample).parameters} - {"self", "how"}
    left_out = {"prompt_logprobs", "processed_logprobs", "live"}
    assert sample == {k: v for k, v in fields.items() if k not in left_out} | dict(
        request_options="RequestOptions | None"
    )
    assert not named & {*sample}


def test_options_of_score_in_tests_are_its_arguments():
    given = typing.get_type_hints(inspect.unwrap(score), vars(testing))
    for name, hint in typing.get_type_hints(testing.ScoreOptions).items():
        assert hint == given[name], name


def test_a_part_has_the_signature_of_its_method():
    assert "mode" in inspect.signature(xj.Engine.update).parameters
    assert xj.Engine.update.__doc__ == inspect.unwrap(xj.Engine.update).__doc__
    parts = SimpleNamespace(weights=SimpleNamespace(update=lambda params, mode: (params, mode)))
    assert xj.Engine.update(parts, 1, mode="wait") == (1, "wait")


# --- results have one shape ---------------------------------------------------------------------------------


def test_results_are_dataclasses_or_tuples_with_names():
    for name in ("Scores", "Decoded", "GenerateOutput", "BeamOutput", "SampleOutput"):
        assert dataclasses.is_dataclass(getattr(xj.types, name))
    for kind in (xj.types.ModelOutput, xj.rollouts.PackedRollout, xj.types.TokenLogprobs):
        assert kind._fields
    assert isinstance(np.zeros(1), annotations.AnyArray)
