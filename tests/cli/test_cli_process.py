"""The command line in its own process: entry points, encodings, closed pipes, terminals, Ctrl-C."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
import warnings
from pathlib import Path

import pytest
from paths import ROOT, SCRIPTS
from test_cli import STATISTICS
from tiny import ANSWER, ASK, QUESTION

from xinfer_jax.cli.terminal import StatusLine, one_line_warnings

pytestmark = [pytest.mark.full, pytest.mark.oldest]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment of a user with an empty cache directory, which the runs below share."""
    compiled = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    return {name: value for name, value in os.environ.items() if not name.startswith(compiled)} | {
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }


def process(environment, *args, **options) -> subprocess.CompletedProcess:
    how = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
    return subprocess.run([sys.executable, *map(str, args)], text=True, timeout=300, **how)


def test_module_and_script_are_the_same_command(environment, good):
    # All other flags at their defaults.
    run = process(environment, "-m", "xinfer_jax", f"--model={good}", input=QUESTION + "\n")
    assert (run.returncode, run.stdout) == (0, ANSWER + "\n")
    assert all(map(re.fullmatch, STATISTICS, run.stderr.splitlines()))
    cached = sorted(Path(environment["XDG_CACHE_HOME"], "xinfer_jax").iterdir())
    assert cached  # the compilation cache is used by default
    run = process(environment, "scripts/generate.py", f"--model={good}", ASK, "--output=json")
    assert (run.returncode, run.stderr, json.loads(run.stdout)["text"]) == (0, "", ANSWER)


def test_a_closed_pipe_gives_no_traceback(environment, good):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        run = process(environment, "-m", "xinfer_jax", f"--model={good}", ASK, stdout=closed)
    assert run.returncode == 1 and run.stderr == ""


def test_characters_that_the_locale_lacks_are_replaced(environment, good):
    run = process(environment | {"PYTHONIOENCODING": "ascii"}, "-m", "xinfer_jax", f"--model={good}", ASK)
    assert (run.returncode, run.stdout) == (0, "Yes, ??!\n") and "Traceback" not in run.stderr


# --- standard streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "redirected, out, err",
    [
        ("--prompt=x >&-", "", "xinfer-jax: standard output is closed"),
        ("--help >/dev/full", "", "xinfer-jax: standard output cannot be written .No space left"),
        ("--prompt= 2>/dev/full", "", ""),
        ("<&-", "", "xinfer-jax: the prompt is empty"),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_closed_or_full_standard_streams_exit_with_one_line(environment, redirected, out, err):
    if "/dev/full" in redirected and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    run = process(environment, "-c", f"""import subprocess as s, sys
sys.exit(s.call(sys.executable + " -m xinfer_jax " + {redirected!r}, shell=True))""")  # fmt: skip
    assert (run.returncode, run.stdout) == (2, out)
    assert re.match(err, run.stderr) and run.stderr.count("\n") == bool(err), run.stderr


def test_warnings_are_printed_as_one_line(capsys):
    with one_line_warnings("xinfer-jax"):
        for module in "abc":
            warnings.warn(
                f"Error writing persistent compilation cache entry for '{module}': OSError: full",
                stacklevel=1,
            )
        warnings.warn("two\nlines", stacklevel=1)
    cache, other = capsys.readouterr().err.splitlines()
    assert cache.startswith("xinfer-jax: the compilation cache") and "OSError: full" in cache
    assert other == "xinfer-jax: two lines"


# --- terminals ----------------------------------------------------------------------------------------------


def test_the_status_line_is_drawn_and_erased(capsys, monkeypatch):
    status = StatusLine()
    with status("loading"):
        pass
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with status("loading"):
        time.sleep(0.25)
        status.log("a line")
    status.log("another")
    erase = "\x1b[K"
    drawn, _, rest = capsys.readouterr().err.partition(f"\r{erase}a line\n")
    assert len(re.findall(rf"\rloading \d\.\d s{re.escape(erase)}", drawn)) > 1
    assert rest.endswith("another\n") and screen(drawn + rest) == ""


def screen(written: str) -> str:
    """The text on a terminal after the status lines."""
    return re.sub(r"\r[^\r\n]*(?=\r)|\r\x1b\[K|.*\n", "", written)


class Session:
    """A process whose standard error is a terminal, as is its standard input where nothing is piped in.

    terminal: its standard output is this terminal too.
    """

    def __init__(self, environment, *args, stdin=None, terminal=False):
        self._terminal, theirs = os.openpty()
        self.settings = termios.tcgetattr(theirs)
        # Where Ctrl-C is ignored (tests in the background of a shell) a child would ignore it too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            cwd=ROOT,
            env=environment,
            stdin=theirs if stdin is None else stdin,
            stdout=theirs if terminal else subprocess.PIPE,
            stderr=theirs,
        )
        signal.signal(signal.SIGINT, before)
        os.close(theirs)

    def until(self, text: str = "") -> str:
        """The text on the terminal up to these words, or to the end. Fails where neither comes."""
        seen = ""
        while not text or text not in seen:
            assert select.select([self._terminal], [], [], 60)[0], seen
            try:
                seen += os.read(self._terminal, 4096).decode()
            except OSError:  # the end, on Linux
                break
        assert text in seen, seen
        return seen.replace("\r\n", "\n")

    def terminal_settings(self) -> list:
        return termios.tcgetattr(self._terminal)

    def type(self, line: str) -> None:
        os.write(self._terminal, f"{line}\n".encode())

    def interrupted(self, times: int = 1) -> tuple[int, str, str]:
        """Sends Ctrl-C; the exit code, and the rest of standard output and of the terminal."""
        for _ in range(times):
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.01 if times > 1 else 0)
        start = time.perf_counter()
        out = (self.process.communicate(timeout=60)[0] or b"").decode()
        assert time.perf_counter() - start < 10  # 0.2 s on a quiet machine
        return self.process.returncode, out, self.until()


