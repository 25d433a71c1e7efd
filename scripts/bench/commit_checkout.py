"""A commit of this repository in a temporary folder, to be measured beside the working tree."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from script_paths import ROOT

from xinfer_jax.errors import InputError


@contextlib.contextmanager
def checkout_of(commit: str, folder: Path) -> Iterator[Path]:
    """Inside, the commit is checked out in this folder, which must not exist.

    Raises:
        InputError: there is no such commit.
    """
    git = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run([*git, "add", "--detach", str(folder), commit], capture_output=True, text=True)
    if added.returncode:
        raise InputError(f"--base={commit} is no commit of this repository: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)
