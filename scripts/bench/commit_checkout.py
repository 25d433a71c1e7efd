"""A commit of this repository in a temporary folder, to be compared with the working tree: its checkout, the
checkpoints that both read, and a program that runs in either.
"""

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from script_paths import ROOT, SCRIPTS

from xinfer_jax.errors import InputError

# Of parity cases that are widened.
_SIZES = dict(hidden_size=128, intermediate_size=256, head_dim=32, moe_intermediate_size=64)
_LINEAR_SIZES = dict(linear_key_head_dim=32, linear_value_head_dim=32)


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


def start_in(
    checkout: Path, program: str, arguments: list[Any], environment: Mapping[str, str], **pipes: Any
) -> subprocess.Popen:
    """Starts scripts/PROGRAM of the working tree in the folder of a checkout, whose packages it imports.
    environment: variables that are added to this process's environment. pipes: arguments of
    `subprocess.Popen`.
    """
    path = os.pathsep.join([str(checkout), str(SCRIPTS)])
    command = [sys.executable, str(SCRIPTS / program), *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path} | environment, cwd=checkout, **pipes
    )


def widened(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns a parity case's config.json with widths at which quantized groups and blocks are whole."""
    sizes = _SIZES | _LINEAR_SIZES
    return hf | {name: size for name, size in sizes.items() if name in {"head_dim", *hf}}


def write_random_checkpoint(folder: Path, hf: dict[str, Any]) -> None:
    """Writes a checkpoint of this config.json with random weights, without a tokenizer. `tests/support` must
    be on `sys.path`.
    """
    import jax
    import tiny

    from xinfer_jax.families.naming import file_specs
    from xinfer_jax.families.reading import from_hf

    random = np.random.RandomState(0)
    weights = {}
    for spec in jax.tree.leaves(file_specs(from_hf(copy.deepcopy(hf)))):
        for name, shape in spec.tensor_shapes().items():
            weights[name] = random.standard_normal(shape).astype(np.float32) / 16
    tiny.write(folder, hf, weights=weights, with_tokenizer=False)
