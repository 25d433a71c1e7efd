"""Reads adapter_config.json of PEFT: the modules that an adapter changes, with rank and factor. Fields are
the fields of `LoraConfig` in peft 0.21. A field that is not supported raises an error that names it.
"""

import ctypes
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, format_names, format_value

# They change nothing once the matrices are there. `fan_in_fan_out` is for Conv1D, which no model here has.
_READ_PAST = frozenset(
    """peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    lora_dropout fan_in_fan_out runtime_config ensure_weight_tying megatron_core qalora_group_size""".split()
)
_DONE = frozenset(
    """r lora_alpha target_modules target_parameters exclude_modules use_rslora rank_pattern alpha_pattern
    layers_to_transform layers_pattern modules_to_save""".split()
)
_INITS = (None, True, False, "gaussian", "orthogonal")  # of init_lora_weights; others change the model itself
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none")  # what leaves another field out
_PLAIN = re.compile(r"(\\[^\W\d]|\\\W|[\w.-])*")  # what cannot take long to match
_REGULAR = ("target_modules", "exclude_modules")  # patterns if they are no lists
_MOST_MATCHES = 10**6  # without a process of their own
_SECONDS = 10.0
_MEMORY = 2**27  # bytes
_NICENESS = 5  # a server's own threads go first
_PR_SET_PDEATHSIG = 1
_Patterns = list[tuple[re.Pattern[str], Any]]
_MAX_ALPHA = 1e30  # float32 holds the scale
_REJECTED = {
    "bias": "train the biases apart, and put them into the model",
    "lora_bias": "it adds a bias to each matrix",
    "use_dora": "DoRA scales the model's own columns: merge it with PEFT",
    "layer_replication": "it repeats layers: save the larger model",
}


class Module(NamedTuple):
    """The settings of an adapter for one module: the rank of its matrices, and the factor of their
    product.
    """

    rank: int
    scale: float


def read_modules(
    settings: Mapping[str, Any], names: Iterable[str], linear: Iterable[str], parameters: Iterable[str]
) -> dict[str, Module]:
    """Returns the modules and parameters that an adapter changes.

    Args:
        settings: the object in adapter_config.json.
        names: names of the model's modules.
        linear: the modules that "all-linear" means.
        parameters: names of the model's parameters, for `target_parameters`.

    Raises:
        InputError: a field is not supported or not known, or has a value that it cannot have, or no module is
            meant.
    """
    _check_fields(settings)
    arguments = settings, [*names], [*linear], [*parameters]
    patterns = _texts(settings, "layers_pattern", "rank_pattern", "alpha_pattern")
    lists = _texts(settings, "target_modules", "exclude_modules", "target_parameters")
    patterns += [settings[name] for name in _REGULAR if isinstance(settings.get(name), str)]
    matches = len(patterns + lists) * sum(map(len, arguments[1:]))
    if matches <= _MOST_MATCHES and all(map(_PLAIN.fullmatch, patterns)):
        return _read_modules(*arguments)
    return _read_in_time(*arguments)


def _read_modules(
    settings: Mapping[str, Any], names: list[str], linear: list[str], parameters: list[str]
) -> dict[str, Module]:
    targets = settings.get("target_modules")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        targets = sorted(linear)
    chosen = [name for name in names if _is_meant(settings, targets or [], name)]
    of_parameters = settings.get("target_parameters") or []
    chosen += [name for name in parameters if _matches("target_parameters", of_parameters, name)]
    if not chosen:
        raise InputError(f"target_modules {format_value(targets)} means no module of the model")
    patterns = {field: _patterns(settings, field) for field in ("rank_pattern", "alpha_pattern")}
    return {name: _module(settings, patterns, name) for name in chosen}


def _texts(settings: Mapping[str, Any], *fields: str) -> list[str]:
    """Returns the texts of these fields: each one, a list, or the keys of an object."""
    values = [settings.get(field) or [] for field in fields]
    return [text for value in values for text in ([value] if isinstance(value, str) else value)]


