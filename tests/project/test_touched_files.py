"""WORKSPACE's table of what to touch: the commit of each row touched the files that the row names."""

import re
import subprocess

import pytest
from paths import ROOT

pytestmark = pytest.mark.oldest

TEXT = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("what to touch\n")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]


def touched_by(commit: str) -> set[str]:
    """Returns the names of the files that a commit changed, without folders."""
    command = ["git", "show", "--name-only", "--format=", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no commit {commit} here: {done.stderr.strip()[:80]}")
    return {line.rpartition("/")[2] for line in done.stdout.splitlines()}


def test_the_table_is_read():
    assert len(ROWS) >= 15 and all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_commit_touched_the_files_of_its_row(row):
    _, text, commit = row
    paths = re.findall(r"`([\w/]+\.py)`", text)
    assert paths
    for path in paths:
        folders = (ROOT, ROOT / "xinfer_jax")
        assert any((folder / path).is_file() for folder in folders), f"{path} is not there"
    others = {path for path in paths if path != "scripts/make_golden.py"}  # which makes a file of the commit
    assert {path.rpartition("/")[2] for path in others} <= touched_by(commit)
