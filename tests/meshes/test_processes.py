"""Several processes that run one model, on this machine: their answers, and how all end when one ends."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny
from paths import ROOT, SUPPORT
from process_jobs import Process, free_port, job, wait_until
from random_adapters import random_adapter

import xinfer_jax as xj
from xinfer_jax.cli import answer_flags, batch_flags, process_group
from xinfer_jax.engine import controller
from xinfer_jax.generation.validation import validate_call
from xinfer_jax.processes import channel, codec, coordinator, secret
from xinfer_jax.processes.control_channel import ControlChannel

pytestmark = [pytest.mark.full, pytest.mark.oldest]

SHAPE = dict(rows=2, capacity=256, pages=12)
LINES = 40
SECRET = b"s" * 32
OTHER = b"o" * 32


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The folder of the user's own secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint of one layer with a tokenizer."""
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.CONFIG | dict(num_hidden_layers=1))


@pytest.fixture
def lines(tmp_path) -> Path:
    file = tmp_path / "in.jsonl"
    texts = [f"{'abcdef'[i % 6] * 130} the {i}" for i in range(LINES)]  # six prefixes of two pages
    rows = [dict(prompt=text, max_tokens=24, temperature=i % 2 * 0.8, seed=i) for i, text in enumerate(texts)]
    rows = [row | (dict(adapter="a") if i % 3 == 1 else {}) for i, row in enumerate(rows)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, dict(prompt="")]))
    return file


def assert_ends(process: Process, code: int, line: str) -> None:
    """Asserts the exit code of a process and its one line on standard error."""
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


def test_batch_resumes_after_a_killed_process_with_the_output_of_one_process(model, lines, tmp_path):
    one, out, logs, adapter = (tmp_path / name for name in ("one", "two", "logs", "adapter"))
    loaded = xj.load_model(model)
    xj.lora.save_adapter(random_adapter(loaded.config, 0, 2), loaded.config, adapter)
    adapters = dict(a=adapter)
    how = dict(raw=True, in_order=True, progress=False, adapters=adapters)
    xj.generate_file(loaded, lines, one, **how, **SHAPE)
    given = dict(
        model=model, input=lines, output=out, log_dir=logs, host_pages=30, adapter=f"a={adapter}", **SHAPE
    )
    args = [f"--{name}={value}" for name, value in given.items()] + ["--raw", "--in_order"]
    with job("batch", *args) as processes:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") > 2, 120)
        known = secret.load_secret(None, "127.0.0.1")
        contents = (
            Path(f"/proc/{processes[1].child}/{name}").read_bytes() for name in ("environ", "cmdline")
        )
        assert not any(known in data for data in contents)
        os.kill(processes[1].child, signal.SIGKILL)
        for process in processes:
            assert_ends(
                process, 1, rf"process 1 of 2 \(\S+\) was ended by SIGKILL: all have ended, see {logs}"
            )
    assert 2 < out.read_bytes().count(b"\n") < LINES and (logs / "process-1.log").exists()
    with job("batch", *args) as processes:
        ended = [process.end(120) for process in processes]
    assert [code for code, _, _ in ended] == [1, 1] and not ended[1][2]  # in order; one line is an error
    assert ended[0][2].splitlines()[-1].endswith("1 lines of the output have an error in place of an answer")
    assert out.read_bytes() == one.read_bytes()


def test_a_parent_does_not_import_jax():
    program = "import sys, xinfer_jax.cli.process_group; assert not {'jax', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_process_that_never_connects(command, model):
    with job(
        "main", f"--model={model}", "--prompt=x", "--start_seconds=1", count=3, num_started=2
    ) as processes:
        for process in processes:
            assert_ends(process, 1, r"process 2 of 3 \(never connected\) did not connect within 1 s")
    port = free_port()
    late = f"--coordinator=127.0.0.1:{port}", "--num_processes=2", "--process_id=1", "--start_seconds=1"
    said = f"xinfer-jax: process 0 of 2 (127.0.0.1:{port}) did not answer within 1 s\n"
    assert command(*late, "--prompt=x") == (1, "", said)