def _read_in_time(*arguments: Any) -> dict[str, Module]:
    """Runs `_read_modules` in a separate process: a regular expression can block all threads for ever."""
    root = str(Path(__file__).parents[2])
    code = "import sys; sys.path.insert(0, sys.argv[1]); from xinfer_jax.adapters.peft_config import main;"
    command = [sys.executable, "-c", f"{code} main()", root]
    try:
        done = subprocess.run(
            command, input=json.dumps(arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, timeout=_SECONDS, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the patterns of adapter_config.json take more than {_SECONDS:g} s: write names of modules"
        ) from None
    except subprocess.CalledProcessError:
        raise InputError(
            f"the patterns of adapter_config.json need more than {_MEMORY >> 20} MiB: write names of modules"
        ) from None
    except OSError as error:
        raise InputError(f"the patterns of adapter_config.json cannot be read: {error}") from error
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise InputError(found)
    return {name: Module(*how) for name, how in found.items()}


def main() -> None:
    """Runs the other process: writes the result of `_read_modules`, or the text of its error. It ends with
    its parent (on Linux), after some seconds of CPU time, and if it needs much memory.
    """
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (int(_SECONDS) + 1,) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        answer: Any = _read_modules(*json.load(sys.stdin))
    except InputError as error:
        answer = str(error)
    json.dump(answer, sys.stdout)


def read_norms(settings: Mapping[str, Any], norms: Collection[str], others: Iterable[str]) -> list[str]:
    """Returns the norms that `modules_to_save` means. PEFT compares the ends of names. others: names of the
    model's other modules.

    Raises:
        InputError: it means anything else.
    """
    wanted = settings.get("modules_to_save") or []
    if not _are(wanted, str):
        raise InputError(f"modules_to_save must be names, got {format_value(wanted)}")
    for end in dict.fromkeys(wanted):
        if not any(name.endswith(end) for name in norms) or any(name.endswith(end) for name in others):
            raise InputError(f"modules_to_save may have norms only, got {end!r}: merge it with PEFT")
    return [name for name in norms if name.endswith(tuple(wanted))]


def _check_fields(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise InputError(f"peft_type must be 'LORA', got {format_value(settings.get('peft_type'))}")
    init = settings.get("init_lora_weights")
    if init not in _INITS:
        raise InputError(
            f"init_lora_weights {format_value(init)} changes the model's own weights: convert the adapter by"
            " PEFT, to one of the model as it was"
        )
    known = _READ_PAST | _DONE | {"init_lora_weights"}
    if others := [name for name in settings if name not in known and settings[name] not in _OFF]:
        reasons = [f"{name} ({_REJECTED[name]})" if name in _REJECTED else name for name in others]
        raise InputError(f"adapter_config.json has what is not supported: {format_names(reasons, 4)}")
    _check_targets(settings)
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, Mapping):
            raise InputError(f"{name} must be an object, got {format_value(settings[name])}")
    layers = settings.get("layers_to_transform")
    if not (layers is None or _are([layers], int) or _are(layers, int)):
        raise InputError(f"layers_to_transform must be numbers of layers, got {format_value(layers)}")
    if settings.get("use_rslora") not in (None, True, False):
        raise InputError(f"use_rslora must be true or false, got {format_value(settings['use_rslora'])}")


def _check_targets(settings: Mapping[str, Any]) -> None:
    parameters = settings.get("target_parameters") or []
    if not _are(parameters, str):
        raise InputError(f"target_parameters must be names, got {format_value(parameters)}")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = settings.get(name)
        is_left_out = value is None and (name != "target_modules" or parameters)
        if not (is_left_out or isinstance(value, str) or _are(value, str)):
            raise InputError(f"{name} must be names or a regular expression, got {format_value(value)}")


def _are(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _is_meant(settings: Mapping[str, Any], targets: Any, name: str) -> bool:
    excluded = settings.get("exclude_modules")
    if excluded and _matches("exclude_modules", excluded, name):
        return False
    if not _matches("target_modules", targets, name):
        return False
    layers = settings.get("layers_to_transform")
    if isinstance(targets, str) or name in targets or layers is None or layers == []:
        return True
    patterns = settings.get("layers_pattern") or [r".*?\.[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := _compile("layers_pattern", rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.").match(name):
            return int(found["layer"]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _matches(field: str, wanted: Any, name: str) -> bool:
    if isinstance(wanted, str):
        return _compile(field, wanted).fullmatch(name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def _module(settings: Mapping[str, Any], patterns: Mapping[str, _Patterns], name: str) -> Module:
    rank = _of_pattern(patterns["rank_pattern"], name, settings.get("r", 8))
    alpha = _of_pattern(patterns["alpha_pattern"], name, settings.get("lora_alpha", 8))
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank < 2**31:
        raise InputError(f"the rank of {name} must be a positive integer, got {format_value(rank)}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < _MAX_ALPHA:
        raise InputError(
            f"lora_alpha of {name} must be a number below {_MAX_ALPHA}, got {format_value(alpha)}"
        )
    return Module(rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _patterns(settings: Mapping[str, Any], field: str) -> _Patterns:
    """Returns the patterns, compiled once for all modules: `re` keeps only a few hundred."""
    return [
        (_compile(field, rf"(.*\.)?({key})$"), value) for key, value in (settings.get(field) or {}).items()
    ]


def _of_pattern(patterns: _Patterns, name: str, default: Any) -> Any:
    """Returns the value of the first pattern that means the end of the name."""
    return next((value for pattern, value in patterns if pattern.match(name)), default)


def _compile(field: str, pattern: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises InputError."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{field} has {format_value(pattern)}, no regular expression: {error}") from error
