"""The tables of sampling settings, of the options of an engine, and of the flags of the server."""

import dataclasses
import re
from typing import Any

from xinfer_jax.engine.engine_options import EngineOptions, option_texts
from xinfer_jax.sampling.sampling_config import SamplingConfig
from xinfer_jax.sampling.settings import SETTINGS, Setting
from xinfer_jax.serve.command import PARSER

from .markdown import code, number, sentence, table

# By the name of its table the heading of a group of flags in `xinfer-jax serve --help`.
GROUPS = {
    "address": "address, keys and name",
    "model": "model",
    "sampling": "sampling",
    "answers": "answers",
    "engine": "engine",
    "processes": "several processes",
    "roles": "prefill and decode in processes of their own",
    "limits": "limits",
    "start": "start, log and end",
}
FLAGS = {"adapters": "`--adapter NAME=PATH`", "role": "`--role`, in `serve` only"}  # of options


def sampling() -> list[str]:
    """Returns each sampling setting: its names, its range, its default and its meaning."""
    meanings = option_texts(SamplingConfig)
    rows = []
    for setting in SETTINGS.values():
        flag = code(f"--{setting.field}") if setting.help else "—"
        field = code(setting.field) if setting.in_bodies else "—"
        hf = code(setting.hf) if setting.hf else "—"
        default = code(setting.default) if setting.valid else "not given"
        meaning = sentence(meanings[setting.name])
        rows.append([code(setting.name), flag, field, hf, _range(setting), default, meaning])
    head = ["in Python", "flag", "HTTP field", "generation_config.json", "values", "default", "meaning"]
    return table(head, rows)


def _range(setting: Setting) -> str:
    if setting.valid:
        return setting.valid[1]
    return {"ids": "token ids", "bias": "token ids with numbers", "words": "lists of token ids"}.get(
        setting.kind, "token ids; texts in HTTP"
    )


def engine_options() -> list[str]:
    """Returns each field of `EngineOptions`."""
    texts = option_texts()
    rows = []
    for field in dataclasses.fields(EngineOptions):
        flag = FLAGS.get(field.name, code(f"--{field.name}") if field.name in PARSER.values else "—")
        meaning, default = _split_default(texts[field.name])
        given = default if field.default is None else code(_shown(field.default))
        rows.append([code(field.name), flag, given or code(None), sentence(meaning)])
    return table(["in Python", "flag", "default", "meaning"], rows)


def flags_of(group: str) -> list[str]:
    """Returns the flags of `xinfer-jax serve` below one of the headings in `GROUPS`.

    Raises:
        KeyError: the command has no such group, or one that no table has.
    """
    groups = PARSER._groups
    if set(groups) != set(GROUPS.values()):
        raise KeyError(f"groups of flags and tables differ: {set(groups) ^ set(GROUPS.values())}")
    rows = []
    for name in groups[group]:
        flag = PARSER.values[name]
        text = flag.help.partition(";\n")[0]  # without absl's text for flags that may be repeated
        meaning, default = _split_default(text)
        if flag.default not in (None, [], ""):
            default = code(("off", "on")[flag.default] if flag.boolean else _shown(flag.default))
        shown = f"--[no]{name}" if flag.boolean and flag.default else f"--{name}"
        rows.append([code(shown), _values(flag), default or "none", sentence(meaning)])
    return table(["flag", "value", "default", "meaning"], rows)


def _values(flag: Any) -> str:
    """Returns the values that a flag takes, as its error says them."""
    if flag.boolean:
        return "a switch"
    remedy = str(flag.parser._remedy).removeprefix("give ").replace("a value", "a text")
    return re.sub(r"\b\d{4,}\b", lambda found: number(int(found[0])), remedy) or "a text"


def _shown(value: Any) -> str:
    return number(value) if type(value) in (int, float) else str(value)


def _split_default(text: str) -> tuple[str, str]:
    """Returns the text of an option without its sentence "Default: ….", and the rest of that sentence."""
    text = " ".join(text.split())
    found = re.search(r"(?:^|(?<=[.;:]) )Default: ([^.]*(?:\.\w[^.]*)*)\.?", text)
    if not found:
        return text, ""
    return f"{text[: found.start()]}{text[found.end() :]}".strip(), found[1].strip()