def test_different_flags_or_files_raise_before_loading(model, tmp_path):
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
                assert_ends(process, 2, line + remedy)
    with job("main", "--prompt=x", each={1: (f"--model={tmp_path / 'none'}",)}) as processes:
        for process in processes:
            assert_ends(process, 2, r"process 1 of 2 \(\S+\) cannot begin: .*none.*")


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
def test_bad_process_flags(command, args, line):
    assert command("--prompt=x", *args) == (2, "", f"xinfer-jax: {line}\n")


def test_data_parallel_with_a_coordinator_raises():
    batch_flags.PARSER.parse(["xinfer-jax-batch", "--coordinator=a:1", "--data_parallel=2"])
    with pytest.raises(xj.InputError, match="data_parallel=2 does not go with --coordinator"):
        process_group.member_from_flags(batch_flags.PARSER.values)


def test_coordinator_auto_reads_the_cluster(monkeypatch):
    """The cluster is read as `jax.distributed.initialize` reads it. Flags override the cluster's values."""
    slurm = dict(JOB_ID="77", STEP_NODELIST="node[3-4]", NTASKS="2", PROCID="1", LOCALID="0")
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    answer_flags.PARSER.parse(["xinfer-jax", "--coordinator=auto", "--num_processes=3"])
    host, port, processes, number = process_group.member_from_flags(answer_flags.PARSER.values)
    assert (host, processes, number) == ("node3", 3, 1) and port > 1024


class Store:
    """jax's coordination service in one process."""

    def __init__(self):
        self.values = dict[str, str]()
        self.news = threading.Condition()

    def key_value_set(self, key, value):
        with self.news:
            self.values[key] = value
            self.news.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.news:
            assert self.news.wait_for(lambda: key in self.values, 10)
            return self.values[key]


@pytest.fixture
def run():
    """Yields the values that `jax.distributed` knows about a run of three processes, in each of them."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        address = f"127.0.0.1:{service.getsockname()[1]}"
        about = dict(client=Store(), coordinator_address=address, num_processes=3)
        yield [SimpleNamespace(process_id=i, **about) for i in range(3)]


def test_process_0_reaches_all_others_in_order(run):
    with ThreadPoolExecutor(3) as pool:
        leader, *others = pool.map(lambda each: ControlChannel(each, "run", SECRET), run)
        for number in range(300):
            leader.send("place", [number, "é" * number], [])
        for other in others:
            assert [other.receive() for _ in range(300)] == [["place", [i, "é" * i], []] for i in range(300)]
        found = [pool.submit(others[0].agree, ""), pool.submit(others[1].agree, "bad")]
        assert leader.agree("") == "bad" and [each.result() for each in found] == ["bad", "bad"]
    leader.end()
    with pytest.raises(xj.InputError, match=r"process 0 is gone \(its connection was lost\)"):
        others[0].receive()


def test_processes_of_other_secrets_or_runs_do_not_connect(run):
    with ThreadPoolExecutor(3) as pool:
        leader = pool.submit(ControlChannel, run[0], "run", SECRET)
        for name, secret_2 in (("run", OTHER), ("another run", SECRET)):
            run[1].client.values[name] = run[1].client.blocking_key_value_get("run", 0)
            with pytest.raises(xj.InputError, match="has another secret: give all processes the same"):
                ControlChannel(run[1], name, secret_2)
        others = [ControlChannel(each, "run", SECRET) for each in run[1:]]
        leader.result().send("place")
    assert [other.receive() for other in others] == [["place"], ["place"]]


class Harm:
    """Unpickled it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_messages_of_raw_bytes():
    events = SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = channel.Listener(server, events.put, SECRET)
        other = channel.connect(*server.getsockname(), lambda _: None, SECRET)
        for data in (b"", b"\0a\0", bytes(range(256)) * 1000):
            other.send_bytes("part", memoryview(data))
            (_, name, (found,)) = events.get(timeout=10)
            assert name == "part" and bytes(found) == data
        other.send("place", 1)
        assert events.get(timeout=10)[1:] == ("place", [1])
        other.send_encoded(b"\0part")
        (_, name, (why,)) = events.get(timeout=10)
        assert name == channel.GONE and "bytes without a name" in why
        listener.close()


