"""Prompts and answers on different devices; tests that need several devices run in a process of their own."""

import subprocess
import sys

import pytest
import run_script
from paths import SUPPORT

import xinfer_jax as xj

pytestmark = pytest.mark.oldest


@pytest.mark.full
def test_prompts_and_answers_on_two_devices():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", str(SUPPORT / "disaggregated_devices.py")]
    env = run_script.device_environment(2) | {"PYTEST_ADDOPTS": ""}  # CI selects tests by it
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (dict(prefill_devices=[0]), "decode_devices must be a list of devices, and so for the other side"),
        (dict(prefill_devices=[], decode_devices=[0]), "prefill_devices must be a list of devices"),
        (dict(prefill_devices=[0], decode_devices=[99]), "decode_devices: device 99 is not here"),
        (dict(prefill_devices=["0"], decode_devices=[0]), "prefill_devices: device '0' is not here"),
    ],
)
def test_devices_that_do_not_exist_are_rejected(devices, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(xj.load_model(), rows=1, **devices)
