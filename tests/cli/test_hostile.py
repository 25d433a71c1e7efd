"""Hostile inputs: each is rejected with exit code 2 and one short line, at once and with little memory."""

import os
import re
import resource
import shutil
import signal

import hostile_cases
import pytest
import tiny
from hostile_cases import CASES, DIRECTORY

from xinfer_jax import device

pytestmark = pytest.mark.oldest

_SECONDS = 20
_MOST_GROWTH = 2**20  # KiB


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A good checkpoint, and the peak memory of this process so far."""
    path = tmp_path_factory.mktemp("base")
    tiny.write(path, hostile_cases.BASE_CONFIG, weights=hostile_cases.BASE_WEIGHTS)
    return path, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def checkpoint(path, files, base):
    """The good checkpoint with other contents in some of its files."""
    for file in base.iterdir():
        if file.name not in files:
            os.link(file, path / file.name)
    for name, content in files.items():
        if content is DIRECTORY:
            (path / name).mkdir()
        elif isinstance(content, bytes):
            (path / name).write_bytes(content)
        elif content is not None:
            tiny.write_json(path / name, content)
    return path


@pytest.fixture
def watchdog():
    def too_long(*_):
        raise TimeoutError(f"more than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", CASES)
def test_hostile_input_is_rejected_in_one_line(command, base, tmp_path, monkeypatch, watchdog, name):
    case = CASES[name]
    (good, before) = base
    monkeypatch.setattr(device, "memory_bytes", lambda: 2**34)  # the same on any machine
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = checkpoint(tmp_path, case.files, good)
    asked = [tiny.ASK] if case.stdin is None else []
    code, out, err = command(f"--model={path}", *asked, *case.args, stdin=case.stdin or "")
    assert (code, out) == (2, ""), err
    warning, _, rest = err.partition("\n")
    err = rest if "by the rules of Qwen2Tokenizer, which differ" in warning else err
    assert err.startswith("xinfer-jax: ") and err.endswith("\n") and err[:-1].isprintable()
    assert len(err) <= 301 + len("xinfer-jax: ") and "Traceback" not in err
    assert re.search(case.pattern, err), err
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    shutil.rmtree(tmp_path)
    assert grown < _MOST_GROWTH


def test_the_table_of_hostile_inputs_is_complete():
    assert len(CASES) >= 200