@pytest.mark.parametrize("forged", ["a pickle", "sent before", "another secret", "other content"])
def test_messages_without_a_valid_signature_end_the_connection_and_run_nothing(tmp_path, forged):
    events = SimpleQueue()
    harm = tmp_path / "harm"
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = channel.Listener(server, events.put, SECRET)
        other = channel.connect(*server.getsockname(), lambda _: None, SECRET)
        sent = unittest.mock.Mock(wraps=other._connection)
        other._connection = sent
        other.send("place", 1)
        assert events.get(timeout=10)[1:] == ("place", [1])
        ((message,), _) = sent.sendall.call_args
        if forged == "another secret":
            other._sign = channel._signer(OTHER)
            other.send("place", 2)
        elif forged == "other content":
            sign = other._sign
            other._sign = lambda *parts: sign(*(part.replace(b"2", b"3") for part in parts))
            other.send("place", 2)
        elif forged == "sent before":
            sent.sendall(message)
        else:
            content = pickle.dumps(Harm(harm))
            sent.sendall(bytes(secret.SIGNATURE_SIZE) + len(content).to_bytes(4) + content)
        assert events.get(timeout=10)[1:] == (channel.GONE, ["it sent a message with a wrong signature"])
        assert events.empty() and not harm.exists()
        listener.close()


def test_a_proof_of_the_secret_that_comes_slowly_is_cut_off(monkeypatch):
    monkeypatch.setattr(channel, "_PROOF_SECONDS", 0.1)
    own, other = socket.socketpair()

    def send_slowly():
        with contextlib.suppress(OSError):
            for _ in range(2 * secret.SIGNATURE_SIZE):
                other.send(b"x")
                time.sleep(0.02)

    with own, other, ThreadPoolExecutor() as pool:
        pool.submit(send_slowly)
        with pytest.raises(TimeoutError):
            channel.Channel(own, lambda _: None, SECRET, listens=True)


def test_messages_encode_a_closed_set_of_values():
    config = xj.load_model().config
    values = [None, True, 3, -float("inf"), "é", [1, [2.5]], {1: [2], "a": None}]
    assert codec.decode_message(codec.encode_message(values)) == values
    array = codec.decode_message(codec.encode_message(np.arange(6, dtype=np.int16).reshape(2, 3)))
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]] and array.dtype == np.int16
    key = jax.random.split(jax.random.key(5), 1)
    decoded = codec.decode_message(codec.encode_message(key))
    assert jax.random.key_data(decoded).tolist() == jax.random.key_data(key).tolist()
    sampling = xj.SamplingConfig(
        temperature=np.float32(0.5), top_k=7, allowed_token_ids={3, 4}, logit_bias={3: -np.inf}
    )
    options = xj.GenerateOptions(max_tokens=9, sampling=sampling, stop_token_ids=(8,), logprobs=2)
    call = validate_call(xj.load_model().params, config, [[5, 6]], options, jax.random.key(0))
    decoded = codec.decode_message(codec.encode_message(call))
    decoded = dataclasses.replace(decoded, config=config)
    assert (decoded.prompts, decoded.end_ids) == (call.prompts, call.end_ids)
    assert decoded.options.max_tokens == 9 and decoded.options.logprobs == 2 and decoded.params == {}
    assert jax.random.key_data(decoded.key).tolist() == jax.random.key_data(call.key).tolist()
    asked = xj.RequestOptions(priority=3, client="a", adapter="b", live=False)
    assert codec.decode_message(codec.encode_message(asked)) == asked
    found = decoded.options.sampling
    assert (found.temperature, found.top_k, found.logit_bias) == (0.5, 7, {3: -np.inf})
    assert sorted(found.allowed_token_ids) == [3, 4]
    every = dict.fromkeys((f.name for f in dataclasses.fields(sampling)), 0.5) | dict(
        logit_bias=np.zeros(4, np.float32),
        allowed_token_ids=[3],
        forbidden_token_ids=[4],
        bad_words_ids=[[5, 6]],
    )
    decoded = codec.decode_message(codec.encode_message(xj.SamplingConfig(**every)))
    assert vars(decoded).pop("logit_bias").tolist() == every.pop("logit_bias").tolist()
    assert vars(decoded) == every
    array_of_objects = b'{"ndarray": ["", "object", [1], ""]}'
    unknown_keys = b'{"Array": ["x", "int8", [0], ""]}'
    for bad in (b"{", b'{"__reduce__": []}', array_of_objects, unknown_keys, b"{}"):
        with pytest.raises(xj.InputError, match="cannot be decoded"):
            codec.decode_message(bad)
    with pytest.raises(TypeError, match="cannot be sent"):
        codec.encode_message(Harm(None))
    with pytest.raises(AttributeError, match="not a device method"):
        controller.Leader(None, None).__getattr__("rows")


