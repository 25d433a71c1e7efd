"""Finds the chat templates of a checkpoint, which may have several by name, as transformers does."""

import json
from pathlib import Path
from typing import Any

from ..errors import InputError, format_value
from ..formats.files import file_exists, read_json, read_text

_DEFAULT = "default"
_TOOL_USE = "tool_use"


def read_chat_templates(path: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """Returns the chat template, and the chat template of conversations with tools, or None if it is the
    same.

    Separate files come first, then tokenizer_config.json, then chat_template.json of a processor. If
    templates have names and none is "default", the first one is a template that rejects every conversation.
    settings: the contents of tokenizer_config.json. Raises InputError.
    """
    extra = sorted(path.glob("additional_chat_templates/*.jinja"))
    files = {_DEFAULT: path / "chat_template.jinja"} | {file.stem: file for file in extra}
    named = {name: read_text(file) or "" for name, file in files.items() if file_exists(file)}
    named = named or _declared_templates(path / "tokenizer_config.json", settings)
    if not named:
        file = path / "chat_template.json"
        named = _declared_templates(file, read_json(file) or {})
    if named and _DEFAULT not in named:
        names = format_value(sorted(named))
        error = f"none of its chat templates {names} is named 'default': add chat_template.jinja"
        named = {_DEFAULT: f"{{{{ raise_exception({json.dumps(error)}) }}}}", **named}
    return named.get(_DEFAULT), named.get(_TOOL_USE)


def _declared_templates(file: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the templates of a JSON file by name: one text, an object, or a list of names and templates."""
    value = settings.get("chat_template")
    if value is None:
        return {}
    named = value if isinstance(value, dict) else {_DEFAULT: value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
    if not named or not all(isinstance(text, str) for text in (*named, *named.values())):
        raise InputError(
            f"{file}: chat_template must be a text, or several texts by name, got {format_value(value)}"
        )
    return named
