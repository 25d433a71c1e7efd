"""The flags of a command: ranges, --help and --version. Imports no jax, so errors are reported at once."""

import difflib
import itertools
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from absl import flags

from ..errors import InputError
from ..sampling.settings import FIELD_OF_ARGUMENT, Setting
from .terminal import write

_LARGEST = 2**31 - 1


class FlagParser:
    """The flags of a command. After `parse` their values are `parser.values.NAME`.

    Each definition takes a name and a help text. A value out of range raises with the remedy.

    Args:
        name: the name of the command, as in errors.
        about: the first lines of --help.
        usage, example: the arguments after the command's name.

    Attributes:
        name: the name as it was given. The name by which the command was started may take its place.
        heading: the text that --help prints before all else.
        values: the values of the flags.
        group: the heading in --help of flags that are defined next.
    """

    def __init__(self, name: str, about: str, usage: str, example: str):
        self.name = name
        self.heading = ""
        self._about = about
        self._usage = usage
        self._example = example
        self.values = _Values()  # our own, so that importing a command adds nothing to a caller's flags
        self.group = "flags"
        self._groups: dict[str, list[str]] = {}

    def add_text(self, name: str, help: str, empty: str = "", default: str | None = None) -> None:
        """Adds a text. empty: the remedy for an empty text. "": an empty text is allowed."""
        self._define(name, help, default, str, lambda text: text or not empty, empty)

    def add_texts(self, name: str, help: str, empty: str) -> None:
        """Adds a list of texts, one each time that the flag is given."""
        self._groups.setdefault(self.group, []).append(name)
        parser = _ValueParser(str, bool, empty)
        # absl needs no serializer, though its type stub does.
        flags.DEFINE_multi(parser, None, name, [], help, flag_values=self.values)  # type: ignore[call-overload]

    def add_choice(self, name: str, help: str, *choices: str, default: str | None = None) -> None:
        remedy = f"give {' or '.join(filter(None, (', '.join(choices[:-1]), choices[-1])))}"
        self._define(name, help, default, str, choices.__contains__, remedy)

    def add_integer(
        self,
        name: str,
        help: str,
        default: int | None = None,
        least: int = 0,
        most: int = _LARGEST,
        words: Sequence[str] = (),
    ) -> None:
        """Adds a whole number. words: texts that may stand in its place."""
        remedy = " or ".join((f"give a whole number from {least} to {most}", *words))

        def convert(text: Any) -> Any:
            return text if text in words else int(text)

        self._define(name, help, default, convert, lambda x: x in words or least <= x <= most, remedy)

    def add_integers(self, name: str, help: str, default: str) -> None:
        """Adds whole numbers from 1, with commas between them. The value is a list."""
        remedy = "give whole numbers from 1, with commas between"
        self._define(name, help, default, _whole_numbers, all, remedy)

    def add_number(
        self, name: str, help: str, is_valid: Any, range: str, default: float | None = None
    ) -> None:
        self._define(name, help, default, float, is_valid, f"give a number {range}")

    def add_option(self, field: Any, help: str) -> None:
        """Adds a field of `EngineOptions`, by its metadata."""
        limits = field.metadata
        if isinstance(field.default, bool):
            self.add_switch(field.name, help, field.default)
        elif "least" in limits:
            least = limits["least"]
            most = limits.get("most", _LARGEST)
            if isinstance(least, int):
                self.add_integer(field.name, help, field.default, least, most, limits.get("words", ()))
            else:
                words = f"from {least:g} to {most:g}"
                self.add_number(field.name, help, lambda x: least <= x <= most, words, field.default)
        elif choices := limits.get("choices"):
            self.add_choice(field.name, help, *choices)
        else:
            self.add_text(field.name, help, "give a value")

    def add_setting(self, setting: Setting) -> None:
        """Adds a sampling setting. If it is not given, its value is None, or [] for texts."""
        name = setting.field
        if setting.kind == "switch":
            self.add_switch(name, setting.help, None)
        elif setting.kind == "texts":
            self.add_texts(name, setting.help, "give some text")
        elif setting.valid:
            convert, words = (int, "give") if setting.kind == "count" else (float, "give a number")
            self._define(name, setting.help, None, convert, setting.valid[0], f"{words} {setting.valid[1]}")

    def add_switch(self, name: str, help: str, default: bool | None = False) -> None:
        flag = flags.BooleanFlag(name, default, help)
        flag.parser = _ValueParser(_boolean, lambda _: True, "give true or false")
        self._add(flag)

    def _define(self, name: str, help: str, default: Any, *rule: Any) -> None:
        self._add(flags.Flag(_ValueParser(*rule), flags.ArgumentSerializer(), name, default, help))

    def _add(self, flag: Any) -> None:
        self._groups.setdefault(self.group, []).append(flag.name)
        self.values[flag.name] = flag

    def parse(self, argv: Sequence[str]) -> None:
        """Parses the flags. --help and --version print their text and exit.

        Raises:
            InputError: there is an unknown flag, a value outside its range, or an argument that is not a
                flag.
        """
        if (needs_help := {"--help", "-help", "-h", "--h"} & set(argv[1:])) or "--version" in argv[1:]:
            write(f"{self._help() if needs_help else f'{self.name} {version()}'}\n")
            sys.exit(0)
        for name in self.values:
            self.values[name].unparse()  # resets the values of an earlier call in this process
        try:
            rest = self.values(self._with_underscores(argv), known_only=True)[1:]
        except (flags.Error, ValueError) as error:  # ValueError: a wrong value of a switch
            raise InputError(f"{str(error).removeprefix('flag ')} (see --help)") from error
        if not rest:
            return
        name = rest[0].lstrip("-").partition("=")[0]
        if not rest[0].startswith("-") or not name:
            remedy = "give the prompt with --prompt" if "prompt" in self.values else "everything is a flag"
            raise InputError(f"unexpected argument {rest[0]!r}: {remedy} (see --help)")
        longer = [flag for flag in self.values if flag.startswith(name)]
        close = longer[:3] or difflib.get_close_matches(name[:50], list(self.values), 1)
        meant = f". Did you mean {' or '.join(f'--{flag}' for flag in close)}?" if close else ""
        raise InputError(f"Unknown command line flag {name!r}{meant} (see --help)")

    def _with_underscores(self, argv: Sequence[str]) -> list[str]:
        """Returns the arguments, with --max_tokens for --max-tokens and --nouse_cache for --no-use-cache."""
        args = iter(argv)
        found = [next(args)]
        for arg in args:
            name, equals, value = arg.partition("=")
            flag = name.lstrip("-").replace("-", "_") if name.startswith("-") else ""
            if flag.startswith("no_") and flag not in self.values:
                flag = flag.replace("no_", "no", 1)
            found.append(f"--{flag}{equals}{value}" if flag else arg)
            if not equals and flag in self.values and not self.values[flag].boolean:
                found += itertools.islice(args, 1)  # its value, which stays as it is
        return found

    def with_flag_names(self, message: object) -> str:
        """Returns an error of the library with the command's flags in place of the library's arguments.

        A flag without a value stays out: generation_config.json may have the argument's name.
        """
        flag_of = {
            name: f"--{flag}"
            for name, flag in FIELD_OF_ARGUMENT.items()
            if flag in self.values and self.values[flag].value not in (None, [])
        }
        return re.sub(r"\b[a-z_]+\b", lambda word: flag_of.get(word[0], word[0]), str(message))

    def is_set(self, name: str) -> bool:
        """Returns True if a flag has a value other than its default."""
        return self.values[name].value != self.values[name].default

    def _help(self) -> str:
        usage = f"usage: {self.name} {self._usage}"
        about = [textwrap.fill(line, 110, break_on_hyphens=False) for line in self._about.split("\n")]
        lines = [f"{self.heading}{about[0]}", *about[1:], "", usage]
        lines += [f"example: {self.name} {self._example}", ""]
        for group, names in self._groups.items():
            lines.append(f"{group}:")
            for name in names:
                flag = self.values[name]
                text = flag.help.partition(";\n")[0]  # without absl's text for flags that may be repeated
                lines += _entry(f"--[no]{name}" if flag.boolean else f"--{name}", text, flag.default)
            lines.append("")
        return "\n".join([*lines, *_entry("--version", "Print the versions of xinfer_jax, jax and Python.")])


