"""Command lines of the Markdown pages: the commands and flags in ```bash blocks exist, and their values are
valid. Nothing runs.
"""

import re
import shlex
from importlib import import_module

import pytest
from paths import ROOT
from tables import markdown

from xinfer_jax.cli.commands import COMMANDS, DEFAULT

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

PAGES = [str(path.relative_to(ROOT)) for path in markdown.pages(ROOT)]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=")
# The first words of a command of ours, after assignments of variables and programs that start it.
STARTERS = ("srun", "exec")
NAMES = {
    "xinfer-jax": None,
    "xinfer-jax-chat": "chat",
    "xinfer-jax-batch": "batch",
    "xinfer-jax-serve": "serve",
}


def command_lines(block: str) -> list[list[str]]:
    """Returns the commands of a block, split into words, with lines that end in a backslash joined."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if "xinfer-jax" not in line:
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;<>"):
                found.append(command)
                command = []
            else:
                command.append(word)
    return found


def arguments_of(command: list[str]) -> tuple[str, list[str]] | None:
    """Returns the subcommand and its arguments; None: it is another program."""
    while command and (ASSIGNMENT.match(command[0]) or command[0] in STARTERS):
        command = command[1:]
    program = command[0].rpartition("/")[2] if command else ""
    if program not in NAMES:
        return None
    first = command[1] if len(command) > 1 else ""
    if NAMES[program] is None and first in COMMANDS:
        return first, command[2:]
    return NAMES[program] or DEFAULT, command[1:]


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    found = (arguments_of(command) for block in blocks for command in command_lines(block))
    return [command for command in found if command is not None]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_have_their_flags(page):
    for name, arguments in commands_of(page):
        parser = import_module(f"xinfer_jax.{COMMANDS[name].module}").PARSER
        try:
            parser.parse([name, *arguments])
        finally:
            parser.parse([name])  # resets the flags


def test_commands_are_found():
    counts = {page: len(commands_of(page)) for page in PAGES}
    assert counts["README.md"] >= 3 and counts[".docs/pages/recipes.md"] >= 20
    assert arguments_of(["A=1", ".venv/bin/xinfer-jax", "--prompt", "a"]) == (DEFAULT, ["--prompt", "a"])
    assert arguments_of(["srun", "xinfer-jax", "batch", "--in_order"]) == ("batch", ["--in_order"])
    assert arguments_of(["xinfer-jax-serve", "--port=1"]) == ("serve", ["--port=1"])
    assert arguments_of(["docker", "run", "xinfer-jax", "serve"]) is None
    assert command_lines("xinfer-jax \\\n  --prompt 'a; b' & # c") == [["xinfer-jax", "--prompt", "a; b"], []]
