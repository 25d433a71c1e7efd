"""The subcommands of `xinfer-jax`: which there are, their names, and their errors before jax is imported."""

import os
import subprocess
import sys
import tomllib

import pytest
from paths import ROOT, SCRIPTS

from xinfer_jax import __main__ as entry
from xinfer_jax.cli.commands import COMMANDS, overview, unknown_command

pytestmark = pytest.mark.oldest

# Runs a command line; the last line of standard error says whether jax was imported.
PROGRAM = """
import atexit, os, sys
from xinfer_jax import __main__ as entry
end = os._exit
def leave(code):
    print("jax" in sys.modules, file=sys.stderr, flush=True)
    end(code)
os._exit = leave
sys.argv = ["xinfer-jax", *sys.argv[1:]]
entry.main()
"""


def run(*arguments: str) -> tuple[int, str, str, bool]:
    """Returns the exit code, standard output, standard error, and whether jax was imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT)
    *lines, imported = done.stderr.splitlines()
    return done.returncode, done.stdout, "\n".join(lines), imported == "True"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_it(name):
    code, out, err, imports_jax = run(name, "--help")
    assert (code, err, imports_jax) == (0, "", False)
    assert f"\nusage: xinfer-jax {name} " in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max_tokens=0"], "xinfer-jax: --max_tokens=0: give"),
        (["generate", "--max_tokens=0"], "xinfer-jax generate: --max_tokens=0: give"),
        (["chat", "--seed=-1"], "xinfer-jax chat: --seed=-1: give"),
        (["serve", "--port=x"], "xinfer-jax serve: --port=x: give"),
        (["batch", "--output=x"], "xinfer-jax batch: --input is missing"),
        (["quantize", "--group=3"], "xinfer-jax quantize: --group=3: give an even number"),
        (["quantize", "--format=compressed-tensors", "--quantize=int8"], "xinfer-jax quantize: --format="),
        (
            ["quantize", "--activations=int8", "--quantize=int8", "--group=2"],
            "quantize: --group=2 does not",
        ),
        (["plan", "--devices=8xh900"], "xinfer-jax plan: --devices takes"),
        (["plan", "--model=gpt-5"], "xinfer-jax plan: config 'gpt-5' is neither"),
        (["perplexity"], "xinfer-jax perplexity: no text: give --text=FILE"),
        (["perplexity", f"--text={ROOT / 'LICENSE'}", "--window=8", "--stride=8"], "perplexity: --stride=8"),
        (["bench", "--draft=mtp"], "xinfer-jax bench: --draft=mtp needs --model: random weights have no"),
        (["chat", "--draft_tokens=5"], "chat: --draft_tokens=5 does nothing without --draft"),
        (["serve", "--draft="], "serve: --draft=: give lookup, mtp, a directory or a hub name"),
        (["bench", "--batch_sizes=1,0"], "xinfer-jax bench: --batch_sizes=1,0: give whole numbers"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_flags_are_one_line_before_jax_is_imported(arguments, message):
    code, out, err, imports_jax = run(*arguments)
    assert (code, out, imports_jax) == (2, "", False)
    assert message in err and err.count("\n") == 0


@pytest.mark.parametrize("arguments", [["quantise"], ["Why is the sky blue?"], [""], ["quantise", "--help"]])
def test_an_unknown_command_lists_the_commands(arguments):
    code, out, err, imports_jax = run(*arguments)
    assert (code, out, imports_jax) == (2, "", False)
    assert err.splitlines()[0].startswith(f"xinfer-jax: there is no command {arguments[0]!r}: ")
    for name in COMMANDS:
        assert sum(line.startswith(f"  {name} ") for line in err.splitlines()) == 1
    assert ("did you mean 'quantize'?" in err) == (arguments[0] == "quantise")


def test_help_lists_the_commands_before_the_flags_of_generate():
    code, out, err, _ = run("--help")
    assert (code, err) == (0, "") and out.startswith(overview())
    assert out.index("\n  bench ") < out.index("Text in, text out") < out.index("--max_tokens")


def test_lines_of_the_commands_fit_a_terminal():
    assert max(map(len, overview().splitlines())) <= 100
    assert len(unknown_command("x" * 10_000)) < 1_500
    assert unknown_command("a\nb").splitlines()[0].startswith("xinfer-jax: there is no command 'a\\nb'")


def test_installed_names_and_programs_of_a_checkout_are_these_commands():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert {*scripts} == {"xinfer-jax", "xinfer-jax-chat", "xinfer-jax-batch", "xinfer-jax-serve"}
    for target in scripts.values():
        module, function = target.split(":")
        assert module == entry.__name__ and callable(getattr(entry, function))
    for name in COMMANDS:
        assert len((SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 20