def test_interrupt_while_jax_is_imported(environment):
    session = Session(environment, "-m", "xinfer_jax", "--prompt=x")
    session.until("loading jax")
    code, out, err = session.interrupted()
    assert (code, out) == (130, "") and screen(err) == ""


def test_interrupt_while_compiling(environment):
    """Python's own handlers would wait for XLA. A second Ctrl-C changes nothing."""
    session = Session(environment, "-m", "xinfer_jax", "--prompt=x", "--compilation_cache=")
    session.until("compiling")
    time.sleep(0.3)
    code, out, err = session.interrupted(times=3)
    assert (code, out) == (130, "") and "Traceback" not in err and screen(err) == ""


def test_interrupt_while_an_engine_compiles(environment, tmp_path):
    """No line of the file has begun, so the command ends at once, and nothing is lost."""
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    files = f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}"
    session = Session(environment, "scripts/batch.py", *files, "--compilation_cache=")
    session.until("compiling the programs of the engine")
    code, out, err = session.interrupted()
    assert (code, out) == (130, "") and "Traceback" not in err and screen(err) == ""
    assert (tmp_path / "out").read_text() == ""


def test_interrupt_while_generating(environment, good):
    """The text written before stays."""
    session = Session(environment, "-m", "xinfer_jax", f"--model={good}", ASK, "--nouse_cache",
                      "--min_tokens=180", "--max_tokens=190", "--compilation_cache=")  # fmt: skip
    assert session.process.stdout.read(3) == b"Yes"
    code, out, err = session.interrupted()
    assert code == 130 and "Traceback" not in err and "decode:" not in err


# --- a checkout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, args, code, output",
    [
        ("generate.py", ["--version"], 0, r"xinfer-jax \d+\.\d+\.\d+ \(jax"),
        ("perplexity.py", ["--window=x"], 2, "xinfer-jax perplexity: --window=x"),
        ("examples/beams.py", ["--width=4"], 2, "beams: .*width"),
    ],
)
def test_scripts_need_no_installed_package(tmp_path, script, args, code, output):
    """The script runs without site, so no editable install is found. Then sys.path has everything except this
    checkout.
    """
    elsewhere = [path for path in sys.path if path and not (Path(path) / "xinfer_jax").is_dir()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(elsewhere)}
    run = process(environment, "-S", SCRIPTS / script, *args, cwd=tmp_path)
    assert run.returncode == code and re.match(output, run.stdout + run.stderr), run.stderr
    assert (run.stdout + run.stderr).count("\n") == 1


def test_a_cold_and_a_warm_start_give_the_same_bits(environment, tmp_path):
    """The same command twice: compiled, and loaded from the cache."""
    flags = ["--output=json", "--temperature=0.8", "--logprobs=3", "--max_tokens=12", ASK]
    runs = [
        process(environment, "-m", "xinfer_jax", *flags, f"--compilation_cache={tmp_path}") for _ in range(2)
    ]
    cold, warm = (json.loads(run.stdout) for run in runs)
    assert cold.pop("stats") != warm.pop("stats") and cold == warm and len(cold["logprobs"]) >= 3


def test_a_damaged_compilation_cache_warns_once(environment, good):
    """jax warns of every entry and never writes it again. One line remains. This test is last, since others
    share the cache.
    """
    process(environment, "-m", "xinfer_jax", f"--model={good}", ASK)  # another worker may have run the others
    entries = list(Path(environment["XDG_CACHE_HOME"], "xinfer_jax").glob("*-cache"))
    assert len(entries) > 2
    for i, entry in enumerate(entries):
        entry.write_bytes(entry.read_bytes()[:100] if i % 2 else b"garbage")
    run = process(environment, "-m", "xinfer_jax", f"--model={good}", ASK, "--output=json")
    assert (run.returncode, json.loads(run.stdout)["text"]) == (0, ANSWER)
    assert re.fullmatch("xinfer-jax: the compilation cache has an entry that cannot be read.*\n", run.stderr)
