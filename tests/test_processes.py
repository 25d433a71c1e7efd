"""Several processes that run one model, on this machine: their answers, and how they end where one does."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.cli import answer_flags, batch_flags, group

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from soak_processes_jobs import Process, free_port, job, until

SHAPE, LINES = dict(rows=2, capacity=256, pages=12), 80


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint of one layer with a tokenizer."""
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIG | dict(num_hidden_layers=1))


@pytest.fixture
def lines(tmp_path) -> Path:
    file = tmp_path / "in.jsonl"
    rows = (dict(prompt=f"the {i}", max_tokens=24, temperature=i % 2 * 0.8, seed=i) for i in range(LINES))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def ends(process: Process, code: int, line: str) -> None:
    """With this code, and one line of ours that fits."""
    found, _, err = process.end()
    said = [text for text in err.splitlines() if text.startswith("xinfer-jax")]
    assert found == code and "Traceback" not in err and len(said) == 1, (found, err)
    assert re.fullmatch(rf"xinfer-jax(-batch)?: {line}", said[0])


def test_generate_gives_the_tokens_of_one_process(command, model):
    args = (f"--model={model}", "--raw", "--output=json", "--max_tokens=20", "--temperature=0.8", "--seed=3")
    wanted = json.loads(command(*args, "--prompt=the sea")[1])
    with job("main", *args) as processes:
        processes[0].parent.stdin.write("the sea")  # process 0 alone reads it
        processes[0].parent.stdin.close()
        processes[0].parent.stdin = None
        found, other = (process.end(120) for process in processes)
    assert found[0] == other[0] == 0 and found[2] == "" and other[1:] == ("", "")
    assert [json.loads(found[1])[name] for name in ("tokens", "text")] == [wanted["tokens"], wanted["text"]]


def test_a_file_is_answered_as_by_one_process_though_one_is_killed(model, lines, tmp_path):
    one, out, logs = (tmp_path / name for name in ("one", "two", "logs"))
    xj.generate_file(xj.load_model(model), lines, one, raw=True, in_order=True, progress=False, **SHAPE)
    given = dict(model=model, input=lines, output=out, log_dir=logs, **SHAPE)
    args = [f"--{name}={value}" for name, value in given.items()] + ["--raw", "--in_order"]
    with job("batch", *args) as processes:
        until(lambda: out.exists() and out.read_bytes().count(b"\n") > 2, 120)
        os.kill(processes[1].child, signal.SIGKILL)
        for process in processes:
            ends(process, 1, rf"process 1 of 2 \(\S+\) was ended by SIGKILL: all have ended, see {logs}")
    assert 2 < out.read_bytes().count(b"\n") < LINES and (logs / "process-1.log").exists()
    with job("batch", *args) as processes:
        assert [process.end(120)[0] for process in processes] == [0, 0]
    assert out.read_bytes() == one.read_bytes()


def test_a_parent_has_no_jax():
    program = "import sys, xinfer_jax.cli.watch; assert not {'jax', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])


def test_one_that_never_comes(command, model):
    with job("main", f"--model={model}", "--prompt=x", "--start_seconds=1", count=3, come=2) as processes:
        for process in processes:
            ends(process, 1, r"process 2 of 3 \(not heard of\) did not come within 1 s")
    port = free_port()
    late = f"--coordinator=127.0.0.1:{port}", "--num_processes=2", "--process_id=1", "--start_seconds=1"
    said = f"xinfer-jax: process 0 of 2 (127.0.0.1:{port}) did not come within 1 s\n"
    assert command(*late, "--prompt=x") == (1, "", said)


def test_what_differs_is_refused_before_anything_is_loaded(model, tmp_path):
    other = tiny.write(tmp_path / "other", tiny.CONFIG | dict(num_hidden_layers=1))
    with open(other / "model.safetensors", "r+b") as file:  # another number, the same header
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    remedy = ": start all with the same flags, versions and checkpoint"
    cases = {
        r"--temperature is 0.5 on process 0 and 0.7 on process 1": ["--temperature=0.5", "--temperature=0.7"],
        r"--num_processes is 2 on process 0 and 3 on process 1": ["--num_processes=2", "--num_processes=3"],
        r"model.safetensors of --model is \w+ on process 0 and \w+ on process 1": [
            f"--model={model}", f"--model={other}",
        ],
    }  # fmt: skip
    for line, args in cases.items():
        each = {i: (arg,) for i, arg in enumerate(args)}
        with job("main", f"--model={model}", "--prompt=x", each=each) as processes:
            for process in processes:
                ends(process, 2, line + remedy)
    with job("main", "--prompt=x", each={1: (f"--model={tmp_path / 'none'}",)}) as processes:
        for process in processes:
            ends(process, 2, r"process 1 of 2 \(\S+\) cannot begin: .*none.*")


@pytest.mark.parametrize(
    "args, line",
    [
        (["--num_processes=2"], "--num_processes does nothing without --coordinator: give that too"),
        (["--coordinator=here"], "--coordinator=here must be HOST:PORT, or auto"),
        (["--coordinator=a:1"], "--num_processes is missing: give it, or --coordinator=auto on a cluster"),
        (
            ["--coordinator=a:1", "--num_processes=2", "--process_id=2"],
            "--process_id=2 must be below --num_processes=2",
        ),
    ],
)
def test_flags_that_make_no_sense(command, args, line):
    assert command("--prompt=x", *args) == (2, "", f"xinfer-jax: {line}\n")


def test_several_engines_are_one_process():
    batch_flags.PROGRAM.parse(["xinfer-jax-batch", "--coordinator=a:1", "--data_parallel=2"])
    with pytest.raises(xj.InputError, match="data_parallel=2 does not go with --coordinator"):
        group.job_of(batch_flags.PROGRAM.values)


def test_the_cluster_says_who_is_there(monkeypatch):
    """As `jax.distributed.initialize` finds it, in a process that imports jax; what is given overrules it."""
    slurm = dict(JOB_ID="77", STEP_NODELIST="node[3-4]", NTASKS="2", PROCID="1", LOCALID="0")
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    answer_flags.PROGRAM.parse(["xinfer-jax", "--coordinator=auto", "--num_processes=3"])
    host, port, processes, number = group.job_of(answer_flags.PROGRAM.values)
    assert (host, processes, number) == ("node3", 3, 1) and port > 1024
