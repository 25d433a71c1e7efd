"""New weights of a running engine from trainers in other processes."""

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.engine.weight_receiver import WeightReceiver
from xinfer_jax.processes.channel import connect, listen
from xinfer_jax.processes.secret import load_secret
from xinfer_jax.processes.tensor_stream import TensorStream

pytestmark = pytest.mark.oldest

TRAINER = """
import jax, sys
import xinfer_jax as xj
sys.path[:0] = sys.argv[3:]
import tiny
model = tiny.shallow_model()
params = jax.tree.map(lambda x: x * 0.5, model.params)
print(xj.rollouts.send_weights(sys.argv[1], xj.params.params_to_tensors(params, model.config),
secret_file=sys.argv[2]))
"""


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("secret") / "secret"
    return write_secret(file)


def write_secret(file: Path) -> str:
    file.touch(0o600)
    file.write_bytes(secrets.token_hex(32).encode())
    return str(file)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()


@pytest.fixture(scope="module")
def engine(model):
    with xj.Engine(model, rows=2, capacity=128, chunk=64, pages=8) as engine:
        yield engine


@pytest.fixture
def receiver(engine, secret_file):
    with xj.rollouts.receive_weights(engine, "127.0.0.1:0", secret_file=secret_file) as receiver:
        yield receiver


def scaled(model, factor: float):
    return jax.tree.map(lambda x: np.asarray(x) * np.float32(factor), model.params)


def assert_equal(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_weights_come_while_the_engine_answers(engine, model, receiver, secret_file):
    running = engine.submit([5, 6, 7], xj.GenerateOptions(max_tokens=90, eos_token_ids=()))
    new = scaled(model, 0.9)
    tensors = xj.params.params_to_tensors(new, model.config)
    version = xj.rollouts.send_weights(receiver.address, tensors, version=3, secret_file=secret_file)
    assert version == engine.version == 3
    assert_equal(engine.model.params, new)
    assert set(running.result().token_versions[0]) <= {0, 3}
    newer = scaled(model, 0.8)
    pairs = (
        (name, jax.numpy.array(x)) for name, x in xj.params.params_to_tensors(newer, model.config).items()
    )
    assert xj.rollouts.send_weights(receiver.address, pairs, mode="abort", secret_file=secret_file) == 4
    assert_equal(engine.model.params, newer)
    narrow = {name: x.astype("bfloat16") for name, x in tensors.items()}
    xj.rollouts.send_weights(receiver.address, narrow, secret_file=secret_file)
    assert_equal(engine.model.params, jax.tree.map(lambda x: x.astype("bfloat16").astype(np.float32), new))


def test_a_trainer_in_a_process_of_its_own(engine, model, receiver, secret_file):
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    command = [sys.executable, "-c", TRAINER, receiver.address, secret_file, *paths, *sys.path]
    version = engine.version
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == engine.version == version + 1
    assert_equal(engine.model.params, scaled(model, 0.5))


def test_wrong_streams_change_nothing(engine, model, receiver, secret_file):
    own = engine.model.params
    version = engine.version
    tensors = xj.params.params_to_tensors(scaled(model, 0.7), model.config)
    last = list(tensors)[-1]

    def send(tensors, **how) -> str:
        with pytest.raises(xj.InputError) as caught:
            xj.rollouts.send_weights(receiver.address, tensors, secret_file=secret_file, **how)
        return str(caught.value)

    assert f"missing {last}" in send({name: x for name, x in tensors.items() if name != last})
    # The engine fails at the first tensor, while others are on their way.
    large = {f"x{i}": np.zeros((1 << 20, 8), np.float32) for i in range(3)}
    (first, embed) = next(iter(tensors.items()))
    assert "embed.weight has the shape [3, 128]" in send({first: embed[:3]} | large)
    assert "is int32: send tensors of float32, bfloat16, float16" in send({last: np.zeros(3, np.int32)})
    assert "mode must be one of continue, wait" in send(tensors, mode="later")

    def broken():
        yield from list(tensors.items())[:4]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        xj.rollouts.send_weights(receiver.address, broken(), secret_file=secret_file)
    assert engine.model.params is own and engine.version == version
    assert xj.rollouts.send_weights(receiver.address, tensors, secret_file=secret_file) == version + 1


def test_a_trainer_that_is_lost_changes_nothing(engine, model, secret_file):
    own = engine.model.params
    lines: list[str] = []
    opened = listen("127.0.0.1", 0), load_secret(secret_file, "127.0.0.1")
    with WeightReceiver(engine, *opened, lines.append) as receiver:
        host, _, port = receiver.address.rpartition(":")
        channel = connect(host, int(port), lambda message: None, load_secret(secret_file, host))
        channel.send("update", None, "continue")
        channel.send("tensor", "model.norm.weight", "float32", [128])
        channel.send_bytes("part", b"\0" * 100)
        channel.end()
        deadline = time.monotonic() + 30
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        (line,) = lines
        assert "rejected: the stream of weights broke off after 0 tensors (its connection was lost)" in line
        assert engine.model.params is own
        tensors = xj.params.params_to_tensors(scaled(model, 0.6), model.config)
        version = xj.rollouts.send_weights(receiver.address, tensors, secret_file=secret_file)
    assert lines[1:] == [f"weights of version {version} have come from a trainer"]


def test_a_silent_trainer_is_given_up():
    stream = TensorStream(None, silent_seconds=0.01)
    with pytest.raises(xj.InputError, match="sent nothing for 0.01 seconds after 0 tensors"):
        next(stream)


def test_addresses_and_secrets(engine, secret_file, tmp_path):
    with pytest.raises(xj.InputError, match="address=here must be HOST:PORT"):
        xj.rollouts.receive_weights(engine, "here")
    with pytest.raises(xj.InputError, match="processes that meet at 192.0.2.1 need a secret"):
        xj.rollouts.send_weights("192.0.2.1:5", {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(xj.InputError, match=f"address=127.0.0.1:{port} cannot be listened on"):
            xj.rollouts.receive_weights(engine, f"127.0.0.1:{port}", secret_file=secret_file)
    with pytest.raises(xj.InputError, match="no engine takes weights at .*--weight_address"):
        xj.rollouts.send_weights(f"127.0.0.1:{port}", {}, secret_file=secret_file)
    other = write_secret(tmp_path / "other")
    with xj.rollouts.receive_weights(engine, "127.0.0.1:0", secret_file=secret_file) as receiver:
        with pytest.raises(xj.InputError, match="has another secret"):
            xj.rollouts.send_weights(receiver.address, {}, secret_file=other)
    with pytest.raises(xj.InputError, match="no engine takes weights at"):
        xj.rollouts.send_weights(receiver.address, {}, secret_file=secret_file)