def test_a_parent_rejects_connections_without_the_secret():
    job = coordinator.GroupMember("127.0.0.1", free_port(), 2, 0)
    hub = coordinator.Coordinator(job, 60, SECRET)
    events = SimpleQueue()
    with socket.create_connection((job.host, job.port), 10) as stranger:
        stranger.sendall(codec.encode_message(["register", 1, "x"]) * 9)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    with pytest.raises(xj.InputError, match="another secret"):
        channel.connect(job.host, job.port, events.put, OTHER)
    wait_until(lambda: hub._listener.rejected == 2)
    assert not hub._channels and not hub._failures
    other = channel.connect(job.host, job.port, events.put, SECRET)
    other.send("register", 1, "here")
    wait_until(lambda: 1 in hub._channels)
    hub._channels[1].send("signal", 2)
    assert events.get(timeout=120) == (other, "signal", [2])
    other._sign(b"")  # as if a message had been taken out
    other.send("ended", 0, "", None)
    wait_until(lambda: hub._failures)
    assert "is gone (it sent a message with a wrong signature)" in hub._failures[0][2]


def test_unauthenticated_connections_do_not_block_a_process(monkeypatch):
    monkeypatch.setattr(channel, "_UNPROVED", 3)
    job = coordinator.GroupMember("127.0.0.1", free_port(), 2, 0)
    hub = coordinator.Coordinator(job, 60, SECRET)
    with contextlib.ExitStack() as open_ones:
        strangers = [
            open_ones.enter_context(socket.create_connection((job.host, job.port), 5)) for _ in range(5)
        ]
        channel.connect(job.host, job.port, lambda _: None, SECRET).send("register", 1, "here")
        wait_until(lambda: 1 in hub._channels)
        for stranger in strangers[:3]:  # the oldest were closed
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        assert list(hub._channels) == [1] and hub._listener.rejected == 0
        wait_until(lambda: len(hub._listener._unproved) == 2)


def test_the_coordinator_listens_only_on_its_address():
    with channel.listen("127.0.0.2", 0) as server, pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.getsockname()[1]), 10)
    with pytest.raises(xj.InputError, match="--coordinator=192.0.2.1:9 cannot be listened on"):
        channel.listen("192.0.2.1", 9)


