"""A server whose engine a trainer pauses, and gives new weights while clients are served."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import jax
import numpy as np
import pytest
import serving
import tiny
from paths import ROOT

import xinfer_jax as xj
from xinfer_jax.engine.weight_receiver import receive_weights

ADMIN = dict(authorization="Bearer admin")
SHAPE = dict(rows=2, capacity=256, pages=20, chunk=128, warm_up=False)
PATHS = (
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("GET", "/weight_info"),
    ("POST", "/update_weights"),
)
ASK = dict(prompt="Hello", temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny.shallow_model()


def scaled(model, factor: float):
    return jax.tree.map(lambda x: np.asarray(x) * np.float32(factor), model.params)


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    """Checkpoints below "all". One is elsewhere."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, factor in (("all/step-1", 0.9), ("all/step-2", 0.8), ("elsewhere", 0.7)):
        xj.save_model(scaled(model, factor), model.config, root / name)
    deeper = tiny.shallow_model(2)
    xj.save_model(deeper.params, deeper.config, root / "all/deeper")
    os.symlink(root / "elsewhere", root / "all" / "link")
    shutil.copytree(root / "all/step-1", root / "all/linked_file")
    (root / "all/linked_file/model.safetensors").unlink()
    os.symlink(root / "elsewhere/model.safetensors", root / "all/linked_file/model.safetensors")
    return root


@pytest.fixture(scope="module")
def server(model, directory):
    how = dict(engine=xj.EngineOptions(**SHAPE), weight_dir=str(directory / "all"), admin_keys=(b"admin",))
    with serving.run_server(model, **how) as server:
        yield server


def call(server, method: str, path: str, body=None):
    status, found, _ = server.call(method, path, body, **ADMIN)
    return status, found


def update(server, **info):
    return call(server, "POST", "/update_weights", dict(update_info=info))


def start_answer(server, **more) -> tuple[threading.Thread, list]:
    """A request whose answer has begun, and its response, once it is there."""
    before = server.engine.stats.generated_tokens
    responses: list = []
    body = dict(ASK, max_tokens=200, **more)
    thread = threading.Thread(target=lambda: responses.append(server.ask("completion", **body)))
    thread.start()
    deadline = time.monotonic() + 60
    while server.engine.stats.generated_tokens == before and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread, responses


def test_weights_of_directories(server, model):
    first = server.ask("completion", **ASK)
    assert first["choices"][0]["weight_versions"] == [0]
    assert update(server, path="step-1") == (200, dict(message="Weights updated", weight_version=1))
    second = server.ask("completion", **ASK)
    assert second["choices"][0]["weight_versions"] == [1]
    jax.tree.map(np.testing.assert_array_equal, server.engine.model.params, scaled(model, 0.9))
    assert server.service.model.params is server.engine.model.params  # also of embeddings
    assert update(server, path="step-2", weight_version=12, mode="recompute")[1]["weight_version"] == 12
    assert call(server, "GET", "/weight_info") == (200, dict(weight_version=12))
    assert 'vllm:weight_version{model_name="tiny"} 12.0' in server.call("GET", "/metrics")[1]
    *others, last = server.events("chat", messages=[dict(role="user", content="Hi")], max_tokens=4)
    assert last["choices"][0]["weight_versions"] == [12]
    assert not any("weight_versions" in choice for event in others for choice in event["choices"])
    assert any("the engine has the weights of step-2, version 12" in line for line in server.log)
    assert server.idle()


def test_updates_that_are_rejected_change_nothing(server):
    own = server.engine.model.params
    for info, message in (
        *((dict(path=path), "is no directory below --weight_dir") for path in (
            "../elsewhere", "/etc", "link", "linked_file", "nothing", None, 5, "a\0b", "x" * 5000,
        )),
        (dict(path=""), "is no directory below --weight_dir"),  # the links in it lead out
        (dict(path="deeper"), "num_hidden_layers is 2 there, and 1 here"),
        (dict(path="step-1", mode="later"), "must be one of continue, wait, abort, recompute, got 'later'"),
        (dict(path="step-1", weight_version="a"), "must be a whole number from 0 on, got 'a'"),
        (dict(path="step-1", x=1), "'x' is no field here"),
    ):  # fmt: skip
        status, error = update(server, **info)
        assert status == 400 and message in error["error"]["message"], (info, error)
    for body in (dict(), dict(update_info="step-1"), dict(path="step-1")):
        assert call(server, "POST", "/update_weights", body)[0] == 400
    assert server.engine.model.params is own


def test_the_paths_need_a_key_of_an_admin(server):
    for method, path in PATHS:
        body = {} if path == "/update_weights" else None
        assert server.call(method, path, body)[0] == 401
        assert server.call(method, path, body, authorization="Bearer other")[0] == 401
    assert call(server, "GET", "/is_paused") == (200, dict(is_paused=False))


