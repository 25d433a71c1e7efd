"""Runs programs that compile for GPUs and TPUs that are not here."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from paths import ROOT, SUPPORT
from run_script import device_environment


def run_support(name: str, *args: str) -> dict[str, Any]:
    """The JSON object that a program of tests/support prints. Skips the test where a plug-in does not compile
    without a device.
    """
    done = subprocess.run(
        [sys.executable, SUPPORT / f"{name}.py", *args],
        env=device_environment(1) | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "get_topology_desc" in done.stderr:
        pytest.skip("the plug-in does not compile without a device here")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def run(*flags: str) -> dict[str, Any]:
    """The JSON object that scripts/compile_programs.py prints. Skips the test where the plug-in or ptxas is
    missing.
    """
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
