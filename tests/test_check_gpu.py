"""scripts/check_gpu.py: all of it on tiny shapes, and what it says where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check_gpu(*flags: str) -> subprocess.CompletedProcess:
    """The script in a process that sees no GPU."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "scripts/check_gpu.py", *flags], cwd=ROOT, env=env, capture_output=True, text=True
    )


def test_without_gpu_it_says_so():
    done = check_gpu()
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("check_gpu: no NVIDIA GPU here")


@pytest.mark.slow
def test_smoke():
    done = check_gpu("--smoke", "--seed=0")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for section in ("limits", "correctness", "identities", "timings", "end_to_end"):
        assert results[section], section
    assert results["failed"] == [] and results["skipped"] == []
    checked = [
        case["ok"]
        for section in ("correctness", "identities", "timings", "end_to_end")
        for case in results[section]
    ]
    assert all(checked)


def test_out_of_time_it_skips_and_says_what():
    done = check_gpu("--smoke", "--seed=0", "--budget_s=0")
    results = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and results["failed"] == [] and "timings: all of it" in results["skipped"]
