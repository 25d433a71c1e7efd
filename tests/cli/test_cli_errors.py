"""Errors of the command line: one line on standard error, exit code 2; interrupts, and hostile inputs,
rejected at once and with little memory.
"""

import io
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import hostile_cases
import jax
import pytest
import tiny
from hostile_cases import CASES, DIRECTORY
from paths import ROOT
from tiny import ASK

import xinfer_jax as xj
from xinfer_jax import device
from xinfer_jax.cli import answer, answer_flags as cli, startup
from xinfer_jax.ops.operation import check_impl
from xinfer_jax.sampling.settings import NUMBERS
from xinfer_jax.weights.params import resolve_dtype
from xinfer_jax.weights.quantization import check_quantize_method

pytestmark = pytest.mark.oldest


def error_line(result: tuple[int, str, str]) -> str:
    """The one line on standard error of a call that failed."""
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("xinfer-jax: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err
    return err


BAD_FLAGS = {
    # name: (arguments, part of the error line)
    "temperature-negative": (
        ["--temperature=-0.1"],
        "--temperature=-0.1: give a number from 0 .greedy.",
    ),
    "temperature-nan": (["--temperature=nan"], "--temperature=nan: give a number from 0"),
    "top-p-zero": (["--top_p=0"], "--top_p=0: give a number above 0 and at most 1"),
    "min-p-above-one": (["--min_p=2"], "--min_p=2: give a number from 0 .off. to 1"),
    "top-k-negative": (["--top_k=-1"], "--top_k=-1: give a whole number from 0"),
    "top-k-too-large": ([f"--top_k={2**31}"], "--top_k=2147483648: give"),
    "penalty-zero": (["--repetition_penalty=0"], "--repetition_penalty=0: give a number from 1e-6"),
    "max-tokens-zero": (["--max_tokens=0"], "--max_tokens=0: give a whole number from 1"),
    "max-tokens-with-dashes": (["--max-tokens", "-5"], "--max_tokens=-5: give"),
    "max-tokens-of-5000-digits": (["--max_tokens=" + "9" * 5000], "--max_tokens=9+ … .*: give"),
    "max-tokens-of-two-lines": (["--max_tokens=1\n2"], "--max_tokens=1 2: give"),
    "max-tokens-without-value": (["--max_tokens"], "Missing value for flag --max_tokens"),
    "seed-negative": (["--seed=-1"], "--seed=-1: give a whole number from 0 to 4294967295"),
    "seed-too-large": ([f"--seed={2**70}"], "--seed="),
    "raw-text": (["--raw=maybe"], "--raw=maybe: give true or false"),
    "output-xml": (["--output=xml"], "--output=xml: give text or json"),
    "dtype-unknown": (["--dtype=int8"], "--dtype=int8: give float32, bfloat16 or float16"),
    "quantize-unknown": (["--quantize=int3"], "--quantize=int3: give int8, int4 or fp8"),
    "activations-unknown": (["--activations=int4"], "--activations=int4: give int8"),
    "impl-unknown": (
        ["--impl=fast"],
        "--impl=fast: give mosaic, triton, tpu, xla, interpret or interpret_tpu",
    ),
    "cache-dtype-unknown": (["--cache_dtype=x"], "--cache_dtype=x: give int8, int4, gear, float8_e4m3fn"),
    "model-empty": (["--model="], "--model=: give a directory or a hub name"),
    "part-of-a-flag": (["--temp=0"], "flag 'temp'. Did you mean --temperature.*--help"),
    "unknown-flag": (["--max_token=5"], "flag 'max_token'. Did you mean --max_tokens.*--help"),
    "switch-with-a-value": (["--nouse_cache=x"], "use_cache.*--help"),
    "unknown-long-flag": (["--" + "a" * 3000], "Unknown command line flag 'aaa"),
    "positional": (["Really?"], "unexpected argument 'Really\\?': give the prompt with --prompt"),
    "a-file-of-flags": (["--flagfile=/dev/zero"], "flagfile"),
    "stop-empty": (["--stop="], "--stop=: give some text"),
    "length-penalty-nan": (["--num_beams=2", "--length_penalty=nan"], "--length_penalty=nan: give"),
    "early-stopping-unknown": (
        ["--num_beams=2", "--early_stopping=soon"],
        "--early_stopping=soon: give true, false or never",
    ),
    "beams-and-a-draft": (["--num_beams=2", "--draft=lookup"], "--draft does not go with --num_beams=2"),
    "beams-and-a-stop": (["--num_beams=2", "--stop=x"], "--stop does not go with --num_beams=2"),
    "beams-without-cache": (["--num_beams=2", "--nouse_cache"], "--use_cache does not go with --num_beams=2"),
    "length-penalty-alone": (["--length_penalty=2"], "--length_penalty does not go with --num_beams=1"),
    "no-guesses": (["--draft=lookup", "--draft_tokens=0"], "--draft_tokens=0: give"),
    "guesses-of-nobody": (["--draft_tokens=5"], "--draft_tokens=5 does nothing without --draft"),
    "draft-without-cache": (["--draft=lookup", "--nouse_cache"], "--draft needs the cache"),
    "raw-with-system": (["--raw", "--system=y"], "--raw takes the prompt as it is"),
    "empty-prompt": (["--prompt="], "the prompt is empty"),
    "empty-prompt-and-system": (["--prompt", "", "--system=x"], "the prompt is empty"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_rejected_before_a_model_is_loaded(command, monkeypatch, name):
    args, message = BAD_FLAGS[name]
    monkeypatch.setattr(answer, "open_model", lambda *_: pytest.fail("a model was loaded"))
    assert re.search(message, error_line(command(ASK, *args)))


def test_flags_have_the_ranges_of_the_library():
    """The ranges of flags, which are checked without jax, are those of the library."""
    edges = [-math.inf, -1, -1e-9, 0, 1e-9, 0.5, 1, 1 + 1e-9, 2, 1000, 1001, 2**31 - 1, 2**31, 1e38, 1e39]
    for field, flag in ((setting.name, setting.field) for setting in NUMBERS):
        for value in [*edges, math.inf, math.nan]:
            text = str(value) if value % 1 or value > 1e30 else str(int(value))
            assert accepted(cli.PARSER.values[flag].parser.parse, text) == accepted(
                xj.SamplingConfig(**{field: value}).validate
            ), (flag, value)
    for flag, check in (("impl", known_impl), ("quantize", check_quantize_method), ("dtype", resolve_dtype)):
        for value in ("mosaic", "triton", "tpu", "xla", "interpret", "interpret_tpu", "int8", "int4", "gear",
                      "float32", "bfloat16", "float16", "float64", "", "None"):  # fmt: skip
            parse = cli.PARSER.values[flag].parser.parse
            assert accepted(parse, value) == accepted(check, value), (flag, value)


def known_impl(name: str) -> None:
    try:
        check_impl(name)
    except xj.InputError as error:
        if "one of" in str(error):  # not an error because this machine lacks it
            raise


def accepted(check, *args) -> bool:
    try:
        check(*args)
    except ValueError:
        return False
    return True


def test_flags_are_checked_without_jax():
    """One process checks all flags: each process would import jax for 2 s."""
    program = """
import sys
from xinfer_jax.cli import answer_flags as cli, chat_flags as chat
for main in cli.main, chat.main:
    for args in "--max_token=5", "--max_tokens=abc", "--temperature=-1", "--version", "--help", "x":
        try:
            main(["x", args])
        except SystemExit as end:
            print(end.code, end=" ", file=sys.stderr if end.code else sys.stdout)
try:
    cli.main(["x", "--prompt= "])
except SystemExit as end:
    print(end.code, file=sys.stderr)
assert "jax" not in sys.modules and "numpy" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    lines = run.stderr.splitlines()
    assert len(lines) == 10 and all(": " in line for line in lines[:9])


@pytest.mark.parametrize(
    "error, message",
    [
        (MemoryError("Unable to allocate 5 TiB"), "out of memory .*5 TiB.*fewer bytes"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out of memory"),
        (RuntimeError("Unable to initialize backend 'tpu': none"), "'tpu'.*JAX_PLATFORMS"),
        (PermissionError(13, "Permission denied", "x.safetensors"), "Permission denied: 'x.safetensors'"),
    ],
    ids=["memory", "device-memory", "backend", "file"],
)
def test_machine_errors_are_one_line(command, monkeypatch, error, message):
    def open_checkpoint(*_, **__):
        raise error

    monkeypatch.setattr(startup, "open_checkpoint", open_checkpoint)
    assert re.search(message, error_line(command(ASK)))


def test_a_bug_keeps_its_traceback(monkeypatch):
    def open_checkpoint(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(startup, "open_checkpoint", open_checkpoint)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["xinfer-jax", "--compilation_cache=", "--prompt=x"])


def test_endless_standard_input_is_an_error(capsys, monkeypatch):
    class Endless(io.StringIO):
        def read(self, size=-1):
            assert size >= 0
            return "x" * size

    monkeypatch.setattr(sys, "stdin", Endless())
    with pytest.raises(SystemExit) as caught:
        cli.main(["xinfer-jax", "--compilation_cache="])
    assert "give a shorter prompt" in error_line((caught.value.code, *capsys.readouterr()))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--prompt=" + "x" * 300, "--max_tokens=1"], r"prompt of 3\d\d tokens \+ --max_tokens 1 exceeds"),
        (["--prompt=x", "--max_tokens=256"], "--max_tokens 256 exceeds the model's context limit 256"),
    ],
    ids=["prompt-over-context", "tokens-over-context"],
)
def test_bad_prompts_are_rejected_before_tracing(command, good, monkeypatch, args, message):
    monkeypatch.setattr(answer, "load_and_compile", lambda *_: pytest.fail("weights were read"))
    assert re.search(message, error_line(command(f"--model={good}", *args)))


def test_ctrl_c_exits_with_130(command, good, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "open_checkpoint", interrupted)
    assert command(f"--model={good}", "--prompt=x") == (130, "", "")


# --- hostile inputs -----------------------------------------------------------------------------------------

_SECONDS = 20
_MOST_GROWTH = 2**20  # KiB


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A good checkpoint, and the peak memory of this process so far."""
    path = tmp_path_factory.mktemp("base")
    tiny.write(path, hostile_cases.BASE_CONFIG, weights=hostile_cases.BASE_WEIGHTS)
    return path, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def changed_checkpoint(path, files, base):
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
    path = changed_checkpoint(tmp_path, case.files, good)
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
    assert len(CASES) >= 150
