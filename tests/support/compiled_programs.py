"""Runs scripts/compile_programs.py, which compiles for GPUs that are not here."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT


def run(*flags: str) -> dict[str, Any]:
    """The JSON object that it prints. Skips the test where the plug-in or ptxas is missing."""
    done = subprocess.run(
        [sys.executable, "scripts/compile_programs.py", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
