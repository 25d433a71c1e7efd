"""Several engines behind one queue, and prompts and answers on different devices. Tests that need several
devices run in a process of their own.
"""

import jax
import pytest
import run_script
from paths import SUPPORT

import xinfer_jax as xj
from xinfer_jax.cli.answer_flags import parse_devices
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.serve import command
from xinfer_jax.sharding import device_groups

pytestmark = pytest.mark.oldest


@pytest.mark.full
@pytest.mark.parametrize("count, name", [(4, "four_devices.py"), (2, "disaggregated_devices.py")])
def test_on_several_devices(count, name):
    run_script.run_tests_on_devices(count, SUPPORT / name)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1000, r"data_parallel=1000 needs 1000 devices, and there are \d+: give \d+ at most; XLA_FLAGS="),
        (0, "data_parallel must be a whole number of at least 1, got 0"), ("2", "got '2'"),
    ],
)  # fmt: skip
def test_invalid_numbers_of_engines_are_rejected(number, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(xj.load_model(), EngineOptions(rows=1), data_parallel=number)


def test_the_first_group_has_the_devices_of_the_model():
    devices = jax.local_devices()
    assert device_groups(1) == [devices[:1]] and device_groups(1, devices) == [devices]


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


def test_flags_of_devices_and_roles():
    assert parse_devices("prefill_devices", "0,1+2") == [0, [1, 2]]
    with pytest.raises(xj.InputError, match="--decode_devices='1,,2' is not like 0,1"):
        parse_devices("decode_devices", "1,,2")
    for given, why in (
        ("--role=prefill", "--role and --peer belong together"),
        ("--peer=127.0.0.1:1", "--role and --peer belong together"),
        ("--peers=nowhere", "--peers=nowhere must be HOST:PORT"),
    ):
        command.PARSER.parse(["xinfer-jax-serve", given])
        with pytest.raises(xj.InputError, match=why):
            command._run()
    with pytest.raises(xj.InputError, match="data_parallel=2 does not go with prefill_devices"):
        xj.Engine(xj.load_model(), EngineOptions(prefill_devices=[0], decode_devices=[0]), data_parallel=2)
