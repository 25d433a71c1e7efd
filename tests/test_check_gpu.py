"""scripts/check_gpu.py: what becomes of children that hang, abort or talk nonsense; sections on tiny shapes;
what it says where there is no GPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kernels_pallas

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import check_gpu_child as child  # noqa: E402
import check_gpu_kernels  # noqa: E402
import check_gpu_measure  # noqa: E402
import check_gpu_models  # noqa: E402
import check_gpu_runner as runner  # noqa: E402
from check_gpu_runner import Section  # noqa: E402

SAY = """
import json, os, sys, time
first = int(sys.argv[1])
def say(**message): print(json.dumps(message), flush=True)
def good(i):
    if i >= first:
        say(event="begin", case=i, name=f"case {i}")
        say(event="result", case=i, name=f"case {i}", figure=i / 3, ok=True)
"""
# What a child does after a good case 0, as case 1; where it can go on, case 2 is good again.
CHILDREN = {
    "good": "good(1); good(2); say(event='end')",
    "hangs": "time.sleep(600)",
    "ignores signals": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
    "aborts": "print('torn', file=sys.stderr, flush=True); os.abort()",
    "raises": "raise RuntimeError('what it was')",
    "exits": "sys.exit(0)",
    "garbage": "os.write(1, b'{\"event\": \"res\\n\\xff\\x00\\n[1]\\n' + b'[' * 90000 + b'\\n');"
    " say(event='result', case=1, name='case 1', ok=True); good(2); say(event='end')",
    "leaves": "say(event='result', case=1, name='case 1', ok=None, error='CUDA_ERROR_ILLEGAL_ADDRESS');"
    " say(event='leaving'); sys.exit(70)",
    "leaves a child": "import subprocess; subprocess.Popen(['sleep', '600']); os._exit(4)",
}


def run(tmp_path, names, seconds=20.0, minutes=2.0):
    """The runner on children of that kind: its records, by section."""
    sections = [name if isinstance(name, Section) else Section(name, seconds) for name in names]
    records = runner.Records(tmp_path / "out.jsonl")

    def command(section, first, left):
        kind = section.name.removeprefix("optional ")
        optional = section.name.startswith("optional ")
        begin = f"say(event='begin', case=1, name='case 1', optional={optional})"
        text = f"{SAY}good(0)\nif first <= 1:\n    {begin}\n    {CHILDREN[kind]}\ngood(2)\nsay(event='end')"
        return [sys.executable, "-c", text, str(first)]

    runner.run(sections, command, records, minutes)
    found = {}
    for record in runner.read(tmp_path / "out.jsonl"):
        found.setdefault(record["section"], []).append(record)
    return found, records


def last(found, name):
    return found[name][-1]


@pytest.mark.parametrize("name", ["hangs", "ignores signals"])
def test_a_child_that_hangs_is_killed_at_its_limit(tmp_path, name):
    start = time.monotonic()
    found, records = run(tmp_path, [Section(name, 2), "good"])
    assert time.monotonic() - start < 10
    kept, died = found[name][:2]
    assert kept["ok"] is True and kept["figure"] == 0
    assert (
        died["name"] == "case 1"
        and died["error"] == "still running after 2 s: killed"
        and died["ok"] is False
    )
    assert last(found, name)["name"] == died["error"] and last(found, name)["ok"] is False
    assert last(found, "good")["name"] == "done" and records.failed


@pytest.mark.parametrize(
    "name, error, stderr",
    [
        ("aborts", "killed by signal 6", "torn"),
        ("raises", "ended with exit code 1", "RuntimeError: what it was"),
        ("exits", "ended with exit code 0, not through", ""),
        ("leaves a child", "ended with exit code 4", ""),
    ],
)
def test_a_child_that_dies_costs_the_case_it_was_in(tmp_path, name, error, stderr):
    start = time.monotonic()
    found, records = run(tmp_path, [name, "good"])
    assert time.monotonic() - start < 10
    cases = {record["name"]: record for record in found[name]}
    assert cases["case 0"]["ok"] and cases["case 2"]["ok"]  # the next child goes on behind it
    assert cases["case 1"]["error"].startswith(error) and stderr in cases["case 1"]["stderr"]
    assert last(found, name)["name"] == "done" and last(found, "good")["name"] == "done"
    assert [record["name"] for record in records.failed] == ["case 1"]


def test_a_baseline_that_dies_is_no_failure(tmp_path):
    found, records = run(tmp_path, ["optional aborts"])
    assert found["optional aborts"][1]["error"] == "killed by signal 6" and not records.failed


def test_a_child_that_leaves_is_followed_by_another(tmp_path):
    """As after an error that ends the CUDA context."""
    found, records = run(tmp_path, ["leaves"])
    assert [record["name"] for record in found["leaves"]] == ["case 0", "case 1", "case 2", "done"]
    assert not records.failed


def test_garbage_is_counted_and_shown_and_believed_in_nothing(tmp_path):
    found, records = run(tmp_path, ["garbage"])
    assert [record["name"] for record in found["garbage"]] == [
        "case 0",
        "garbage",
        "case 1",
        "case 2",
        "done",
    ]
    assert last(found, "garbage")["garbage_lines"] == 5  # the longest line is taken in two pieces
    assert not records.failed


def test_a_child_that_dies_before_its_first_case_ends_its_section(tmp_path):
    records = runner.Records(tmp_path / "out.jsonl")
    sections = [Section("broken", 20)]
    runner.run(sections, lambda *_: [sys.executable, "-c", "import nothing_of_this_name"], records, 1)
    died, section = records.kept
    assert died["name"] == "before its first case" and "nothing_of_this_name" in died["stderr"]
    assert section["name"].startswith("ended with exit code 1") and len(records.failed) == 2


def test_what_does_not_fit_is_listed_as_not_run(tmp_path):
    sections = ["good", Section("late", 20), Section("lacking", 20, ("nothing_of_this_name",))]
    found, records = run(tmp_path, sections[2:], minutes=1)
    assert "nothing_of_this_name missing here: pip install" in found["lacking"][0]["why"]
    (tmp_path / "out.jsonl").unlink()
    found, records = run(tmp_path, sections[:2], minutes=0.1)
    for name in ("good", "late"):
        (record,) = found[name]
        assert record["name"] == "not run" and record["why"].endswith("s were left")
    text = runner.table(records.kept)
    assert "2 not run\n  good: not run  why 6 s were left\n  late: not run" in text
    assert not records.failed


def test_a_report_survives_a_file_that_was_cut_off(tmp_path):
    _, records = run(tmp_path, ["good"])
    path = tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event": "result", "na')
    assert runner.table(runner.read(path)) == runner.table(records.kept)
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no results"):
        runner.read(path)


# --- a child's cases ----------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_a_recorded_failure(monkeypatch):
    """And one that raises, and numbers that are none."""
    case = check_gpu_kernels.argmax_case(np.random.default_rng(0), 5, 300)
    check = check_gpu_measure.Case(
        "argmax", lambda: check_gpu_kernels.compared(None, "argmax", "xla", "float32", [case])
    )
    monkeypatch.setattr(kernels_pallas, "run", lambda impl, kernel, x: kernels_pallas.reference.argmax(x))
    right = child.outcome(check)
    assert right["ok"] is True and right["worst"] == 0 and right["tolerance"] == 1e-5 and right["compared"]
    monkeypatch.setattr(kernels_pallas, "run", lambda impl, kernel, x: 299 + 0 * x[:, 0].astype("int32"))
    assert child.outcome(check)["ok"] is False
    monkeypatch.setattr(kernels_pallas, "run", lambda *args: 1 / 0)
    raised = child.outcome(check)
    assert raised["ok"] is False and raised["error"] == "ZeroDivisionError: division by zero"
    assert child.outcome(check._replace(facts={"optional": True}))["ok"] is None
    assert child.jsonable({"a": np.float32("nan"), "b": (np.int64(3), {4})}) == {"a": "nan", "b": [3, "{4}"]}
    assert child.sound()


# --- the program --------------------------------------------------------------------------------------------


def check_gpu(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The script in a process that sees no GPU."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *flags]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_without_gpu_it_says_so(tmp_path):
    done = check_gpu(cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("check_gpu: no NVIDIA GPU here")
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'absl' else find(name, *rest)\n"
    )
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, "check_gpu: absl missing here: pip install absl-py\n")


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--out=/nowhere/at/all.jsonl",), "--out: No such file or directory"),
        (("--out=README.md",), "--out: File exists README.md: name another file"),
        (("--sections=everything",), "--sections knows decode, prefill"),
        (("--report=README.md",), "README.md holds no results"),
        (("--minutes=-1",), "--minutes"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, words):
    done = check_gpu(*flags)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and words in line


def test_every_section_has_its_cases():
    (line,) = check_gpu("--sections=everything").stderr.splitlines()
    names = line.split("--sections knows ")[1].split(", got")[0].split(", ")
    assert set(names) == {*check_gpu_kernels.SECTIONS, *check_gpu_models.SECTIONS}


@pytest.mark.slow
def test_sections_on_tiny_shapes(tmp_path):
    """Kernels emulated, a model of one layer; the table again from the file."""
    done = check_gpu("--tiny", "--sections=head,half_b", "--out=out.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = runner.read(tmp_path / "out.jsonl")
    assert [r["section"] for r in records if r["name"] == "done"] == ["machine", "head", "half_b"]
    checked = [r for r in records if "tolerance" in r]
    assert len(checked) == 3 and all(r["ok"] for r in checked)  # two oracles, and ids by kernels and by xla
    timed = {r["by"]: r for r in records if r.get("shape", "").startswith("lm_head_argmax")}
    assert timed.keys() == {"mosaic", "xla"} and all(r["ms"] > 0 for r in timed.values())
    rates = [r["decode_tok/s"] for r in records if "decode_tok/s" in r]
    assert len(rates) == 2 and min(rates) > 0
    assert any((tmp_path / "out.jsonl.cache").iterdir())
    again = check_gpu("--report=out.jsonl", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.strip() in done.stdout


def test_interrupted_it_prints_what_it_has(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), "--tiny", "--out=out.jsonl"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("machine: device"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 130 and "[machine: interrupted  FAIL]" in rest
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])["name"] == "interrupted"
