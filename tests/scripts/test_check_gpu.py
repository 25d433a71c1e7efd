"""scripts/check_gpu.py: child processes that hang, abort or print nonsense; sections on tiny shapes; its
messages without a GPU. How whole models are compared is in test_agreement.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from gpu import (
    kernel_sections,
    model_sections,
    section_cases,
    section_process as child,
    section_runner as runner,
)
from gpu.kernel_calls import kernel_calls
from gpu.section_runner import Section
from paths import ROOT, SCRIPTS

from xinfer_jax import kernels_pallas

pytestmark = [pytest.mark.full, pytest.mark.oldest]

SAY = """
import os, pathlib, sys, time
from functools import partial
from gpu.section_runner import add_record
first = int(sys.argv[1])
say = partial(add_record, pathlib.Path(sys.argv[2]), section=sys.argv[3])
def good(i):
    if i >= first:
        say(event="begin", case=i, name=f"case {i}")
        say(event="result", case=i, name=f"case {i}", figure=i / 3, ok=True)
"""
# What a child does in case 1, after a good case 0; if it goes on, case 2 is good again.
CHILDREN = {
    "good": "good(1); good(2); say(event='end')",
    "hangs": "time.sleep(600)",
    "ignores signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "aborts": "print('torn', file=sys.stderr, flush=True); os.abort()",
    "raises": "raise RuntimeError('what it was')",
    "exits": "sys.exit(0)",
    "leaves": "say(event='result', case=1, name='case 1', ok=None, error='CUDA_ERROR_ILLEGAL_ADDRESS');"
    " sys.exit(1)",
    "leaves a child": "import subprocess; subprocess.Popen(['sleep', '600']); os._exit(4)",
}


def run(tmp_path, names, seconds=20.0, minutes=2.0):
    """Runs sections with children of these kinds. Returns the records by section, and the failures."""
    sections = [name if isinstance(name, Section) else Section(name, seconds) for name in names]
    out = tmp_path / "out.jsonl"
    out.touch()

    def command(section, first, left):
        begin = "say(event='begin', case=1, name='case 1')"
        run_case = f"if first <= 1:\n    {begin}\n    {CHILDREN[section.name]}"
        text = f"{SAY}good(0)\n{run_case}\ngood(2)\nsay(event='end')"
        return [sys.executable, "-c", text, str(first), str(out), section.name]

    paths = os.pathsep.join([str(ROOT), str(SCRIPTS)])
    runner.run_sections(sections, command, out, minutes, os.environ | {"PYTHONPATH": paths})
    records = runner.read_records(out)
    by_section = {}
    for record in records:
        by_section.setdefault(record["section"], []).append(record)
    return by_section, [record for record in records if runner.is_failure(record)]


def last(by_section, name):
    return by_section[name][-1]


@pytest.mark.parametrize("name", ["hangs", "ignores signals"])
def test_a_child_that_hangs_is_killed_at_its_limit(tmp_path, name):
    start = time.monotonic()
    by_section, failed = run(tmp_path, [Section(name, 2), "good"])
    assert time.monotonic() - start < 60
    finished, died = by_section[name][:2]
    assert finished["ok"] is True and finished["figure"] == 0
    assert (
        died["name"] == "case 1"
        and died["error"] == "still running after 2 s: killed"
        and died["ok"] is False
    )
    assert last(by_section, name)["name"] == died["error"] and last(by_section, name)["ok"] is False
    assert last(by_section, "good")["name"] == "done" and failed


@pytest.mark.parametrize(
    "name, error, stderr",
    [
        ("aborts", "ended with exit code -6", "torn"),
        ("raises", "ended with exit code 1", "RuntimeError: what it was"),
        ("exits", "ended with exit code 0 before its last case", ""),
        ("leaves a child", "ended with exit code 4", ""),
    ],
)
def test_a_child_that_dies_fails_its_current_case(tmp_path, name, error, stderr):
    start = time.monotonic()
    by_section, failed = run(tmp_path, [name, "good"])
    assert time.monotonic() - start < 60
    cases = {record["name"]: record for record in by_section[name]}
    assert cases["case 0"]["ok"] and cases["case 2"]["ok"]  # the next child continues after it
    assert cases["case 1"]["error"].startswith(error) and stderr in cases["case 1"]["stderr"]
    assert last(by_section, name)["name"] == "done" and last(by_section, "good")["name"] == "done"
    assert [record["name"] for record in failed] == ["case 1"]


def test_a_child_that_asks_for_a_new_process_is_replaced(tmp_path):
    """A child asks for it after an error that ends the CUDA context."""
    by_section, failed = run(tmp_path, ["leaves"])
    assert [record["name"] for record in by_section["leaves"]] == ["case 0", "case 1", "case 2", "done"]
    assert not failed


def test_a_child_that_dies_before_its_first_case_ends_its_section(tmp_path):
    out = tmp_path / "out.jsonl"
    out.touch()
    command = [sys.executable, "-c", "import nothing_of_this_name"]
    runner.run_sections([Section("broken", 20)], lambda *_: command, out, 1)
    died, section = runner.read_records(out)
    assert died["name"] == "before its first case" and "nothing_of_this_name" in died["stderr"]
    assert section["name"].startswith("ended with exit code 1")
    assert runner.is_failure(died) and runner.is_failure(section)


def test_sections_without_time_are_listed_as_not_run(tmp_path):
    by_section, failed = run(tmp_path, ["good", Section("late", 20)], minutes=0.1)
    for name in ("good", "late"):
        (record,) = by_section[name]
        assert record["name"] == "not run" and record["why"].endswith("s were left")
    text = runner.format_table(runner.read_records(tmp_path / "out.jsonl"))
    assert "2 not run\n  good: not run  why 6 s were left\n  late: not run" in text
    assert not failed


def test_a_truncated_file_of_results_gives_the_same_table(tmp_path):
    run(tmp_path, ["good"])
    path = tmp_path / "out.jsonl"
    table = runner.format_table(runner.read_records(path))
    path.write_bytes(path.read_bytes() + b'{"event": "result", "na')
    assert runner.format_table(runner.read_records(path)) == table
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no results"):
        runner.read_records(path)


# --- a child's cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["mosaic", "triton", "tpu"])
def test_arguments_of_kernel_calls_can_be_drawn(impl):
    calls = [*kernel_calls(impl)]
    assert len({call.name for call in calls}) == len(calls) > 20
    for call in calls:
        args, _ = jax.eval_shape(call.arguments)
        assert jax.tree.leaves(args), call.name


def test_a_wrong_kernel_is_a_recorded_failure(monkeypatch):
    """A kernel that raises is a failure too, and so are results that are not finite."""
    (call, *_) = (call for call in kernel_calls("interpret") if call.kernel == "argmax")
    check = section_cases.Case("argmax", lambda: kernel_sections.compare(call))

    def run_with(argmax):
        monkeypatch.setattr(kernels_pallas, "run_kernel", lambda impl, kernel, x: argmax(x))
        return child.run_case(check)

    right = run_with(kernels_pallas.reference.argmax)
    assert right["ok"] is True and right["worst"] == 0 and right["tolerance"] == 1e-3 and right["compared"]
    assert run_with(lambda x: 150 + 0 * x[:, 0].astype("int32"))["ok"] is False
    raised = run_with(lambda x: 1 / 0)
    assert raised["ok"] is False and raised["error"] == "ZeroDivisionError: division by zero"
    assert child.jsonable({"a": np.float32("nan"), "b": (np.int64(3), {4})}) == {"a": "nan", "b": [3, "{4}"]}
    assert child.device_works()


# --- the program --------------------------------------------------------------------------------------------


def check_gpu(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Runs the script in a process that sees no GPU."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPTS / "check_gpu.py"), *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)


def test_check_gpu_without_a_gpu_exits_with_one_line(tmp_path):
    done = check_gpu(cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("check_gpu: no NVIDIA GPU here")
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'absl' else find(name, *rest)\n"
    )
    command = [sys.executable, str(SCRIPTS / "check_gpu.py")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, "check_gpu: absl missing here: pip install absl-py\n")


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--out=/nowhere/at/all.jsonl",), "--out: No such file or directory"),
        (("--out=README.md",), "--out: File exists README.md: name another file"),
        (("--sections=everything",), "--sections knows decode, references, prefill"),
        (("--report=README.md",), "README.md holds no results"),
        (("--minutes=-1",), "--minutes"),
    ],
)
def test_bad_flags_of_check_gpu_exit_with_one_line(flags, words):
    done = check_gpu(*flags)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and words in line


def test_every_section_has_its_cases():
    (line,) = check_gpu("--sections=everything").stderr.splitlines()
    names = line.split("--sections knows ")[1].split(", got")[0].split(", ")
    assert sorted(names) == sorted([*kernel_sections.SECTIONS["cuda"], *model_sections.SECTIONS])


def test_sections_on_tiny_shapes(tmp_path):
    """Emulated kernels, a model of one layer and another program; --report prints the same from the file."""
    done = check_gpu("--tiny", "--sections=head,logits,half_b", "--out=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = runner.read_records(tmp_path / "out.jsonl")
    assert [r["section"] for r in records if r["name"] == "done"] == ["machine", "head", "logits", "half_b"]
    (agreed,) = (r for r in records if "rms_decode" in r)
    assert agreed["ok"] and agreed["ids_compared"] >= 32 and agreed["tolerance"]["rms"] == 0.04
    timed = {r["by"]: r for r in records if r.get("shape", "").startswith("lm_head_argmax")}
    assert timed.keys() == {"mosaic", "xla"} and all(r["ms"] > 0 for r in timed.values())
    assert len([r for r in records if r.get("decode_tok/s_1", 0) > 0]) == 1
    assert any((tmp_path / "out.jsonl.cache").iterdir())
    again = check_gpu("--report=out.jsonl", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.strip() in done.stdout


def test_an_interrupted_run_prints_its_results(tmp_path):
    command = [sys.executable, str(SCRIPTS / "check_gpu.py"), "--tiny", "--out=out.jsonl"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("machine: device"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 130 and "[machine: interrupted  FAIL]" in rest
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["name"] == "interrupted"
