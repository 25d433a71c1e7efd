"""Several engines behind one queue: what needs devices runs in a process of its own, `four_devices.py`."""

import subprocess
import sys
from pathlib import Path

import jax
import programs
import pytest

import xinfer_jax as xj
from xinfer_jax.engine.engines import engine_of
from xinfer_jax.sharding import device_groups


@pytest.mark.slow
def test_on_four_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", str(Path(__file__).with_name("four_devices.py"))]
    done = subprocess.run(command, env=programs.on_devices(4), capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1000, r"data_parallel=1000 takes 1000 devices, and there are \d+: ask for \d+ at most; XLA_FLAGS="),
        (0, "data_parallel must be a whole number of at least 1, got 0"), ("2", "got '2'"),
    ],
)  # fmt: skip
def test_so_many_engines_there_cannot_be(number, message):
    with pytest.raises(xj.InputError, match=message):
        engine_of(xj.load_model(), number, rows=1)


def test_the_first_group_is_where_the_model_lies():
    devices = jax.local_devices()
    assert device_groups(1) == [devices[:1]] and device_groups(1, devices) == [devices]
