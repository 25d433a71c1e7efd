"""scripts/README.md: it lists every program, and every command of the page of figures exists."""

import importlib
import re
from pathlib import Path

from paths import SCRIPTS

from xinfer_jax.cli.commands import COMMANDS

HELPERS = {"launcher.py", "script_paths.py"}


def test_the_readme_lists_every_program_once():
    text = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+\.py)` \| \S", text, re.M)
    assert listed == sorted({path.name for path in SCRIPTS.glob("*.py")} - HELPERS)


def test_programs_and_flags_of_the_figures_exist():
    text = (SCRIPTS / "bench" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(\w+\.py)([^`]*)`", text)
    assert len(commands) > 10
    for program, arguments in commands:
        name = Path(program).stem
        module = f"xinfer_jax.{COMMANDS[name].module}" if name in COMMANDS else None
        file = importlib.import_module(module).__file__ if module else SCRIPTS / program
        source = Path(file).read_text(encoding="utf-8")
        for flag in re.findall(r"--(?:no)?(\w+)", arguments):
            assert f'"{flag}"' in source, (program, flag)
