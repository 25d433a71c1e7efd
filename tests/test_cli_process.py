"""The command line as a process of its own: entry points, encodings, readers that go away."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from test_cli import STATISTICS
from test_cli_refused import cut, refusal
from tiny import ANSWER, ASK, QUESTION

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Of a user with an empty cache directory, which the runs below share."""
    return os.environ | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }


def process(environment, *args, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


def test_module_and_script_are_the_same_command(environment, good):
    # All else by default.
    run = process(environment, "-m", "xinfer_jax", f"--model={good}", input=QUESTION + "\n")
    assert (run.returncode, run.stdout) == (0, ANSWER + "\n")
    assert [
        bool(re.fullmatch(p, line)) for p, line in zip(STATISTICS, run.stderr.splitlines(), strict=True)
    ] == [True] * len(STATISTICS)
    cached = sorted(Path(environment["XDG_CACHE_HOME"], "xinfer_jax").iterdir())
    assert cached  # compiled programs are kept by default
    run = process(environment, "scripts/generate.py", f"--model={good}", ASK, "--output=json")
    assert (run.returncode, run.stderr) == (0, "") and json.loads(run.stdout.splitlines()[-1])[
        "text"
    ] == ANSWER


def test_bad_input_in_a_real_process(environment, tmp_path):
    cut("model.safetensors")(tiny.write(tmp_path))
    for args in ([f"--model={tmp_path}", "--prompt=x"], ["--max_tokens=abc"]):
        run = process(environment, "-m", "xinfer_jax", *args)
        refusal((run.returncode, run.stdout, run.stderr))


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_reader_that_has_gone_is_no_traceback(environment, good, output):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        run = subprocess.run(
            [sys.executable, "-m", "xinfer_jax", f"--model={good}", ASK, f"--output={output}"],
            cwd=ROOT,
            env=environment,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert run.returncode == 1 and run.stderr == ""


def test_a_locale_without_the_characters(environment, good):
    run = process(environment | {"PYTHONIOENCODING": "ascii"}, "-m", "xinfer_jax", f"--model={good}", ASK)
    assert (run.returncode, run.stdout) == (0, "Yes, ??!\n") and "Traceback" not in run.stderr