def slow_down(monkeypatch, engine) -> None:
    """Makes each step decode one token, and take 5 milliseconds or more."""
    core = engine.core
    step = core.step

    def slow_step(*args):
        time.sleep(0.005)
        return step(*args)

    monkeypatch.setattr(core._pacing, "record_decode", lambda *_: None)
    monkeypatch.setattr(core._pacing, "step_seconds", 1.0)
    monkeypatch.setattr(core, "step", slow_step)


def test_pauses(server, monkeypatch):
    assert update(server, path="step-2", weight_version=12)[0] == 200
    slow_down(monkeypatch, server.engine)
    for mode in ("abort", "wait", "keep"):
        thread, responses = start_answer(server)
        assert call(server, "POST", f"/pause?mode={mode}") == (200, dict(status="paused"))
        assert call(server, "GET", "/is_paused") == (200, dict(is_paused=True))
        if mode == "keep":
            assert update(server, path="step-1", weight_version=20)[0] == 200
            thread.join(0.1)
            assert not responses
            assert call(server, "POST", "/pause?mode=wait")[0] == 409
        else:
            thread.join(60)
        assert call(server, "POST", f"/pause?mode={mode}") == (200, dict(status="paused"))
        for _ in range(2):
            assert call(server, "POST", "/resume") == (200, dict(status="resumed"))
        thread.join(60)
        (choice,) = responses[0]["choices"]
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        assert choice["weight_versions"] == ([12, 20] if mode == "keep" else [12])
    assert call(server, "GET", "/is_paused") == (200, dict(is_paused=False))
    assert call(server, "POST", "/pause?mode=later")[0] == 400
    status, error = call(server, "POST", "/pause?clear_cache=true")
    assert status == 400 and error["error"]["param"] == "clear_cache"
    assert server.idle()


def test_weights_of_a_trainer(server, model, tmp_path):
    """The receiver is started as --weight_address starts it."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(b"x" * 32)
    tensors = xj.params.params_to_tensors(scaled(model, 0.6), model.config)
    with receive_weights(server.engine, "127.0.0.1:0", secret_file=str(file)) as receiver:
        assert xj.rollouts.send_weights(receiver.address, tensors, version=30, secret_file=str(file)) == 30
    assert server.ask("completion", **ASK)["choices"][0]["weight_versions"] == [30]
    assert call(server, "GET", "/weight_info") == (200, dict(weight_version=30))


def test_without_a_directory_or_keys(model):
    with serving.run_server() as loading:
        for method, path in PATHS:
            assert loading.call(method, path, {} if method == "POST" else None, **ADMIN)[0] == 401
    with serving.run_server(admin_keys=(b"admin",)) as loading:
        assert [call(loading, *path)[0] for path in PATHS] == [503] * len(PATHS)
    how = dict(engine=xj.EngineOptions(**SHAPE), admin_keys=(b"admin",))
    with serving.run_server(model, **how) as server:
        status, error = update(server, path="step-1")
        assert status == 404 and "the server needs --weight_dir" in error["error"]["message"]
        assert call(server, "POST", "/pause") == (200, dict(status="paused"))
        assert call(server, "POST", "/resume")[0] == 200
    with serving.run_server(model, has_own_engines=False, **how) as server:
        status, error = call(server, "POST", "/pause")
        assert status == 404 and "--peers" in error["error"]["message"]


@pytest.mark.full
def test_the_command_takes_weights_in_both_ways(tmp_path):
    model = xj.load_model()
    for name, content in (("secret", b"x" * 32), ("keys", b"admin")):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(content)
    xj.save_model(scaled(model, 0.9), model.config, tmp_path / "all/step-1")
    flags = [
        "--port=0",
        "--rows=2",
        "--capacity=256",
        "--pages=20",
        "--weight_address=127.0.0.1:0",
        f"--secret_file={tmp_path}/secret",
        f"--weight_dir={tmp_path}/all",
        f"--admin_key_file={tmp_path}/keys",
    ]
    command = [sys.executable, "scripts/serve.py", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    while not {"is ready", "trainers send"} <= {part for line in lines for part in line_parts(line)}:
        assert (line := process.stderr.readline()), lines
        lines.append(line)
    url = next(line for line in lines if "listening" in line).split()[-1]
    address = next(line for line in lines if "trainers send" in line).split()[-1]
    tensors = xj.params.params_to_tensors(scaled(model, 0.6), model.config)
    assert xj.rollouts.send_weights(address, tensors, version=3, secret_file=str(tmp_path / "secret")) == 3
    body = json.dumps(dict(update_info=dict(path="step-1"))).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer admin"}
    call = urllib.request.Request(f"{url}/update_weights", body, headers)
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert json.loads(answer.read()) == dict(message="Weights updated", weight_version=4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and "weights of version 3 have come" in process.stderr.read()


def line_parts(line: str) -> list[str]:
    return [part for part in ("is ready", "trainers send") if part in line]
