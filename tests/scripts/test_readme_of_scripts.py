"""scripts/README.md lists every program. The commands `python scripts/…` of all pages parse."""

import importlib
import re
import shlex
import sys

import launcher
import pytest
import run_script
from absl import flags
from paths import ROOT, SCRIPTS
from quick import full_except
from tables import markdown

from xinfer_jax.cli.commands import COMMANDS

pytestmark = pytest.mark.oldest

HELPERS = {"launcher.py", "script_paths.py"}
TRAINING = {"train_head", "train_tiny"}
COMMAND = re.compile(r"python (scripts|tests/support)/(\w+)\.py([^`\n|#]*)")
PAGES = [
    str(path.relative_to(ROOT))
    for path in markdown.pages(ROOT)
    if COMMAND.search(path.read_text(encoding="utf-8"))
]
LEAST = {
    "scripts/bench/README.md": 20,
    "scripts/README.md": 1,
    ".docs/pages/status.md": 10,
    "WORKSPACE.md": 2,
}


def text_of(page: str) -> str:
    """Returns a page whose commands have one line each."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"\\\n\s*", "", text)


def commands(page: str) -> list[tuple[str, str]]:
    """Returns the programs of scripts/ that a page starts, each with its arguments."""
    return [
        (name, given.strip()) for folder, name, given in COMMAND.findall(text_of(page)) if folder == "scripts"
    ]


def parse(name: str, arguments: list[str]) -> None:
    """Parses the arguments of scripts/NAME.py. A wrong one raises InputError or exits."""
    if name in COMMANDS:
        importlib.import_module(f"xinfer_jax.{COMMANDS[name].module}").PARSER.parse([name, *arguments])
        return
    known = set(flags.FLAGS)
    try:
        run_script._import(name)
        launcher.parse([f"{name}.py", *arguments])
    finally:
        run_script._remove_flags(known)


def test_the_readme_lists_every_program_once():
    listed = re.findall(r"^\| `(\w+\.py)` \| \S", text_of("scripts/README.md"), re.M)
    assert listed == sorted({path.name for path in SCRIPTS.glob("*.py")} - HELPERS)


def test_pages_have_commands():
    assert not [page for page, least in LEAST.items() if len(commands(page)) < least]


LINES = sorted({command for page in PAGES for command in commands(page) if "NAME" not in command})


@pytest.mark.parametrize(
    ("name", "given"), full_except([line for line in LINES if line[0] not in TRAINING], LINES)
)
def test_a_command_of_a_page_parses(name, given, monkeypatch):
    if name in TRAINING:
        pytest.importorskip("optax", reason="the extra `train` is not installed")
    monkeypatch.delitem(sys.modules, "gpu.check_command", raising=False)  # its flags belong to two programs
    parse(name, shlex.split(given.replace("…", "")))


def test_a_wrong_command_does_not_parse(capsys):
    with pytest.raises(SystemExit):
        parse("soak_engine", ["--request=20000"])


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_of_commands_exist(page):
    text = text_of(page)
    files = [f"{folder}/{name}.py" for folder, name, _ in COMMAND.findall(text) if name != "NAME"]
    for given in re.findall(r"pytest ([^`\n]*tests/[^`\n]*)", text):
        files += [part for part in given.split() if part.startswith("tests/")]
        if chosen := re.search(r"-k (\w+)", given):
            file = next(part for part in given.split() if part.startswith("tests/"))
            assert re.search(rf"def test_\w*{chosen[1]}", (ROOT / file).read_text(encoding="utf-8")), given
    assert files and not [file for file in files if not (ROOT / file).exists()]
