"""WORKSPACE.md: its walks name functions that exist, and its packages are in the order of imports."""

import ast
import re

import pytest
from paths import ROOT
from test_structure import PACKAGES

pytestmark = pytest.mark.oldest

TEXT = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. \[[^\]]+\]\(([^)]+)\): `([\w.]+)`", TEXT, re.MULTILINE)


def test_the_walks_are_read():
    assert len(STEPS) == len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) >= 50


@pytest.mark.parametrize(("path", "name"), STEPS, ids=lambda x: x)
def test_a_step_names_what_its_file_defines(path, name):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    tables = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assert name in defined | {ast.unparse(target) for target in tables}


def test_steps_are_numbered_in_order():
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", TEXT, re.MULTILINE)]
    starts = [i for i, number in enumerate(numbers) if number == 1]
    assert len(starts) == 2
    first = numbers[: starts[1]]
    second = numbers[starts[1] :]
    assert first == [*range(1, len(first) + 1)] and second == [*range(1, len(second) + 1)]


def test_packages_are_in_the_order_of_imports():
    section = TEXT.partition("## The packages")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    names = [name.removesuffix(".py").rstrip("/") for row in rows for name in re.findall("`(.+?)`", row[0])]
    assert names == [name for name in PACKAGES if name != "__main__"]
    for row in rows:
        for name in re.findall("`(.+?)`", row[2]):
            folder = re.findall("`(.+?)`", row[0])[0]
            path = ROOT / "xinfer_jax" / (folder if folder.endswith("/") else "") / name
            assert path.is_file(), path


def test_paths_of_the_map_exist():
    paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT)
    assert not [path for path in paths if not (ROOT / path).exists()]
