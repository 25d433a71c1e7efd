"""The quick set and the full set, and fixtures that several test files share."""

import gc
import io
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

# Programs that several files, workers or processes need are compiled once in a session.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="xinfer_jax-tests-")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": compiled.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }

import jax
import pytest
import tiny

from xinfer_jax import stats
from xinfer_jax.cli import answer_flags as cli
from xinfer_jax.layerwise import precompile

# Collections while programs are traced, and pages that malloc returns after each compilation, are a sixth of
# the tests' time. Processes that tests start do both as users do.
gc.set_threshold(50_000, 20, 100)
for module in (stats, precompile):
    module.release_free_memory = lambda: None

LEFT_OUT = pytest.StashKey[int]()
compilations = 0  # so far, in the thread that runs the tests


def _count_compilations(event, duration, **_):
    global compilations
    if event == "/jax/core/compile/backend_compile_duration":
        compilations += threading.current_thread() is threading.main_thread()


jax.monitoring.register_event_duration_secs_listener(_count_compilations)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run all tests, also those marked `full`")
    parser.addoption(
        "--soak", action="store_true", help="run all tests, also those marked `soak`; some sweep"
    )


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    """Leaves out the tests marked `soak`, unless --soak asks for them, and those marked `full`, unless --full
    or --soak.
    """
    if config.getoption("soak"):
        return
    marks = ("soak",) if config.getoption("full") else ("soak", "full")
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, marks))]
    config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workeroutput"):  # a worker of pytest-xdist: the main process prints the summary
        config.workeroutput["left_out"] = len(left_out)
    else:
        config.stash[LEFT_OUT] = len(left_out)


def pytest_ignore_collect(collection_path, config):
    """`-m unit` imports only the files with such tests: importing all files takes longer than the tests."""
    if config.option.markexpr == "unit" and collection_path.suffix == ".py":
        return "pytest.mark.unit" not in collection_path.read_text() or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Notes the programs so far, before fixtures of a test compile others."""
    item.compilations = compilations
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test that is marked `unit` and not `full`, and compiles a program."""
    result = yield
    compiled = compilations - item.compilations
    is_unit = item.get_closest_marker("unit") and not item.get_closest_marker("full")
    assert not (compiled and is_unit), f"a unit test compiled {compiled} programs"
    return result


def pytest_collection_finish():
    """Collections then skip modules and items, which take 0.2 s each time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(LEFT_OUT, 0):
        flag = "--soak" if config.getoption("full") else "--full"
        terminalreporter.write_line(f"{count} more tests run with `pytest {flag}`")


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """The programs of a file. They compile with few optimizations, which takes two thirds of the time, unless
    the file is marked `optimized`, or the environment chooses for all.

    They are forgotten afterwards. A compiled program holds about 150 memory maps, and Linux grants a process
    65,530: XLA aborts where they run out.
    """
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        few = not request.node.get_closest_marker("optimized")
        jax.config.update("jax_disable_most_optimizations", few)
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A checkpoint that answers `tiny.ANSWER`. Its context is 256 tokens."""
    hf, weights = tiny.answering_model(tiny.ANSWER)
    return tiny.write(tmp_path_factory.mktemp("good"), hf, weights=weights)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """One directory per layout asked for, written once."""
    written = {}

    def at(**options):
        name = json.dumps(options, sort_keys=True)
        if name not in written:
            written[name] = tiny.write(tmp_path_factory.mktemp("checkpoint"), **options)
        return written[name]

    return at


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command line in this process: (exit code, standard output, standard error).

    Prompts of 33 to 64 ids, answers of at most 16: one program for all, as compiling takes seconds.
    """

    def run(*args: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        """stdin: what standard input holds. Bytes are decoded as UTF-8."""
        file = io.StringIO(stdin) if isinstance(stdin, str) else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        monkeypatch.setattr(sys, "stdin", file)
        with pytest.raises(SystemExit) as caught:
            cli.main(["xinfer-jax", "--compilation_cache=", "--max_tokens=16", *args])
        return (caught.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def ask(command, good):
    """The JSON object that the good checkpoint gives."""

    def run(*args: str, model: Path = good) -> dict:
        code, out, err = command(f"--model={model}", tiny.ASK, "--output=json", *args)
        assert (code, err) == (0, "")
        return json.loads(out)

    return run