def _entry(option: str, text: str, default: Any = None) -> list[str]:
    """Returns the lines of --help for one flag."""
    if isinstance(default, list):
        default = ",".join(map(str, default))
    text += "" if default in (None, "") else f" Default: {str(default).lower()}."
    indent = " " * 28
    name = f"  {option}"
    if len(name) >= len(indent):  # too long for its column
        return [name, *textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent)]
    return textwrap.wrap(text, 110, initial_indent=name.ljust(len(indent)), subsequent_indent=indent)


def version() -> str:
    """Returns the versions of this package, jax and Python."""
    # Imported here: it would take most of this module's import time.
    from importlib.metadata import version as installed

    from .. import __version__

    return f"{__version__} (jax {installed('jax')}, Python {platform.python_version()})"


def _boolean(value: Any) -> bool:
    return {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}[str(value).lower()]


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class _Values(flags.FlagValues):
    def read_flags_from_files(self, argv: Sequence[str], force_gnu: bool = True) -> list[str]:
        """Disables absl's --flagfile, which would read any file to its end."""
        return list(argv)


class _ValueParser(flags.ArgumentParser):
    def __init__(self, convert: Callable[[Any], Any], is_valid: Callable[[Any], Any], remedy: str):
        super().__init__()
        self._convert = convert
        self._is_valid = is_valid
        self._remedy = remedy

    def parse(self, argument: Any) -> Any:
        with suppress(ValueError, KeyError):
            if self._is_valid(value := self._convert(argument)):
                return value
        raise ValueError(self._remedy)