def test_shared_secrets_of_processes(tmp_path, monkeypatch, command, cache):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert secret.load_secret(str(file), "10.0.0.1") == SECRET
    monkeypatch.setenv(secret.SECRET_VARIABLE, str(file))
    assert secret.load_secret(None, "10.0.0.1") == SECRET
    monkeypatch.delenv(secret.SECRET_VARIABLE)
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(xj.InputError, match="may be read or written by others: chmod 600"):
            secret.load_secret(str(file), "10.0.0.1")
    file.chmod(0o600)
    others = os.stat_result((0o100600, 0, 0, 1, os.geteuid() + 1, *[0] * 5))
    with monkeypatch.context() as patch, pytest.raises(xj.InputError, match="belongs to another user"):
        patch.setattr(os, "fstat", lambda _: others)
        secret.load_secret(str(file), "10.0.0.1")
    with monkeypatch.context() as patch:
        roots = os.stat_result((0o100600, 0, 0, 1, 0, *[0] * 5))
        patch.setattr(os, "fstat", lambda _: roots)
        assert secret.load_secret(str(file), "10.0.0.1") == SECRET
    file.write_bytes(SECRET[1:])
    with pytest.raises(xj.InputError, match="32 to 4096 bytes, and has 31"):
        secret.load_secret(str(file), "10.0.0.1")
    with pytest.raises(xj.InputError, match="cannot be read: No such file"):
        secret.load_secret(f"{file}.none", "10.0.0.1")
    code, _, err = command("--prompt=x", "--coordinator=10.0.0.1:9", "--num_processes=2", "--process_id=0")
    assert code == 2 and "processes that meet at 10.0.0.1 need a secret" in err and "--secret_file" in err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:  # the first creates it
        found = {*pool.map(lambda _: secret.load_secret(None, "127.0.0.1"), range(8))}
    (own,) = (tmp_path / "xinfer_jax/processes").iterdir()
    assert len(found) == 1 and own.stat().st_mode & 0o777 == 0o600
    own.parent.chmod(0o755)
    with pytest.raises(xj.InputError, match="mode 0700"):
        secret.load_secret(None, "::1")


def run_two(*arguments) -> list[str]:
    """Returns the output of two Python processes. "{}" in their arguments is the number of the process."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    started = []
    for i in range(2):
        command = [sys.executable, *(str(argument).replace("{}", str(i)) for argument in arguments)]
        environment = os.environ | dict(JAX_PLATFORMS="cpu", PYTHONPATH=path)
        pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), [err[-2000:] for _, err in ended]
    return [out for out, _ in ended]


SAVING = """
import sys
import jax
import xinfer_jax as xj
from xinfer_jax.formats import tensor_files

address, number, source, target = sys.argv[1:]
jax.distributed.initialize(address, 2, int(number))
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
model = xj.load_model(source, "float32", mesh=mesh)
xj.save_model(model.params, model.config, target + "/out", tokenizer=model.tokenizer, max_shard_bytes=50_000)


def no_space(*args, **options):
    raise OSError(28, "No space left on device")


tensor_files.open = no_space
try:
    xj.save_model(model.params, model.config, target + "/full")
except xj.InputError as error:
    print(error)
"""


def test_a_model_of_two_processes_is_saved(model, tmp_path):
    """One process writes what both have; where its disk is full, both say so."""
    outs = run_two("-c", SAVING, f"127.0.0.1:{free_port()}", "{}", model, tmp_path)
    assert "No space left on device" in outs[0] and "the first process could not save" in outs[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (saved, wanted) = (xj.load_model(path, "float32") for path in (tmp_path / "out", model))
    jax.tree.map(np.testing.assert_array_equal, saved.params, wanted.params)
    assert saved.config == wanted.config and saved.tokenizer.encode("hi") == wanted.tokenizer.encode("hi")


def test_new_weights_in_all_processes_or_none():
    """Host arrays and arrays of both processes. A tree that is wrong in one of them, or in both."""
    outs = run_two(SUPPORT / "update_in_processes.py", free_port(), "{}")
    first, second = (json.loads(out.splitlines()[-1]) for out in outs)
    assert second[0].startswith("process 0 calls update first")
    assert first == second[1:] and len(first) == 2
    assert (
        first[0].startswith("process 1: the new parameters lack layers.1.") and "final_norm has" in first[1]
    )
