"""Several engines behind one queue; tests that need several devices run in a process of their own."""

import jax
import pytest
import run_script
from paths import SUPPORT

import xinfer_jax as xj
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.engines import make_engine
from xinfer_jax.sharding import device_groups

pytestmark = pytest.mark.oldest


@pytest.mark.full
def test_several_engines_on_four_devices():
    run_script.run_tests_on_devices(4, SUPPORT / "four_devices.py")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1000, r"data_parallel=1000 needs 1000 devices, and there are \d+: give \d+ at most; XLA_FLAGS="),
        (0, "data_parallel must be a whole number of at least 1, got 0"), ("2", "got '2'"),
    ],
)  # fmt: skip
def test_invalid_numbers_of_engines_are_rejected(number, message):
    with pytest.raises(xj.InputError, match=message):
        make_engine(xj.load_model(), EngineOptions(rows=1), number)


def test_the_first_group_has_the_devices_of_the_model():
    devices = jax.local_devices()
    assert device_groups(1) == [devices[:1]] and device_groups(1, devices) == [devices]
